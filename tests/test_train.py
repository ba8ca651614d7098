"""The main job from end to end, as commands: learning, resuming bit for bit, stopping, refusing."""

import json
import os
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
import small_checkpoint as small

from bertjax import checkpoint, evaluate, step_folder
from bertjax.tools import fill_mask

ROOT = pathlib.Path(__file__).parents[1]
WORDS = [
    'river', 'mill', 'bell', 'tower', 'clerk', 'copper', 'barrel', 'lantern', 'winter', 'bread',
    'baker', 'boat', 'harbor', 'storm', 'gull', 'road', 'stone', 'field', 'north', 'south', 'old',
    'new', 'small', 'tall', 'quiet', 'loud', 'first', 'last']
CONFIG = '''
from configs import common

def get_config():
  config = common.get_config()
  config.log_every = 10
  config.model.update(dict(
      hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
      max_position_embeddings=64, dtype='float32'))
  config.phases = (common.phase(seq_length=32, batch_size=8, num_steps=60),
                   common.phase(seq_length=64, batch_size=8, num_steps=20))
  config.phases[1].seq_lengths = (40, 64)
  config.optimizer.update(dict(learning_rate=3e-3, warmup_steps=8))
  config.checkpoint.update(dict(every=7, keep_last=3, keep_every=0))
  config.heldout.update(dict(every=25, max_examples=40))
  return config
'''


def sentences(draw: random.Random, count: int) -> list[str]:
  """Sentences with something to learn: a word is followed by its neighbour in the list."""
  made = []
  for _ in range(count):
    first = draw.randrange(len(WORDS))
    made.append(' '.join(WORDS[(first + k) % len(WORDS)] for k in range(draw.randint(3, 9))))
  return made


