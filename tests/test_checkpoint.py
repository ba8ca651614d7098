"""Checkpoints: exact, asynchronous, complete or passed over, readable on any mesh."""

import concurrent.futures
import dataclasses
import errno
import gc
import os
import pathlib
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl import logging
from etils import epath
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from bertjax import checkpoint, step_folder
from bertjax.checkpoint import CheckpointError, Checkpoints


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
  """The fields of `bertjax.state.TrainState`, without a model behind them."""
  step: jax.Array
  params: dict
  opt_state: Any


VOCABULARY = '[PAD]\r\ncafé\n中\n'.encode()  # line ends and non-ASCII must survive
METADATA = {'config': {'model': {'hidden_size': 8}, 'seed': 0}, 'data_hash': 'ab12'}


def make_state(step: int, size: int = 32) -> TrainState:
  """A state whose every number follows from the step."""
  params = {
      'embeddings': {'word': jnp.arange(8 * size, dtype=jnp.float32).reshape(8, size) + step},
      'encoder': {'layers': {'kernel': jnp.full((2, 8, 4), step, jnp.float32) / 3},
                  'bias': jnp.full((4,), step, jnp.bfloat16)},
  }
  optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
  return TrainState(step=jnp.int32(step), params=params, opt_state=optimizer.init(params))


def shard(state: TrainState) -> TrainState:
  """Rows over all devices of this process, like fsdp."""
  mesh = jax.make_mesh((jax.device_count(),), ('fsdp',))
  def where(leaf):
    split = leaf.ndim and leaf.shape[0] % jax.device_count() == 0
    return NamedSharding(mesh, PartitionSpec('fsdp') if split else PartitionSpec())
  return jax.device_put(state, jax.tree.map(where, state))


def abstract(state: TrainState) -> TrainState:
  return jax.tree.map(
      lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)


def position(step: int) -> dict:
  return {'phase': 0, 'step_in_phase': step, 'rows_seen': 8 * step}


def assert_same(left, right):
  left, right = checkpoint.leaves(left), checkpoint.leaves(right)
  assert left.keys() == right.keys()
  for name in left:
    one, other = np.asarray(left[name]), np.asarray(right[name])
    assert one.dtype == other.dtype, name
    assert one.tobytes() == other.tobytes(), name


def open_run(workdir, **settings) -> Checkpoints:
  given_settings = {'save_every': 3, 'keep_last': 5, 'keep_every': 0, 'metadata': METADATA}
  return Checkpoints(workdir, **(given_settings | settings))


def folder_of(workdir, step: int) -> pathlib.Path:
  return pathlib.Path(workdir) / 'checkpoints' / str(step)


def names(workdir) -> list[str]:
  return sorted((path.name for path in (pathlib.Path(workdir) / 'checkpoints').iterdir()),
                key=lambda name: (len(name), name))


def write_steps(workdir, *steps: int, **settings):
  with open_run(workdir, **settings) as run:
    for step in steps:
      assert run.save(step, make_state(step), position(step), force=True)


def array_file(step: pathlib.Path) -> pathlib.Path:
  """The largest file of array data in a step."""
  files = [path for path in (step / 'state').rglob('*') if path.is_file() and '/d/' in str(path)]
  return max(files, key=lambda path: path.stat().st_size)


@pytest.fixture
def tokenizer(tmp_path):
  folder = tmp_path / 'tokenizer'
  folder.mkdir()
  (folder / 'vocab.txt').write_bytes(VOCABULARY)
  (folder / 'tokenizer_config.json').write_text('{"type": "wordpiece"}', encoding='utf-8')
  return folder


@pytest.fixture
def warned(monkeypatch):
  """What was logged as a warning."""
  said = []
  monkeypatch.setattr(logging, 'warning', lambda text, *args: said.append(text % args))
  return said


@pytest.fixture
def at_file_operations(monkeypatch):
  """Installs a function to be called with (name, path) before whatever changes the disk."""
  kind = type(epath.Path('/tmp'))
  installed = []

  def watched(name, original):
    def changed(self, *args, **options):
      for before in installed:
        before(name, self)
      return original(self, *args, **options)
    return changed

  for name in ('write_bytes', 'write_text', 'mkdir', 'rename', 'replace', 'unlink', 'rmtree'):
    monkeypatch.setattr(kind, name, watched(name, getattr(kind, name)))
  yield installed.append
  installed.clear()


