"""Saving and restoring the train state with Orbax; `step_folder` says what is on disk.

Orbax's `training.Checkpointer` takes an empty folder `9` for the newest checkpoint and counts it
among those to keep. So which steps are complete, and which may go, is decided here, and Orbax
writes and reads single steps. It is imported at the first save or restore: that takes half a
second, and the first step of a fresh run need not wait for it.
"""

import concurrent.futures
import errno
import fcntl
import functools
import hashlib
import json
import os
from typing import Any

import jax
import numpy as np
from absl import logging
from etils import epath

import bertjax
from bertjax import hosts, step_folder
from bertjax.step_folder import CheckpointError, find, read_metadata, tokenizer_folder

__all__ = ['CheckpointError', 'Checkpoints', 'find', 'leaves', 'parameter_hash', 'read_metadata',
           'restore_params', 'save_params', 'stored', 'tokenizer_folder']


@functools.cache
def _orbax():
  from orbax.checkpoint import v1
  # A dozen progress lines per save, and pages of traces of the error that we raise in one line.
  logging.get_absl_logger().addFilter(
      lambda record: 'orbax' not in record.pathname or record.levelname == 'WARNING')
  return v1


def _context(partial_load: bool = False):
  context = _orbax().Context()
  # zstd saves a fifth of the bytes of float32 weights and triples the CPU time of a save.
  context.array.saving.use_compression = False
  # Else a folder that cannot be made leaves writers behind that wait for it for five minutes.
  context.asynchronous.create_directories_asynchronously = False
  context.pytree.loading.partial_load = partial_load
  return context


class _Sidecar:
  """Plain files that are committed together with the arrays (an Orbax StatefulCheckpointable)."""

  def __init__(self, files: dict[str, bytes]):
    self._files = files

  async def save(self, directory):
    async def write():
      folder = await directory.await_creation()
      for name, content in self._files.items() if jax.process_index() == 0 else ():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return write()

  async def load(self, directory):
    # Orbax asks for this method; these are plain files, which step_folder reads without Orbax.
    raise TypeError(f'{directory} holds plain files: read them with step_folder.read_metadata')


def leaves(tree) -> dict[str, Any]:
  """The leaves of a tree by path, as in 'params/encoder/layers/output/kernel'."""
  flat = jax.tree_util.tree_flatten_with_path(tree)[0]
  return {jax.tree_util.keystr(path, simple=True, separator='/'): leaf for path, leaf in flat}


def parameter_hash(params) -> str:
  """SHA-256 over path, shape, dtype and bytes of every leaf, sorted by path: equal = bit-equal."""
  digest = hashlib.sha256()
  for name, leaf in sorted(leaves(params).items()):
    array = np.asarray(leaf)
    digest.update(f'{name} {array.shape} {array.dtype}\n'.encode())
    digest.update(array.tobytes())
  return digest.hexdigest()


def stored(folder: epath.Path) -> Any:
  """The state in a step as a tree of Orbax ArrayMetadata: shape, dtype, sharding_metadata.

  Raises:
    OSError: the description of the arrays is damaged.
  """
  tree = _orbax().metadata(folder, 'state').metadata
  if not tree:  # Orbax only logs a warning
    raise OSError('Orbax finds no arrays in it')
  return tree


def _check_fits(folder: epath.Path, have: dict[str, Any], want: dict[str, Any]):
  """Raises if the saved arrays are not those of the model; says so if types change."""
  both = [name for name in want if name in have]
  wrong = [f'{name} is not in the checkpoint' for name in want if name not in have]
  wrong += [f'{name} is not in the model' for name in have if name not in want]
  wrong += [f'{name} is {have[name].shape} in the checkpoint and {want[name].shape} in the model'
            for name in both if tuple(have[name].shape) != tuple(want[name].shape)]
  if wrong:
    more = f'; and {len(wrong) - 5} more' if len(wrong) > 5 else ''
    raise CheckpointError(f'{folder} does not fit this model: {"; ".join(wrong[:5])}{more}.')
  casts = sorted({f'{have[name].dtype} as {want[name].dtype}'
                  for name in both if have[name].dtype != want[name].dtype})
  if casts:
    logging.info('Reading from %s, as asked: %s', folder, ', '.join(casts))


def _load(folder: epath.Path, abstract, partial_load: bool = False):
  with _context(partial_load):
    return _orbax().load_checkpointables(folder, {'state': abstract})['state']


def _in_a_line(error: BaseException) -> str:
  logging.debug('The error in full', exc_info=error)
  return f'{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ""}'