@pytest.fixture(scope='module', autouse=True)
def _programs(tmp_path_factory):
  """Programs are compiled once for all commands here; the first run of each is as a user's."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv('JAX_COMPILATION_CACHE_DIR', str(tmp_path_factory.mktemp('programs')))
    patch.setenv('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0.2')
    yield


@pytest.fixture(scope='module')
def home(tmp_path_factory) -> pathlib.Path:
  """A folder with text, a vocabulary, shards and a configuration."""
  folder = tmp_path_factory.mktemp('home')
  draw = random.Random(0)
  documents = ['\n'.join(sentences(draw, draw.randint(4, 12))) for _ in range(120)]
  (folder / 'text.txt').write_text('\n\n'.join(documents), encoding='utf-8')
  vocabulary = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', *WORDS]
  (folder / 'vocab.txt').write_text('\n'.join(vocabulary) + '\n', encoding='utf-8')
  (folder / 'config.py').write_text(CONFIG, encoding='utf-8')
  done = run('bertjax.data.build', '--input', folder / 'text.txt', '--tokenizer',
             folder / 'vocab.txt', '--output', folder / 'shards', '--heldout', '0.1')
  assert done.returncode == 0, done.stderr
  return folder


def environment(devices: int = 1) -> dict[str, str]:
  names = {**os.environ, 'JAX_PLATFORMS': 'cpu', 'TF_CPP_MIN_LOG_LEVEL': '3',
           'XLA_FLAGS': f'--xla_force_host_platform_device_count={devices}'}
  names.pop('JAX_DISABLE_MOST_OPTIMIZATIONS', None)
  return names


def run(module: str, *arguments, devices: int = 1) -> subprocess.CompletedProcess:
  return subprocess.run([sys.executable, '-m', module, *map(str, arguments)], cwd=ROOT, text=True,
                        env=environment(devices), capture_output=True, timeout=600, check=False)


def arguments(home: pathlib.Path, workdir: pathlib.Path, *more: str) -> list[str]:
  return [f'--config={home}/config.py', f'--workdir={workdir}', f'--config.data.path={home}/shards',
          *more]


def train(home, workdir, *more, devices=1) -> subprocess.CompletedProcess:
  return run('bertjax.main', *arguments(home, workdir, *more), devices=devices)


def start(home, workdir, *more, devices=1) -> subprocess.Popen:
  command = [sys.executable, '-m', 'bertjax.main', *arguments(home, workdir, *more)]
  return subprocess.Popen(command, cwd=ROOT, env=environment(devices), stderr=subprocess.PIPE,
                          text=True)


def start_two(home, workdir, *more, devices=1) -> list[subprocess.Popen]:
  with socket.socket() as free:
    free.bind(('localhost', 0))
    port = free.getsockname()[1]
  return [start(home, workdir, f'--coordinator_address=localhost:{port}', '--num_processes=2',
                f'--process_id={number}', *more, devices=devices) for number in range(2)]


def wait_for_first_step(process: subprocess.Popen) -> None:
  for line in process.stderr:
    if 'step' in line and 'loss' in line:
      return


def copied(stopped: tuple[pathlib.Path, int], workdir: pathlib.Path) -> int:
  """Puts a copy of the stopped run into `workdir`; returns its step."""
  shutil.copytree(stopped[0], workdir, dirs_exist_ok=True)
  return stopped[1]


def final_hash(workdir: pathlib.Path) -> str:
  assert step_folder.find(workdir).name == '80'
  return checkpoint.parameter_hash(checkpoint.restore_params(workdir))


def records(workdir: pathlib.Path, split: str) -> list[dict]:
  lines = (workdir / 'metrics.jsonl').read_text(encoding='utf-8').splitlines()
  return [record for record in map(json.loads, lines) if record['split'] == split]


@pytest.fixture(scope='module')
def whole(home, tmp_path_factory) -> pathlib.Path:
  """The workdir of a run that nothing disturbed."""
  workdir = tmp_path_factory.mktemp('whole')
  done = train(home, workdir)
  assert done.returncode == 0, done.stderr
  assert 'bertjax pre-training' in done.stderr and 'from scratch' in done.stderr
  assert 'bertjax.tools.fill_mask' in done.stderr  # the next things to try
  return workdir


def test_it_learns_and_says_so(whole):
  train_records, heldout = records(whole, 'train'), records(whole, 'heldout')
  assert [r['step'] for r in heldout] == [25, 50, 75, 80]
  assert train_records[-1]['step'] == 80
  assert train_records[-1]['masked_lm_loss'] < train_records[0]['masked_lm_loss'] - 0.1
  # A few dozen examples: enough to see that it left the uniform guess, not to rank steps.
  assert heldout[-1]['masked_lm_loss'] < np.log(len(WORDS) + 5)
  assert {'masked_lm_perplexity', 'masked_lm_accuracy', 'next_sentence_accuracy'} <= set(heldout[0])
  assert list((whole / 'tensorboard').iterdir())


def test_evaluate_and_fill_mask_take_nothing_but_the_checkpoint(home, whole, capsys):
  done = run('bertjax.evaluate', '--checkpoint', whole, '--data', home / 'shards',
             '--batch_size', 8, '--max_examples', 40)
  values = json.loads(done.stdout)
  stored = records(whole, 'heldout')[-1]
  for name in ('masked_lm_loss', 'masked_lm_accuracy', 'next_sentence_loss'):
    np.testing.assert_allclose(values[name], stored[name], rtol=1e-5)
  assert fill_mask.main(['--checkpoint', str(whole), 'river [MASK] bell']) == 0
  assert '  1: ' in capsys.readouterr().out
  assert fill_mask.main(['--checkpoint', str(whole), 'river mill bell']) == 2
  assert 'no [MASK]' in capsys.readouterr().err


def test_b132_heldout_metrics_do_not_depend_on_batch_size_or_devices(home, whole, capsys):
  results = []
  for batch_size, devices in ((5, 1), (64, 1), (13, 8)):
    with small.devices(devices):
      assert evaluate.main(['--checkpoint', str(whole), '--data', f'{home}/shards', '--batch_size',
                            str(batch_size), '--max_examples', '13']) == 0
    results.append(json.loads(capsys.readouterr().out))
  assert results[0]['num_examples'] == 13
  for other in results[1:]:
    for name, value in results[0].items():
      if isinstance(value, float):
        np.testing.assert_allclose(other[name], value, rtol=1e-5, err_msg=name)


@pytest.mark.slow
def test_b058_b075_kill_at_any_moment_and_resume_ends_bit_for_bit_the_same(home, whole, tmp_path):
  """kill -9 that each hit a living run: start-up, restore, compile, steps and saves.

  BERTJAX_KILLS=10 kills more often than CI can wait.
  """
  draw, kills, began, after_start = random.Random(1), 0, 0, 0
  wanted = int(os.environ.get('BERTJAX_KILLS', '4'))
  while kills < wanted:
    began += 1
    process = start(home, tmp_path, '--config.checkpoint.every=1')
    if began % 2:  # at a random moment after the loop began, or anywhere in the run
      wait_for_first_step(process)
      time.sleep(draw.uniform(0, 0.3))
    else:
      time.sleep(draw.uniform(0.2, 9))
    if process.poll() is None:
      process.kill()
      kills += 1
      after_start += began % 2
    process.wait()
    process.stderr.close()
    assert began < 3 * wanted, f'only {kills} of {began} runs were alive when they were killed'
  assert after_start >= wanted // 3
  done = train(home, tmp_path)
  assert done.returncode == 0, done.stderr
  assert final_hash(tmp_path) == final_hash(whole)
  assert [r['step'] for r in records(tmp_path, 'heldout')] == [25, 50, 75, 80]
  np.testing.assert_allclose([r['masked_lm_loss'] for r in records(tmp_path, 'heldout')],
                             [r['masked_lm_loss'] for r in records(whole, 'heldout')], rtol=0)


@pytest.fixture(scope='module')
def stopped(home, tmp_path_factory) -> tuple[pathlib.Path, int]:
  """The workdir of a run that got SIGTERM, to be copied, and the step that it saved."""
  workdir = tmp_path_factory.mktemp('stopped')
  process = start(home, workdir)
  wait_for_first_step(process)
  process.send_signal(signal.SIGTERM)
  text = process.communicate(timeout=500)[1]
  assert process.returncode == 143 and 'after a save' in text, text
  return workdir, int(step_folder.find(workdir).name)


@pytest.mark.slow
def test_sigterm_saves_and_exits_143_and_the_rest_is_the_same(home, whole, stopped, tmp_path):
  saved = copied(stopped, tmp_path)
  assert 0 < saved < 80
  done = train(home, tmp_path)
  assert done.returncode == 0 and f'resumed at step {saved}' in done.stderr
  assert final_hash(tmp_path) == final_hash(whole)


def lines_until(process: subprocess.Popen, words: str, times: int = 1) -> None:
  for line in process.stderr:
    times -= words in line
    if not times:
      return
  raise AssertionError(f'it ended before it said {words!r}')


@pytest.mark.slow
def test_b129_a_signal_while_the_step_compiles_is_obeyed_after_a_save(home, tmp_path):
  process = start(home, tmp_path)
  lines_until(process, 'Compiling the step')
  process.send_signal(signal.SIGTERM)
  process.communicate(timeout=500)
  assert process.returncode == 143 and step_folder.find(tmp_path).name == '0'


@pytest.mark.slow
def test_b129_a_phase_is_saved_before_the_next_one_compiles(home, tmp_path):
  """For minutes, which a machine that is taken away does not have."""
  process = start(home, tmp_path, '--config.phases[0].num_steps=2')
  lines_until(process, 'Compiling the step', times=2)
  while process.poll() is None and not (tmp_path / 'checkpoints/2').exists():
    time.sleep(0.01)
  process.kill()
  process.communicate()
  assert (tmp_path / 'checkpoints/2').exists()


@pytest.mark.slow
def test_another_device_count_resumes_with_the_same_data(home, whole, stopped, tmp_path):
  """Not bit for bit (sums are in another order), but the same examples, masks and dropout."""
  copied(stopped, tmp_path)
  done = train(home, tmp_path, '--config.mesh.fsdp=2', devices=4)
  assert done.returncode == 0, done.stderr
  ours, theirs = (checkpoint.leaves(checkpoint.restore_params(w)) for w in (tmp_path, whole))
  for name in ours:
    np.testing.assert_allclose(ours[name], theirs[name], atol=2e-3, err_msg=name)
  np.testing.assert_allclose(records(tmp_path, 'heldout')[-1]['masked_lm_loss'],
                             records(whole, 'heldout')[-1]['masked_lm_loss'], rtol=1e-3)


@pytest.mark.slow
def test_b083_two_processes_resume_what_one_began_with_the_same_data(
    home, whole, stopped, tmp_path):
  """The rows of the processes are disjoint, or the weights would not be the same."""
  copied(stopped, tmp_path)
  both = start_two(home, tmp_path)
  texts = [process.communicate(timeout=500)[1] for process in both]
  assert [process.returncode for process in both] == [0, 0], texts
  assert 'in 2 process(es)' in texts[0] and 'resumed at step' in texts[0]
  ours, theirs = (checkpoint.leaves(checkpoint.restore_params(w)) for w in (tmp_path, whole))
  for name in ours:
    np.testing.assert_allclose(ours[name], theirs[name], atol=2e-3, err_msg=name)
  assert [r['step'] for r in records(tmp_path, 'heldout')] == [25, 50, 75, 80]


@pytest.mark.slow
def test_two_processes_of_four_devices_are_one_of_eight(home, tmp_path):
  """Four steps, each of both phases among them, on all three axes of the mesh."""
  asked = ['--config.mesh.data=2', '--config.mesh.fsdp=2', '--config.mesh.model=2',
           '--config.phases[0].num_steps=2', '--config.phases[1].num_steps=2',
           '--config.phases[1].seq_lengths=(64,)',
           '--config.optimizer.warmup_steps=0', '--config.log_every=1',
           '--config.model.hidden_dropout_prob=0', '--config.model.attention_probs_dropout_prob=0']
  one, two = tmp_path / 'one', tmp_path / 'two'
  done = train(home, one, *asked, devices=8)
  assert done.returncode == 0, done.stderr
  both = start_two(home, two, *asked, devices=4)
  texts = [process.communicate(timeout=500)[1] for process in both]
  assert [process.returncode for process in both] == [0, 0], texts
  assert '8 x cpu in 2 process(es)' in texts[0] and '8 x cpu in 1 process(es)' in done.stderr
  ours, theirs = (checkpoint.leaves(checkpoint.restore_params(w)) for w in (two, one))
  for name in ours:
    np.testing.assert_allclose(ours[name], theirs[name], atol=1e-5, err_msg=name)
  losses = [[(r['step'], r['loss']) for r in records(w, 'train')] for w in (two, one)]
  assert [step for step, _ in losses[0]] == [1, 2, 3, 4]
  np.testing.assert_allclose(*losses, rtol=1e-5)


@pytest.mark.slow
def test_sigterm_to_one_of_two_processes_saves_once_and_both_exit_143(home, tmp_path):
  both = start_two(home, tmp_path)
  wait_for_first_step(both[0])
  both[1].send_signal(signal.SIGTERM)
  texts = [process.communicate(timeout=500)[1] for process in both]
  assert [process.returncode for process in both] == [143, 143], texts
  saved = int(step_folder.find(tmp_path).name)
  assert 0 < saved < 80 and f'Stopped before step {saved}' in texts[0]


def test_another_configuration_on_a_workdir_is_refused_with_the_differences(home, whole):
  done = train(home, whole, '--config.seed=3', '--config.optimizer.b1=0.8')
  assert done.returncode == 2 and 'Traceback' not in done.stderr
  assert 'seed: stored 0, now 3' in done.stderr
  assert 'optimizer.b1: stored 0.9, now 0.8' in done.stderr


def test_b059_init_from_begins_a_new_schedule_and_says_so(home, whole, tmp_path, monkeypatch):
  """The ~ of --workdir=~/run is for us to expand."""
  monkeypatch.setenv('HOME', str(tmp_path))
  done = train(home, '~/run', f'--config.init_from={whole}', '--config.phases[1].num_steps=1',
               '--config.phases[0].num_steps=9')
  assert done.returncode == 0, done.stderr
  tmp_path /= 'run'
  assert f'weights of {whole} (step 80), a new schedule' in done.stderr
  first = records(tmp_path, 'train')[0]
  assert first['step'] == 1 and first['learning_rate'] == 0
  assert first['masked_lm_loss'] < records(whole, 'train')[0]['masked_lm_loss'] - 0.1


def test_b065_a_loss_that_is_not_finite_stops_the_run_and_the_last_checkpoint_is_good(
    home, tmp_path):
  done = train(home, tmp_path, '--config.optimizer.learning_rate=1e30',
               '--config.optimizer.clip_norm=0.0', '--config.checkpoint.every=1')
  assert done.returncode == 1 and 'Traceback' not in done.stderr
  assert 'is nan' in done.stderr or 'is inf' in done.stderr
  for leaf in checkpoint.leaves(checkpoint.restore_params(tmp_path)).values():
    assert np.isfinite(leaf).all()
  # Good means that it gives a finite loss, not only that its weights are numbers.
  done = run('bertjax.evaluate', '--checkpoint', tmp_path, '--data', home / 'shards')
  assert 0 < json.loads(done.stdout)['masked_lm_loss'] < 100


def test_no_such_configuration_and_a_workdir_that_is_a_file(home, tmp_path):
  done = run('bertjax.main', '--config=configs/nope.py', f'--workdir={tmp_path}/run')
  assert done.returncode == 2 and 'nope.py' in done.stderr and 'Traceback' not in done.stderr
  (tmp_path / 'file').write_text('x', encoding='utf-8')
  done = train(home, tmp_path / 'file')
  assert done.returncode == 2 and 'is a file' in done.stderr and 'Traceback' not in done.stderr


@pytest.mark.parametrize('more, mend', [
    (['--config.data.path=nowhere'], 'nowhere'),
    (['--config.phases[3].num_steps=3'], 'out of range'),
    (['--config.optimizer.learning_rat=1e-3'], 'Did you mean "learning_rate"'),
])
def test_what_a_user_can_mend_is_said_in_words(home, tmp_path, more, mend):
  done = train(home, tmp_path, *more)
  assert done.returncode == 2 and mend in done.stderr and 'Traceback' not in done.stderr