# ---- saving and restoring ----------------------------------------------------------------------


def test_round_trip_is_exact(tmp_path):
  state = shard(make_state(7))
  with open_run(tmp_path) as run:
    assert run.latest() is None
    assert run.save(7, state, position(7), force=True)
  with open_run(tmp_path) as run:
    assert run.latest() == 7
    got, where = run.restore(abstract(state))
  assert isinstance(got, TrainState)
  assert_same(got, state)
  assert where == position(7)
  assert jax.tree.map(lambda leaf: leaf.sharding, got) == jax.tree.map(
      lambda leaf: leaf.sharding, state)


def test_saves_when_due_and_never_twice(tmp_path):
  with open_run(tmp_path) as run:
    saved = [step for step in range(8) if run.save(step, make_state(step), position(step))]
    assert saved == [3, 6]
    assert not run.save(6, make_state(6), position(6), force=True)  # a signal right after a save
    assert run.save(7, make_state(7), position(7), force=True)
  assert names(tmp_path) == ['3', '6', '7']
  with open_run(tmp_path) as run:
    run.restore(abstract(make_state(0)))
    assert not run.save(7, make_state(7), position(7), force=True)  # a signal right after resuming


def test_a_ruined_step_goes_even_if_it_is_the_only_one(tmp_path):
  """Else the same command would go on from it for ever."""
  with open_run(tmp_path) as run:
    run.save(5, make_state(5), position(5), force=True)
    run.save(6, make_state(6), position(6), force=True)
    run.discard(6)
    assert run.latest() == 5
    run.discard(5)
    assert run.latest() is None
    run.discard(5)  # gone already


def test_a_second_run_is_kept_out_of_a_workdir_that_is_in_use(tmp_path):
  (tmp_path / 'run').mkdir()
  with open_run(tmp_path / 'run'):
    with pytest.raises(CheckpointError, match='another run is at work'), open_run(tmp_path / 'run'):
      pass
    with open_run(tmp_path / 'other'):
      pass
  with open_run(tmp_path / 'run'):  # the first one is over
    pass
  # A folder that neither has found yet is of the first that begins to train.
  with open_run(tmp_path / 'new') as first, open_run(tmp_path / 'new') as second:
    assert not (tmp_path / 'new').exists()
    first.claim()
    with pytest.raises(CheckpointError, match='another run is at work'):
      second.claim()


def test_donated_arrays_are_saved_as_they_were(tmp_path):
  """`save` returns with its own copy: the next step may overwrite the buffers at once."""
  overwrite = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf * 0 - 1, state),
                      donate_argnums=0)
  overwrite(make_state(0, size=200_000))  # compiled before, so that nothing gives the save time
  with open_run(tmp_path, save_every=1) as run:
    for step in (1, 2, 3):
      state = jax.block_until_ready(make_state(step, size=200_000))
      assert run.save(step, state, position(step))
      jax.block_until_ready(overwrite(state))
    like = abstract(make_state(0, size=200_000))
    run.wait()
    for step in (1, 2, 3):
      assert_same(run.restore(like, step)[0], make_state(step, size=200_000))


def test_saving_goes_on_in_the_background(tmp_path, at_file_operations):
  """`save` returns while the files are still unwritten, and `wait` waits for them."""
  gate = threading.Event()
  at_file_operations(lambda name, path: name != 'write_bytes' or gate.wait(20))
  with open_run(tmp_path) as run:
    assert run.save(3, make_state(3), position(3))
    assert not folder_of(tmp_path, 3).exists()
    gate.set()
    run.wait()
    assert names(tmp_path) == ['3']


def test_metadata_and_tokenizer_travel_with_one_step(tmp_path, tokenizer):
  write_steps(tmp_path / 'run', 3, tokenizer=tokenizer)
  shutil.rmtree(tokenizer)
  copied = tmp_path / 'elsewhere' / 'best'
  shutil.copytree(folder_of(tmp_path / 'run', 3), copied)
  shutil.rmtree(tmp_path / 'run')
  metadata = checkpoint.read_metadata(copied)
  assert metadata == {**METADATA, 'step': 3, 'position': position(3),
                      'version': checkpoint.bertjax.__version__}
  folder = checkpoint.tokenizer_folder(copied)
  assert (folder / 'vocab.txt').read_bytes() == VOCABULARY
  assert sorted(path.name for path in folder.iterdir()) == ['tokenizer_config.json', 'vocab.txt']
  assert_same(checkpoint.restore_params(copied), make_state(3).params)