def restore_params(path: epath.PathLike, step: int | None = None, abstract=None) -> dict[str, Any]:
  """The parameters alone as numpy arrays, whatever mesh saved them, on a machine of any kind.

  Args:
    path: a workdir, its checkpoints folder, or one step's folder.
    step: which step; None is the newest complete one.
    abstract: a tree with shape and dtype at its leaves; shapes are checked and types are
      honoured. None takes the parameters as they were saved.

  Raises:
    CheckpointError: none found, damaged, or other parameters than `abstract` asks for.
  """
  folder = find(path, step)
  try:
    have = stored(folder)['params']
    if abstract is not None:
      _check_fits(folder, leaves(have), leaves(abstract))
    # A broadcast scalar tells shape and type without taking the memory.
    like = jax.tree.map(lambda leaf: np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape),
                        have if abstract is None else abstract)
    return _load(folder, {'params': like}, partial_load=True)['params']
  except CheckpointError:
    raise
  except Exception as error:  # Orbax and tensorstore raise many kinds
    raise CheckpointError(f'{folder} cannot be read: {_in_a_line(error)}') from None


def save_params(workdir: epath.PathLike, step: int, params: Any, metadata: dict[str, Any],
                tokenizer: epath.PathLike | dict[str, bytes] | None = None) -> epath.Path:
  """Writes a checkpoint of parameters alone, as the only one in its workdir.

  For an import (step 0) and for the best model of a fine-tuning run. It is complete or absent: the
  checkpoint that it takes the place of goes when the new one is whole. Only one of the same step
  goes first, because both want its folder. All processes must call this.

  Args:
    workdir: the folder that gets `checkpoints/STEP`.
    step: the step that the parameters are of.
    params: a nested dict of arrays; with several processes, global jax arrays.
    metadata: JSON that goes beside them: config, head, data_hash, tokenizer_hash, ...
    tokenizer: a folder whose files come along, or the files by name.

  Returns:
    The folder of the step.

  Raises:
    CheckpointError: it could not be written. An earlier checkpoint is untouched.
  """
  root = step_folder.absolute(workdir) / step_folder.FOLDER
  folder = root / str(step)
  if jax.process_index() == 0:
    _remove_temporary(root)  # of a save that a kill cut short
  text = json.dumps({'step': step, 'position': {}, 'version': bertjax.__version__, **metadata},
                    indent=2, ensure_ascii=False)
  ours = _Sidecar({'metadata.json': text.encode(), **_tokenizer_files(tokenizer)})
  try:
    # Orbax describes NumPy arrays in another way; on disk all checkpoints shall look the same.
    params = jax.tree.map(
        lambda leaf: leaf if isinstance(leaf, jax.Array) else jax.device_put(leaf), params)
    state = {'step': np.asarray(step, np.int32), 'params': params}
    with _context():
      _orbax().save_checkpointables(folder, {'state': state, step_folder.OURS: ours},
                                    overwrite=True)
    _list_files(folder)
  except Exception as error:  # Orbax and tensorstore raise many kinds
    raise _failure(folder, error) from None
  if jax.process_index() == 0:
    for other, path in step_folder.steps(root).items():
      if other != step:
        _remove(path)
  hosts.agreed(step)  # no process may look for the newest before the others are gone
  return folder


def _tokenizer_files(tokenizer: epath.PathLike | dict[str, bytes] | None) -> dict[str, bytes]:
  """A tokenizer's files by their path inside `OURS`."""
  if not isinstance(tokenizer, dict):
    folder = epath.Path(tokenizer).expanduser() if tokenizer else None
    tokenizer = {name: (folder / name).read_bytes()
                 for name in (step_folder.sizes(folder) if folder else ())}
  return {f'tokenizer/{name}': content for name, content in tokenizer.items()}


def _list_files(folder: epath.Path):
  """Writes the list that shows later damage."""
  if jax.process_index() == 0:
    listing = folder / f'{step_folder.FILES}.part'
    listing.write_text(json.dumps(step_folder.sizes(folder)), encoding='utf-8')
    listing.rename(folder / step_folder.FILES)


def _remove(folder: epath.Path):
  (folder / step_folder.COMMIT).unlink(missing_ok=True)  # half of it must not look whole
  folder.rmtree()


def _remove_temporary(root: epath.Path, of: str = ''):
  for path in root.iterdir() if root.is_dir() else ():
    if path.name.startswith(of) and step_folder.TEMPORARY in path.name:
      logging.warning('Removing %s, left by a save that never finished', path)
      path.rmtree()


