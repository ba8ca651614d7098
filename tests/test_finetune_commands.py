"""Fine-tuning as commands: killed, stopped, in two processes, and given what cannot be used."""

import json
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
from test_finetune import make_home
from test_train import ROOT
from test_train import environment as plain_environment

from bertjax import checkpoint, step_folder

CONFIG = '''
from configs.finetune import glue

def get_config(text=''):
  config = glue.get_config('task=rte')
  config.seq_length, config.seq_lengths = 16, ()
  config.batch_size, config.num_epochs, config.log_every = 8, 5, 10
  config.optimizer.learning_rate = 3e-3
  config.checkpoint.every = 7
  config.evaluate.every = 13
  return config
'''
STEPS = 100
EVALUATED = [*range(13, STEPS, 13), STEPS]


@pytest.fixture(scope='module')
def home(tmp_path_factory):
  folder = make_home(tmp_path_factory.mktemp('home'))
  (folder / 'config.py').write_text(CONFIG, encoding='utf-8')
  return folder


def environment() -> dict[str, str]:
  """As users have it, but for the optimizing of programs that run for a second."""
  return plain_environment() | {'JAX_DISABLE_MOST_OPTIMIZATIONS': '1'}


def start(home, workdir, *more) -> subprocess.Popen:
  command = [sys.executable, '-m', 'bertjax.finetune.glue', f'--config={home}/config.py',
             f'--workdir={workdir}', f'--config.init_from={home}/encoder',
             f'--config.data.path={home}/glue', *more]
  return subprocess.Popen(command, cwd=ROOT, env=environment(), stderr=subprocess.PIPE,
                          stdout=subprocess.PIPE, text=True)


# What the commands do in turn, in one process: starting up is most of the work.
TOGETHER = '''
import sys
import jax
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
sys.path.insert(0, sys.argv[3])
from config import get_config
from bertjax.finetune import glue
for workdir, mode in ((sys.argv[4], "train"), (sys.argv[5], "eval"), (sys.argv[5], "predict")):
  config = get_config()
  config.mode, config.init_from = mode, f"{sys.argv[3]}/encoder"
  config.data.path = f"{sys.argv[3]}/glue"
  assert glue.fine_tune(config, workdir) == 0
'''


def start_two(home, run, copy) -> list[subprocess.Popen]:
  """Two processes that train together in `run`, then evaluate and predict what is in `copy`."""
  with socket.socket() as free:
    free.bind(('localhost', 0))
    port = free.getsockname()[1]
  return [subprocess.Popen(
      [sys.executable, '-c', TOGETHER, f'localhost:{port}', str(number), *map(
          str, (home, run, copy))],
      cwd=ROOT, env=environment(), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
          for number in range(2)]


def wait_for_lines(process: subprocess.Popen, count: int) -> None:
  """Until so many lines of losses and scores are said, of which there are about 18 in all."""
  for line in process.stderr:
    count -= 'loss' in line and f'/{STEPS}' in line
    if count <= 0:
      return


def ended(*processes) -> list[tuple[int, str]]:
  """Exit code and log of each."""
  return [(process.returncode, text) for process, text in [
      (process, process.communicate(timeout=500)[1]) for process in processes]]


def outcome(workdir) -> dict:
  """All that a run leaves that counts: the last weights, the best ones, the scores."""
  assert step_folder.find(workdir).name == str(STEPS)
  best = checkpoint.read_metadata(workdir / 'best')
  return {
      'last': checkpoint.parameter_hash(checkpoint.restore_params(workdir)),
      'best': checkpoint.parameter_hash(checkpoint.restore_params(workdir / 'best')),
      'step': best['step'], 'scores': best['scores'], 'dev': small.records(workdir, 'dev')}


@pytest.fixture(scope='module')
def whole(home, tmp_path_factory):
  """The workdir of a run that nothing disturbed."""
  workdir = tmp_path_factory.mktemp('whole')
  [(code, text)] = ended(start(home, workdir))
  assert code == 0, text
  for wanted in ('bertjax fine-tuning: RTE', f'weights of {home}/encoder (step 0)',
                 'newly initialised: classifier', 'shapes      8 x 16', 'padding',
                 'baseline', 'bertjax.convert.export'):
    assert wanted in text
  assert [record['step'] for record in small.records(workdir, 'dev')] == EVALUATED
  return workdir


@pytest.mark.slow
def test_killed_and_stopped_at_any_moment_it_ends_bit_for_bit_the_same(home, whole, tmp_path):
  """With dropout; also the best model, its scores and the record of the evaluations."""
  draw = random.Random(2)
  for _ in range(2):
    process = start(home, tmp_path, '--config.checkpoint.every=5')
    wait_for_lines(process, draw.randint(1, 3))
    time.sleep(draw.uniform(0, 0.1))
    assert process.poll() is None, 'it ended before it was to be killed'
    process.kill()
    process.communicate()
  process = start(home, tmp_path)
  wait_for_lines(process, 2)
  process.send_signal(signal.SIGTERM)
  [(code, text)] = ended(process)
  assert code == 143 and 'after a save' in text, text
  saved = int(step_folder.find(tmp_path).name)
  assert 0 < saved < STEPS
  [(code, text)] = ended(start(home, tmp_path))
  assert code == 0 and f'resumed at step {saved}' in text, text
  assert outcome(tmp_path) == outcome(whole)


def test_a_wrong_argument_behind_the_file_is_said_in_words(tmp_path):
  done = subprocess.run(
      [sys.executable, '-m', 'bertjax.finetune.glue', '--config=configs/finetune/glue.py:rte',
       f'--workdir={tmp_path}/run'],
      cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
  assert done.returncode == 2 and 'write task=VALUE' in done.stderr, done.stderr
  assert 'Traceback' not in done.stderr and not (tmp_path / 'run').exists()


@pytest.mark.slow
def test_two_processes_give_the_same_as_one(home, whole, tmp_path):
  for name in ('one', 'two'):
    shutil.copytree(whole, tmp_path / name)
  one = start(home, tmp_path / 'one', '--config.mode=predict')
  for code, text in ended(one, *start_two(home, tmp_path / 'run', tmp_path / 'two')):
    assert code == 0, text
  for ours, theirs in zip(small.records(tmp_path / 'run', 'dev'), small.records(whole, 'dev'),
                          strict=True):
    assert ours['step'] == theirs['step']
    # Sums are in another order, which grows: later on a few of the 61 rows may turn.
    first = ours['step'] == EVALUATED[0]
    np.testing.assert_allclose(ours['accuracy'], theirs['accuracy'], atol=1e-6 if first else 0.05)
    np.testing.assert_allclose(ours['loss'], theirs['loss'], atol=1e-5 if first else 2e-2)
  assert checkpoint.read_metadata(tmp_path / 'run/best')['head']['task'] == 'RTE'
  scores = json.loads((tmp_path / 'two/scores_dev.json').read_text(encoding='utf-8'))
  small.assert_close(scores, small.best_scores(whole) | {'split': 'dev'})
  files, theirs = (small.files(tmp_path / name / 'predictions') for name in ('one', 'two'))
  assert files == theirs and len(files['RTE.tsv'].splitlines()) == 14