def test_every_step_has_its_own_position(tmp_path):
  write_steps(tmp_path, 3, 6)
  for where in (tmp_path, tmp_path / 'checkpoints'):
    assert checkpoint.read_metadata(where)['position'] == position(6)
    assert checkpoint.read_metadata(where, 3)['position'] == position(3)
  assert checkpoint.read_metadata(folder_of(tmp_path, 3))['position'] == position(3)


@settings(max_examples=5, deadline=None)
@given(files=st.dictionaries(st.sampled_from(['vocab.txt', 'spiece.model', 'deep/added.json']),
                             st.binary(max_size=200)),
       config=st.recursive(st.none() | st.booleans() | st.integers() | st.text(),
                           lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_any_tokenizer_and_config_come_back_as_they_were(tmp_path_factory, files, config):
  workdir = tmp_path_factory.mktemp('run')
  source = tmp_path_factory.mktemp('tokenizer')
  for name, content in files.items():
    (source / name).parent.mkdir(exist_ok=True)
    (source / name).write_bytes(content)
  write_steps(workdir, 3, metadata={'config': config}, tokenizer=source)
  assert checkpoint.read_metadata(workdir)['config'] == config
  folder = folder_of(workdir, 3) / 'bertjax' / 'tokenizer'
  assert {name: (folder / name).read_bytes() for name in files} == files


def test_metadata_that_is_not_json_fails_at_the_start(tmp_path):
  with pytest.raises(TypeError, match='not JSON serializable'):
    open_run(tmp_path, metadata={'config': object()})


def test_impossible_settings(tmp_path):
  for wrong in ({'save_every': 0}, {'keep_last': 0}, {'keep_every': -1}):
    with pytest.raises(ValueError, match=next(iter(wrong))):
      open_run(tmp_path, **wrong)


def test_cloud_paths_stay_as_they_are():
  assert str(open_run('gs://bucket/run').root) == 'gs://bucket/run/checkpoints'


# ---- what does not fit -------------------------------------------------------------------------


def test_another_model_is_an_error_and_not_passed_over(tmp_path):
  write_steps(tmp_path, 3, 6)
  like = abstract(make_state(0, size=16))
  with open_run(tmp_path) as run, pytest.raises(CheckpointError) as caught:
    run.restore(like)
  assert ('params/embeddings/word is (8, 32) in the checkpoint and (8, 16) in the model'
          in str(caught.value))
  like.params['pooler'] = like.params.pop('embeddings')
  with pytest.raises(CheckpointError) as caught:
    checkpoint.restore_params(tmp_path, abstract=like.params)
  assert 'pooler/word is not in the checkpoint' in str(caught.value)
  assert 'embeddings/word is not in the model' in str(caught.value)


def test_b124_asked_types_are_honoured_and_the_default_is_what_was_saved(tmp_path):
  state = make_state(3)
  write_steps(tmp_path, 3)
  saved = checkpoint.restore_params(tmp_path)
  assert saved['embeddings']['word'].dtype == np.float32
  assert saved['encoder']['bias'].dtype == jnp.bfloat16
  for asked in (jnp.bfloat16, jnp.float32):
    like = jax.tree.map(lambda leaf, asked=asked: jax.ShapeDtypeStruct(leaf.shape, asked),
                        state.params)
    got = checkpoint.restore_params(tmp_path, abstract=like)
    assert_same(got, jax.tree.map(lambda leaf, asked=asked: leaf.astype(asked), state.params))


# ---- B070: another number of devices -----------------------------------------------------------

RESTORE = """
import sys, warnings
warnings.simplefilter('error')
sys.path.insert(0, sys.argv[1])
import jax, numpy as np
from tests import test_checkpoint as here
assert jax.device_count() == int(sys.argv[3]), jax.device_count()
state = here.shard(here.make_state(3))
with here.open_run(sys.argv[2]) as run:
  got, position = run.restore(here.abstract(state))
here.assert_same(got, state)
assert position == here.position(3)
assert len(got.params['embeddings']['word'].sharding.device_set) == jax.device_count()
params = here.checkpoint.restore_params(sys.argv[2])
assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(params))
here.assert_same(params, state.params)
"""


def run_python(code: str, *args, devices: int = 1, **options) -> subprocess.CompletedProcess:
  """A process of its own with so many virtual devices."""
  root = pathlib.Path(__file__).parents[1]
  flags = f'--xla_force_host_platform_device_count={devices}'
  return subprocess.run(
      [sys.executable, '-c', code, str(root), *map(str, args)], capture_output=True, text=True,
      encoding='utf-8', env=os.environ | {'XLA_FLAGS': flags, 'JAX_PLATFORMS': 'cpu'},
      check=False, timeout=300, **options)


@pytest.mark.parametrize('devices', [1, 4])
def test_b070_saved_on_eight_devices_restored_on_fewer(tmp_path, devices):
  assert jax.device_count() == 8
  with open_run(tmp_path) as run:
    run.save(3, shard(make_state(3)), position(3))
  done = run_python(RESTORE, tmp_path, devices, devices=devices)
  assert done.returncode == 0, done.stderr


TWO_PROCESSES = """
import sys
sys.path.insert(0, sys.argv[1])
process, processes, port = map(int, sys.argv[3:6])
import jax
if processes > 1:
  jax.config.update('jax_cpu_collectives_implementation', 'gloo')
  jax.distributed.initialize(f'127.0.0.1:{port}', processes, process)
import numpy as np
from tests import test_checkpoint as here
mesh = jax.make_mesh((jax.device_count(),), ('fsdp',))
rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('fsdp'))
def make(step):
  content = np.arange(32, dtype=np.float32).reshape(8, 4) + step
  return {'w': jax.make_array_from_callback((8, 4), rows, lambda index: content[index])}
def same(one, other):
  return all(np.array_equal(np.asarray(a.data), np.asarray(b.data))
             for a, b in zip(one['w'].addressable_shards, other['w'].addressable_shards))
with here.open_run(sys.argv[2], save_every=1, keep_last=2) as run:
  step = run.latest() or 0
  if step:
    state, where = run.restore(jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), make(0)))
    assert same(state, make(step)) and where == here.position(step)
  for step in range(step + 1, step + 4):
    assert run.save(step, make(step), here.position(step))
"""


@pytest.mark.slow
def test_b070_two_processes_then_one_then_two(tmp_path):
  """Each process writes its shards, and the number of processes may change."""
  empty_step = tmp_path / 'checkpoints' / '99'
  (empty_step.parent / '5.orbax-checkpoint-tmp').mkdir(parents=True)
  empty_step.mkdir()
  for processes, kept in ((2, ['2', '3', '99']), (1, ['5', '6', '99']), (2, ['8', '9', '99'])):
    with socket.socket() as free:
      free.bind(('127.0.0.1', 0))
      port = free.getsockname()[1]
    with concurrent.futures.ThreadPoolExecutor(processes) as pool:
      runs = [pool.submit(run_python, TWO_PROCESSES, tmp_path, process, processes, port, devices=2)
              for process in range(processes)]
    for done in runs:
      assert done.result().returncode == 0, done.result().stderr
    assert names(tmp_path) == kept


# ---- B071, B073: what dead runs and full disks leave behind --------------------------------------


def empty(step: pathlib.Path):
  shutil.rmtree(step)
  step.mkdir()
  return 'the folder is empty'


def without_mark(step: pathlib.Path):
  (step / 'commit_success.txt').unlink()
  return 'its save (or its removal) never finished: there is no commit_success.txt'


def array_deleted(step: pathlib.Path):
  path = array_file(step)
  path.unlink()
  return f'{path.relative_to(step)} is missing'


def array_truncated(step: pathlib.Path):
  path = array_file(step)
  size = path.stat().st_size
  os.truncate(path, size // 2)
  return f'{path.relative_to(step)} has {size // 2} bytes instead of {size}'


def metadata_gone(step: pathlib.Path):
  (step / 'bertjax' / 'metadata.json').unlink()
  return 'bertjax/metadata.json is missing'


def list_damaged(step: pathlib.Path):
  (step / 'files.json').write_text('{"state/', encoding='utf-8')
  return 'files.json is damaged'


def list_gone_and_metadata_empty(step: pathlib.Path):
  (step / 'files.json').unlink()
  (step / 'state' / '_METADATA').write_bytes(b'')
  return 'state/_METADATA is empty'


DAMAGES = [empty, without_mark, array_deleted, array_truncated, metadata_gone, list_damaged,
           list_gone_and_metadata_empty]


@pytest.mark.parametrize('harm', DAMAGES)
def test_b071_a_damaged_step_is_passed_over_with_its_reason(tmp_path, warned, harm):
  write_steps(tmp_path, 3, 9)
  reason = harm(folder_of(tmp_path, 9))
  state = make_state(3)
  with open_run(tmp_path) as run:
    assert run.latest() == 3
    assert warned == [f'Passed over {folder_of(tmp_path, 9)}: {reason}']
    got, where = run.restore(abstract(state))
    assert_same(got, state)
    assert where == position(3)
    for read in (lambda: run.restore(abstract(state), 9),
                 lambda: checkpoint.restore_params(tmp_path, 9),
                 lambda: checkpoint.read_metadata(folder_of(tmp_path, 9))):
      with pytest.raises(CheckpointError) as caught:
        read()
      said = f'{folder_of(tmp_path, 9)} is not a complete checkpoint: {reason}.'
      assert said in str(caught.value)
    assert_same(checkpoint.restore_params(tmp_path), state.params)
    assert run.save(9, make_state(9), position(9))  # training gets there again and replaces it
  with open_run(tmp_path) as run:
    assert_same(run.restore(abstract(state))[0], make_state(9))


# When one array of many cannot be read, Orbax closes its event loop, and tensorstore's answers for
# the others arrive at a closed loop.
@pytest.mark.filterwarnings('ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning')
def test_b071_damage_that_only_reading_shows(tmp_path, warned):
  """The right sizes with wrong content: the step before is restored, and retention knows."""
  write_steps(tmp_path, 3, 6, 9)
  for path in (folder_of(tmp_path, 9) / 'state').rglob('manifest.ocdbt'):
    path.write_bytes(b'x' * path.stat().st_size)
  state = make_state(6)
  with open_run(tmp_path, keep_last=1) as run:
    assert run.latest() == 9
    got, where = run.restore(abstract(state))
    assert_same(got, state)
    assert where == position(6)
    assert any('9: it cannot be read: ' in text for text in warned)
    assert names(tmp_path) == ['6', '9']
    run.save(9, make_state(9), position(9))
  assert names(tmp_path) == ['9']
  with pytest.raises(CheckpointError, match='cannot be read'):
    for path in (folder_of(tmp_path, 9) / 'state').rglob('manifest.ocdbt'):
      path.write_bytes(b'x' * path.stat().st_size)
    checkpoint.restore_params(tmp_path)
  time.sleep(0.5)  # so that those answers come now, and not in the test after this one
  gc.collect()


def test_b071_nothing_complete(tmp_path):
  folder_of(tmp_path, 9).mkdir(parents=True)
  with open_run(tmp_path) as run:
    assert run.latest() is None
    with pytest.raises(CheckpointError, match='has no complete checkpoint'):
      run.restore(abstract(make_state(0)))
  with pytest.raises(CheckpointError, match='9 is not a complete checkpoint: the folder is empty'):
    checkpoint.restore_params(tmp_path)


@pytest.mark.parametrize('where, said', [
    ('nowhere', 'does not exist'), ('file', 'is not a folder'), ('folder', 'is no checkpoint'),
    ('begun', 'has no checkpoint in it yet')])
def test_paths_that_hold_no_checkpoint(tmp_path, where, said):
  (tmp_path / 'file').write_text('', encoding='utf-8')
  (tmp_path / 'folder').mkdir()
  (tmp_path / 'begun' / 'checkpoints').mkdir(parents=True)
  with pytest.raises(CheckpointError, match=said):
    checkpoint.find(tmp_path / where)


def test_an_absent_step_lists_those_present(tmp_path):
  write_steps(tmp_path, 3, 6)
  with pytest.raises(CheckpointError, match=r'has no step 4; there are: \[3, 6\]'):
    checkpoint.find(tmp_path, 4)
  with pytest.raises(CheckpointError, match='is one step and not step 3'):
    checkpoint.find(folder_of(tmp_path, 6), 3)


def test_b073_temporary_folders_of_dead_runs_go(tmp_path):
  for name in ('6.orbax-checkpoint-tmp', '9.orbax-checkpoint-tmp-17'):
    left = tmp_path / 'checkpoints' / name / 'state'
    left.mkdir(parents=True)
    (left / 'half').write_bytes(b'half')
  with pytest.raises(CheckpointError, match='has no checkpoint in it yet'):
    checkpoint.find(tmp_path)
  with open_run(tmp_path) as run:
    assert run.latest() is None
    assert names(tmp_path) == []
    run.save(6, make_state(6), position(6))
    assert run.latest() == 6
  assert names(tmp_path) == ['6']


def test_b073_a_temporary_folder_does_not_block_its_step(tmp_path):
  (tmp_path / 'checkpoints' / '6.orbax-checkpoint-tmp' / 'state').mkdir(parents=True)
  with open_run(tmp_path) as run:  # without `latest`
    run.save(6, make_state(6), position(6))
    run.wait()
    assert names(tmp_path) == ['6']
    assert_same(run.restore(abstract(make_state(0)))[0], make_state(6))


def test_b071_killed_at_every_change_of_the_disk(tmp_path, at_file_operations):
  """A copy of the folder before each operation is what kill -9 at that moment leaves."""
  run_dir, copies, one_at_a_time = tmp_path / 'run', [], threading.Lock()

  def copy_if_there(source, target):  # tensorstore's own threads rename files meanwhile
    if os.path.exists(source):
      shutil.copyfile(source, target)

  def snapshot(name, path):
    with one_at_a_time:
      if str(path).startswith(str(run_dir)):
        copies.append(shutil.copytree(run_dir, tmp_path / f'killed{len(copies)}',
                                      copy_function=copy_if_there))

  with open_run(run_dir, keep_last=1) as run:
    run.save(3, make_state(3), position(3))
    run.wait()
    at_file_operations(snapshot)
    run.save(6, make_state(6), position(6))
  assert len(copies) >= 8
  seen = []
  for copy in copies:
    with open_run(copy, keep_last=1) as run:
      state, where = run.restore(abstract(make_state(0)))
      seen.append(int(state.step))
      assert_same(state, make_state(seen[-1]))
      assert where == position(seen[-1])
    assert names(copy) == [str(seen[-1])]
  assert seen == sorted(seen)
  assert set(seen) == {3, 6}


TRAIN = """
import sys
sys.path.insert(0, sys.argv[1])
from tests import test_checkpoint as here
with here.open_run(sys.argv[2], save_every=1, keep_last=2) as run:
  step = 0
  if run.latest() is not None:
    state, where = run.restore(here.abstract(here.make_state(0, size=20_000)))
    step = int(state.step)
    here.assert_same(state, here.make_state(step, size=20_000))
    assert where == here.position(step)
  print('at', step, flush=True)
  while True:
    step += 1
    run.save(step, here.make_state(step, size=20_000), here.position(step))
    print('at', step, flush=True)
"""


@pytest.mark.slow
def test_kill_9_at_random_moments_of_saves(tmp_path):
  draw = np.random.default_rng(0)
  root = pathlib.Path(__file__).parents[1]
  kills = int(os.environ.get('BERTJAX_KILLS', '4'))  # CI cannot wait for more
  reached = 0
  for _ in range(kills):
    with subprocess.Popen([sys.executable, '-c', TRAIN, str(root), str(tmp_path)],
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          env=os.environ | {'XLA_FLAGS': ''}) as child:
      resumed = child.stdout.readline()
      assert resumed, child.stderr.read()
      assert int(resumed.split()[1]) >= reached
      for _ in range(int(draw.integers(2, 6))):
        reached = int(child.stdout.readline().split()[1]) - 1  # that save is under way
      time.sleep(draw.uniform(0, 0.2))
      child.send_signal(signal.SIGKILL)
  with open_run(tmp_path) as run:
    state, where = run.restore(abstract(make_state(0, size=20_000)))
  assert int(state.step) >= reached >= 2 * kills
  assert_same(state, make_state(int(state.step), size=20_000))
  assert where == position(int(state.step))


# ---- retention ---------------------------------------------------------------------------------


def test_keeps_the_last_and_every_kth(tmp_path):
  write_steps(tmp_path, *range(1, 12), keep_last=2, keep_every=4)
  assert names(tmp_path) == ['4', '8', '10', '11']
  write_steps(tmp_path, 12, 13, keep_last=1, keep_every=4)
  assert names(tmp_path) == ['4', '8', '12', '13']


@settings(max_examples=5, deadline=None)
@given(st.sets(st.integers(1, 30), min_size=1, max_size=8), st.integers(1, 4), st.integers(0, 5))
def test_retention_is_the_union_of_both_rules(tmp_path_factory, steps, last, every):
  workdir = tmp_path_factory.mktemp('run')
  write_steps(workdir, *sorted(steps), keep_last=last, keep_every=every)
  kept = set(sorted(steps)[-last:]) | {step for step in steps if every and step % every == 0}
  assert names(workdir) == [str(step) for step in sorted(kept)]


def test_b079_never_more_than_one_above_the_limit_and_the_new_one_first(
    tmp_path, at_file_operations):
  write_steps(tmp_path, 1, 2, keep_last=2)
  most, removed = [], []

  def look(name, path):
    if (tmp_path / 'checkpoints').exists():
      most.append(len(names(tmp_path)))
    if name == 'rmtree' and path.name.isdecimal():
      removed.append((path.name, step_folder.damage(epath.Path(folder_of(tmp_path, 2 + int(
          path.name))))))

  at_file_operations(look)
  with open_run(tmp_path, keep_last=2) as run:
    run.restore(abstract(make_state(0)))
    for step in (3, 4, 5):
      run.save(step, make_state(step), position(step), force=True)
  assert max(most) == 3
  assert removed == [('1', None), ('2', None), ('3', None)]
  assert names(tmp_path) == ['4', '5']


def test_b079_one_too_many_after_a_kill_goes_on_resume(tmp_path):
  write_steps(tmp_path, 1, 2, 3, keep_last=3)
  with open_run(tmp_path, keep_last=2) as run:
    run.restore(abstract(make_state(0)))
    assert names(tmp_path) == ['2', '3']


def test_damaged_steps_do_not_count_among_those_to_keep(tmp_path):
  write_steps(tmp_path, 3, 6)
  array_deleted(folder_of(tmp_path, 6))
  folder_of(tmp_path, 99).mkdir()
  with open_run(tmp_path, keep_last=2) as run:
    run.restore(abstract(make_state(0)))
    assert names(tmp_path) == ['3', '6', '99']
    run.save(7, make_state(7), position(7), force=True)
  assert names(tmp_path) == ['3', '7', '99']


def test_later_steps_of_another_run_are_not_touched(tmp_path):
  write_steps(tmp_path, 3, 6, 9)
  with open_run(tmp_path, keep_last=1) as run:
    run.restore(abstract(make_state(0)), 3)
    run.save(5, make_state(5), position(5), force=True)
    run.wait()
    assert names(tmp_path) == ['5', '6', '9']
    with pytest.raises(CheckpointError, match='neither saved nor resumed from'):
      run.save(6, make_state(6), position(6))
  assert names(tmp_path) == ['5', '6', '9']


# ---- B072, B079: saves that fail ---------------------------------------------------------------


def fail_from(step: int, number: int):
  def before(name, path):
    if name == 'write_bytes' and f'/{step}.orbax-checkpoint-tmp/' in str(path):
      raise OSError(number, os.strerror(number), str(path))
  return before


def test_b072_a_failed_save_stops_the_run_by_the_next_one(tmp_path, at_file_operations):
  at_file_operations(fail_from(6, errno.EIO))
  with open_run(tmp_path, keep_last=1) as run:
    run.save(3, make_state(3), position(3))
    assert run.save(6, make_state(6), position(6))  # fails in the background
    with pytest.raises(CheckpointError) as caught:
      run.save(9, make_state(9), position(9))
  assert f'Saving {folder_of(tmp_path, 6)} failed' in str(caught.value)
  assert 'Input/output error' in str(caught.value)
  assert 'Complete checkpoints there: [3]' in str(caught.value)
  assert names(tmp_path) == ['3']  # not removed for the one that failed, and nothing half-written
  with open_run(tmp_path) as run:
    assert_same(run.restore(abstract(make_state(0)))[0], make_state(3))


def test_b072_a_failed_last_save_is_an_error_on_the_way_out(tmp_path, at_file_operations):
  at_file_operations(fail_from(3, errno.EIO))
  with pytest.raises(CheckpointError, match='Input/output error'), open_run(tmp_path) as run:
    run.save(3, make_state(3), position(3))
  with pytest.raises(KeyError), open_run(tmp_path) as run:  # and never hides another error
    run.save(3, make_state(3), position(3))
    raise KeyError


def test_b072_the_folder_is_gone(tmp_path):
  with open_run(tmp_path) as run:
    run.save(3, make_state(3), position(3))
    run.wait()
    (tmp_path / 'checkpoints').rename(tmp_path / 'aside')
    (tmp_path / 'checkpoints').write_text('in the way', encoding='utf-8')
    with pytest.raises(CheckpointError, match='Saving .*/6 failed'):
      run.save(6, make_state(6), position(6))
      run.wait()


def test_b079_disk_full_says_so(tmp_path, at_file_operations):
  at_file_operations(fail_from(6, errno.ENOSPC))
  with open_run(tmp_path, keep_last=1, asynchronous=False) as run:
    run.save(3, make_state(3), position(3))
    with pytest.raises(CheckpointError, match='no space left on the disk'):
      run.save(6, make_state(6), position(6))
  assert names(tmp_path) == ['3']


def test_b079_file_size_limit_in_the_array_writer(tmp_path):
  """A write of arrays that the system refuses half-way, as a quota does."""
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  with open_run(tmp_path, keep_last=1) as run:
    run.save(3, make_state(3), position(3))
    run.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, limits[1]))
    try:
      with pytest.raises(CheckpointError, match='File too large'):
        run.save(6, make_state(6, size=100_000), position(6))
        run.wait()
    finally:
      resource.setrlimit(resource.RLIMIT_FSIZE, limits)
  assert names(tmp_path) == ['3']
  with open_run(tmp_path) as run:
    assert_same(run.restore(abstract(make_state(0)))[0], make_state(3))


def test_b079_a_small_disk(tmp_path):
  disk = tmp_path / 'disk'
  disk.mkdir()
  mount = ['mount', '-t', 'tmpfs', '-o', 'size=1m', 'tmpfs', str(disk)]
  if not shutil.which('mount') or subprocess.run(mount, capture_output=True).returncode:
    pytest.skip('may not mount a tmpfs here')
  try:
    with open_run(disk, keep_last=2) as run, pytest.raises(CheckpointError) as caught:
      for step in (3, 6, 9):
        run.save(step, make_state(step, size=5000), position(step))
        run.wait()
    assert 'no space left on the disk' in str(caught.value)
    assert str(disk) in str(caught.value)
    left = names(disk)
    assert left
    shutil.copytree(disk, tmp_path / 'larger')
  finally:
    subprocess.run(['umount', str(disk)], check=True)
  with open_run(tmp_path / 'larger') as run:
    assert run.latest() == int(left[-1])
    state, where = run.restore(abstract(make_state(0, size=5000)))
    assert_same(state, make_state(where['step_in_phase'], size=5000))


# ---- hash and start-up -------------------------------------------------------------------------


def test_parameter_hash_sees_every_bit_path_and_type(tmp_path):
  params = make_state(3).params
  digest = checkpoint.parameter_hash(params)
  assert digest == checkpoint.parameter_hash(shard(make_state(3)).params)
  assert digest == checkpoint.parameter_hash(dict(reversed(params.items())))
  write_steps(tmp_path, 3)
  assert digest == checkpoint.parameter_hash(checkpoint.restore_params(tmp_path))
  kernel = params['encoder']['layers']['kernel']
  for other in (kernel.at[0, 0, 0].set(jnp.nextafter(kernel[0, 0, 0], 9.0)), kernel.T,
                kernel.astype(jnp.bfloat16), -kernel):
    params['encoder']['layers']['kernel'] = other
    assert checkpoint.parameter_hash(params) != digest
  params['encoder']['layers'] = {'weights': kernel}
  assert checkpoint.parameter_hash(params) != digest


def test_orbax_is_not_imported_before_it_is_needed(tmp_path):
  code = """
import sys
sys.path.insert(0, sys.argv[1])
from bertjax import checkpoint
run = checkpoint.Checkpoints(sys.argv[2], save_every=1, keep_last=1, keep_every=0, metadata={})
assert run.latest() is None
assert not any(name.startswith('orbax') for name in sys.modules)
"""
  done = run_python(code, tmp_path)
  assert done.returncode == 0, done.stderr