def _failure(folder: epath.Path, error: BaseException) -> CheckpointError:
  """The error to raise, after giving back the space that the failed save takes."""
  if jax.process_index() == 0:
    try:
      _remove_temporary(folder.parent, f'{folder.name}.')
    except Exception as other:  # a writer may still be at it; must not hide what went wrong first
      logging.warning('Could not remove what is left of the save of %s: %s', folder, other)
  full = 'No space left' in str(error) or getattr(error, 'errno', None) == errno.ENOSPC
  whole = [step for step, path in step_folder.steps(folder.parent).items()
           if step_folder.damage(path) is None]
  return CheckpointError(
      f'Saving {folder} failed{": no space left on the disk" if full else ""} '
      f'({_in_a_line(error)}). Complete checkpoints there: {whole or "none"}.')


class Checkpoints:
  """The checkpoints of one run; a context manager that waits for the last save.

  Args:
    workdir: the run's folder, local or gs://.
    save_every: steps between saves.
    keep_last: the newest N stay; one more is on disk until the newest is complete.
    keep_every: steps divisible by this stay for ever; 0: none.
    metadata: JSON that goes into every step (config, data_hash, ...).
    tokenizer: a folder whose files go into every step.
    asynchronous: write in the background, from a copy of the arrays on the host.
  """

  def __init__(self, workdir: epath.PathLike, *, save_every: int, keep_last: int, keep_every: int,
               metadata: dict[str, Any], tokenizer: epath.PathLike | None = None,
               asynchronous: bool = True):
    if save_every < 1 or keep_last < 1 or keep_every < 0:
      raise ValueError(f'save_every {save_every} and keep_last {keep_last} must be at least 1, '
                       f'keep_every {keep_every} at least 0 (0: keep none for ever)')
    self.root = step_folder.absolute(workdir) / step_folder.FOLDER
    self._save_every, self._keep_last, self._keep_every = save_every, keep_last, keep_every
    self._asynchronous = asynchronous
    self._metadata = {'version': bertjax.__version__, **metadata}
    json.dumps(self._metadata)  # what cannot be written must fail now, not at the first save
    self._tokenizer = _tokenizer_files(tokenizer)
    self._good: set[int] = set()  # saved or restored by this run
    self._unreadable: dict[int, str] = {}  # whole by their list of files, yet not to be read
    self._passed_over: dict[int, str] = {}
    self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix='checkpoint')
    self._pending: concurrent.futures.Future | None = None
    self._lock: int | None = None

  def __enter__(self):
    if self.root.parent.exists():
      self._keep_others_out()
    return self

  def __exit__(self, kind, error, trace):
    try:
      self.wait()
    except CheckpointError as failure:
      if error is None:
        raise
      logging.error('%s', failure)  # must not hide what stopped the run
    finally:
      self._pool.shutdown()
      if self._lock is not None:
        os.close(self._lock)

  def claim(self):
    """Makes the workdir, and keeps other runs out of it from now on.

    Raises:
      CheckpointError: another run is at work there.
    """
    if jax.process_index() == 0:
      self.root.parent.mkdir(parents=True, exist_ok=True)
      self._keep_others_out()

  def _keep_others_out(self):
    """Locks a local workdir: a second run would sweep away what this one is saving.

    The system lets go of the lock however this process ends.

    Raises:
      CheckpointError: another run is at work there.
    """
    workdir = str(self.root.parent)
    if self._lock is not None or jax.process_index() or '://' in workdir:
      return
    handle = os.open(workdir, os.O_RDONLY)
    try:
      fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
      os.close(handle)
      raise CheckpointError(f'another run is at work in {workdir}: wait for it or stop it, or take '
                            'another --workdir') from error
    except OSError as error:
      logging.warning('%s cannot be locked (%s): see that no second run is started in it', workdir,
                      error)
    self._lock = handle

  def latest(self) -> int | None:
    """The newest complete step, None if there is none; sweeps away what dead runs left behind."""
    self.wait()
    newest = -1
    if jax.process_index() == 0:
      _remove_temporary(self.root)
      for step, folder in step_folder.steps(self.root).items():
        reason = self._unreadable.get(step) or step_folder.damage(folder)
        if reason is None:
          newest = step
          break
        if self._passed_over.get(step) != reason:  # `restore` looks again
          logging.warning('Passed over %s: %s', folder, reason)
        self._passed_over[step] = reason
    newest = hosts.agreed(newest)
    return None if newest < 0 else newest

  def save(self, step: int, state: Any, position: dict[str, Any], force: bool = False) -> bool:
    """Saves if the step is due (or `force`); the state may be donated as soon as this returns.

    Args:
      step: the state's step, which the loop knows without waiting for the device.
      state: the TrainState.
      position: where in the data it stands: phase, step_in_phase, rows_seen.
      force: save although not due (the last step, a termination signal).

    Returns:
      True if a save was started; False if not due, or this run has the step on disk already.

    Raises:
      CheckpointError: this save, or the one before, failed. Earlier checkpoints are untouched.
    """
    if not force and (step == 0 or step % self._save_every):
      return False
    self.wait()
    if step in self._good:
      return False
    self.claim()
    folder = self.root / str(step)
    if hosts.agreed(folder.is_dir() and step not in self._unreadable
                    and step_folder.damage(folder) is None):
      raise CheckpointError(f'{folder} is a complete checkpoint that this run neither saved nor '
                            'resumed from. Resume from it, or move it away.')
    text = json.dumps({'step': step, 'position': position, **self._metadata}, indent=2)
    ours = _Sidecar({'metadata.json': text.encode(), **self._tokenizer})
    try:
      with _context():  # overwrite: what may stand there is damaged
        response = _orbax().save_checkpointables_async(
            folder, {'state': state, step_folder.OURS: ours}, overwrite=True)
    except Exception as error:  # Orbax and tensorstore raise many kinds
      raise _failure(folder, error) from None
    self._pending = self._pool.submit(self._finish, response, step, folder)
    if not self._asynchronous:
      self.wait()
    return True

  def discard(self, step: int):
    """Removes a step whose weights turned out to be ruined: to go on from it leads nowhere."""
    self.wait()
    folder = self.root / str(step)
    if jax.process_index() == 0 and folder.is_dir():
      logging.warning('Removing %s: its weights give no finite loss', folder)
      _remove(folder)
      older = [number for number, other in step_folder.steps(self.root).items()
               if step_folder.damage(other) is None]
      logging.warning('The newest checkpoint is now %s',
                      f'step {max(older)}' if older else 'none: the same command begins anew')
    self._good.discard(step)

  def wait(self):
    """Waits for the save under way and raises CheckpointError if it failed."""
    pending, self._pending = self._pending, None
    if pending is not None:
      pending.result()

  def restore(self, abstract_state: Any, step: int | None = None) -> tuple[Any, dict[str, Any]]:
    """Restores a state onto the mesh of `abstract_state`, whatever mesh saved it.

    Args:
      abstract_state: ShapeDtypeStructs with shardings, as from `state.abstract`.
      step: that step and no other; None is the newest that is complete and can be read (with
        several processes, the newest complete one, and that it cannot be read is an error).

    Returns:
      The state and its data position.

    Raises:
      CheckpointError: nothing to restore, or the saved arrays are not those of the model.
    """
    chosen = self.latest() if step is None else step
    if chosen is None:
      raise CheckpointError(f'{self.root} has no complete checkpoint in it.')
    folder = find(self.root, chosen)
    try:
      _check_fits(folder, leaves(stored(folder)), leaves(abstract_state))
      state, position = _load(folder, abstract_state), read_metadata(folder)['position']
    except CheckpointError:
      raise
    except Exception as error:  # Orbax and tensorstore raise many kinds
      self._unreadable[chosen] = f'it cannot be read: {_in_a_line(error)}'
      if step is None and jax.process_count() == 1 and self.latest() is not None:
        return self.restore(abstract_state)
      raise CheckpointError(f'{folder}: {self._unreadable[chosen]}') from None
    self._good.add(chosen)
    if step is None:
      self._prune(chosen)  # a run killed between a save and its pruning left one too many
    return state, position

  def _finish(self, response, step: int, folder: epath.Path):
    """In the background: waits for the commit, lists the files, then lets old steps go."""
    try:
      response.result()
      _list_files(folder)
    except Exception as error:  # Orbax and tensorstore raise many kinds
      raise _failure(folder, error) from None
    self._good.add(step)
    self._unreadable.pop(step, None)
    self._prune(step)

  def _prune(self, newest: int):
    """Removes steps up to `newest` that need not be kept; later ones are not this run's."""
    kept = 0
    for step, folder in step_folder.steps(self.root).items() if jax.process_index() == 0 else ():
      if step > newest or (self._keep_every and step % self._keep_every == 0
                           and kept >= self._keep_last):
        continue
      if kept < self._keep_last and (step in self._good or (
          step not in self._unreadable and step_folder.damage(folder) is None)):
        kept += 1
        continue
      try:
        _remove(folder)
      except Exception as error:  # gs:// raises TensorFlow's kinds; the new one is safe
        logging.warning('Could not remove %s: %s', folder, error)
