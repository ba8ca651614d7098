"""The inspect tool: what it says of whole, damaged and absent checkpoints."""

import json
import os
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from bertjax import checkpoint
from bertjax.tools import inspect

CONFIG = {'model': {'hidden_size': 8, 'act': 'gelu'}, 'phases': [{'steps': 9}], 'empty': {}}


@pytest.fixture
def workdir(tmp_path):
  """Steps 3 and 6, and an empty folder for 9."""
  mesh = jax.make_mesh((4, 2), ('data', 'fsdp'), (jax.sharding.AxisType.Auto,) * 2)
  def put(array, *spec):
    return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))
  state = {'step': jnp.int32(6), 'params': {
      'pooler': {'kernel': put(jnp.ones((8, 8)), ('data', 'fsdp')), 'bias': put(jnp.zeros(8))},
      'embeddings': {'embedding': put(jnp.ones((16, 8), jnp.bfloat16), 'fsdp', None)}}}
  (tmp_path / 'tokenizer').mkdir()
  (tmp_path / 'tokenizer' / 'vocab.txt').write_bytes(b'[PAD]\n')
  with checkpoint.Checkpoints(
      tmp_path / 'run', save_every=3, keep_last=2, keep_every=0, tokenizer=tmp_path / 'tokenizer',
      metadata={'config': CONFIG, 'data_hash': 'ab12'}) as run:
    for step in (3, 6):
      run.save(step, state, {'phase': 0, 'step_in_phase': step, 'rows_seen': 8 * step})
  (tmp_path / 'run' / 'checkpoints' / '9').mkdir()
  return tmp_path / 'run'


def run(capsys, *flags) -> tuple[int, str, str]:
  code = inspect.main([str(flag) for flag in flags])
  said = capsys.readouterr()
  return code, said.out, said.err


def test_json_has_everything(workdir, capsys):
  code, out, _ = run(capsys, '--checkpoint', workdir, '--json')
  about = json.loads(out)
  params = checkpoint.restore_params(workdir)
  assert code == 0
  assert about['config'] == CONFIG
  assert about['position'] == {'phase': 0, 'step_in_phase': 6, 'rows_seen': 48}
  assert about['step'] == 6
  assert about['data_hash'] == 'ab12'
  assert about['parameters'] == [
      {'path': 'embeddings/embedding', 'shape': [16, 8], 'dtype': 'bfloat16',
       'partition': 'fsdp, None', 'count': 128},
      {'path': 'pooler/bias', 'shape': [8], 'dtype': 'float32', 'partition': 'replicated',
       'count': 8},
      {'path': 'pooler/kernel', 'shape': [8, 8], 'dtype': 'float32', 'partition': 'data+fsdp',
       'count': 64}]
  assert about['num_parameters'] == 200 == sum(np.size(leaf) for leaf in jax.tree.leaves(params))
  assert about['parameter_hash'] == checkpoint.parameter_hash(params)
  assert about['tokenizer_files'] == {'vocab.txt': 6}
  assert about['complete_steps'] == [3, 6]
  assert about['damaged_steps'] == {'9': 'the folder is empty'}


def test_text_for_people(workdir, capsys):
  code, out, _ = run(capsys, '--checkpoint', workdir, '--step', 3)
  lines = [line.split() for line in out.splitlines()]
  assert code == 0
  assert ['rows_seen', '24'] in lines
  assert ['model.hidden_size', '8'] in lines
  assert ['pooler/kernel', '8x8', 'float32', 'data+fsdp', '64'] in lines
  assert ['total', '200'] in lines
  assert '  complete: 3, 6' in out
  assert '  9 is damaged: the folder is empty' in out
  assert checkpoint.parameter_hash(checkpoint.restore_params(workdir)) in out


def test_the_three_kinds_of_path(workdir, tmp_path, capsys):
  copied = shutil.copytree(workdir / 'checkpoints' / '3', tmp_path / 'copied')
  for path, step in ((workdir, 6), (workdir / 'checkpoints', 6), (workdir / 'checkpoints' / '3', 3),
                     (copied, 3)):
    code, out, _ = run(capsys, '--checkpoint', path, '--json')
    assert code == 0
    assert json.loads(out)['step'] == step


@pytest.mark.parametrize('flags, said', [
    (['--checkpoint', 'nowhere'], 'does not exist'),
    (['--checkpoint', '.'], 'is no checkpoint'),
    (['--checkpoint', 'run', '--step', '4'], 'has no step 4; there are: [3, 6, 9]'),
    (['--checkpoint', 'run', '--step', '9'], 'not a complete checkpoint: the folder is empty'),
    (['--checkpoint', 'run/checkpoints/9'], 'not a complete checkpoint: the folder is empty'),
    (['--checkpoint', 'run/checkpoints/3', '--step', '6'], 'is one step and not step 6')])
def test_errors_in_words(workdir, monkeypatch, capsys, flags, said):
  monkeypatch.chdir(workdir.parent)
  code, out, err = run(capsys, *flags)
  assert (code, out) == (2, '')
  assert said in err
  assert err.count('\n') == 1


def test_as_a_command(workdir):
  command = [sys.executable, '-W', 'error', '-m', 'bertjax.tools.inspect']
  environment = {name: value for name, value in os.environ.items()
                 if name not in ('XLA_FLAGS', 'JAX_PLATFORMS')}
  done = subprocess.run([*command, '--checkpoint', str(workdir)], capture_output=True, text=True,
                        encoding='utf-8', env=environment, check=False)
  assert done.returncode == 0, done.stderr
  assert 'Parameter hash' in done.stdout
  assert 'Traceback' not in done.stderr
  done = subprocess.run([*command, '--checkpoint', str(workdir / 'none')], capture_output=True,
                        text=True, encoding='utf-8', env=environment, check=False)
  assert (done.returncode, done.stdout) == (2, '')
  assert 'Traceback' not in done.stderr
