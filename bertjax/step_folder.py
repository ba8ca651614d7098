"""What a checkpoint looks like on disk, how to find one, and whether it is whole. Reads only.

`WORKDIR/checkpoints/STEP/` is complete in itself and may be copied anywhere:

    state/                   the TrainState, written by Orbax (any later mesh can read it)
    bertjax/metadata.json    step, data position, resolved config, content hash of the data, version
    bertjax/tokenizer/       the tokenizer's files, byte for byte
    commit_success.txt       Orbax's mark. It writes into STEP.orbax-checkpoint-tmp and renames; on
                             gs://, which has no renames, the mark alone says that the save ended
    files.json               every file with its size, added right after: shows damage done later
"""

import json
from typing import Any

from absl import logging
from etils import epath

FOLDER = 'checkpoints'
COMMIT, FILES, OURS = 'commit_success.txt', 'files.json', 'bertjax'
TEMPORARY = '.orbax-checkpoint-tmp'
_NEEDED = (COMMIT, '_CHECKPOINT_METADATA', 'state/_METADATA', f'{OURS}/metadata.json')


class CheckpointError(RuntimeError):
  """A checkpoint could not be written, found or read; the message names the folder and why."""


def absolute(path: epath.PathLike) -> epath.Path:
  """The path from its root, as Orbax wants it; epath's own `absolute` breaks gs://."""
  path = epath.Path(path).expanduser()
  return path if '://' in str(path) else path.absolute()


def sizes(folder: epath.Path, prefix: str = '') -> dict[str, int]:
  """Bytes of every file under a folder, by relative path."""
  found = {}
  for path in folder.iterdir():
    if path.is_dir():
      found.update(sizes(path, f'{prefix}{path.name}/'))
    else:
      found[prefix + path.name] = path.stat().length
  return found


def damage(folder: epath.Path) -> str | None:
  """Why this step folder is not a complete checkpoint, in words; None if it is one."""
  present = sizes(folder)
  if not present:
    return 'the folder is empty'
  if COMMIT not in present:
    return f'its save (or its removal) never finished: there is no {COMMIT}'
  expected: dict[str, int | None] = dict.fromkeys(_NEEDED)
  if FILES in present:  # absent only if the run was killed in the moment after the commit
    try:
      expected |= json.loads((folder / FILES).read_text(encoding='utf-8'))
    except ValueError:
      return f'{FILES} is damaged'
  for name, size in expected.items():
    if name not in present:
      return f'{name} is missing'
    if present[name] == 0 and size is None:
      return f'{name} is empty'
    if size is not None and present[name] != size:
      return f'{name} has {present[name]} bytes instead of {size}'
  return None


def steps(root: epath.Path) -> dict[int, epath.Path]:
  """The step folders in a checkpoints folder, newest first, complete or not."""
  names = [path.name for path in root.iterdir()] if root.is_dir() else []
  numbers = sorted((int(n) for n in names if n.isdecimal() and str(int(n)) == n), reverse=True)
  return {number: root / str(number) for number in numbers if (root / str(number)).is_dir()}


def locate(path: epath.PathLike) -> tuple[epath.Path, bool]:
  """The checkpoints folder of a workdir (or itself), False; or one step's folder, True.

  Raises:
    CheckpointError: the path is none of these.
  """
  path = absolute(path)
  if (path / OURS).is_dir():
    return path, True
  if (path / FOLDER).is_dir():
    return path / FOLDER, False
  if path.is_dir() and (steps(path) or path.name == FOLDER):
    return path, False
  if path.is_dir() and path.name.isdecimal():
    return path, True
  what = 'is no checkpoint' if path.is_dir() else (
      'is not a folder' if path.exists() else 'does not exist')
  raise CheckpointError(f'{path} {what}. Give a workdir, its {FOLDER} folder or one step in it.')


def find(path: epath.PathLike, step: int | None = None) -> epath.Path:
  """The folder of a complete step.

  Args:
    path: a workdir, its checkpoints folder, or one step's folder.
    step: which step; None takes the newest complete one and logs what was passed over.

  Raises:
    CheckpointError: there is none, or the step that was asked for is absent or damaged.
  """
  root, single = locate(path)
  if single and step is not None and root.name != str(step):
    raise CheckpointError(f'{root} is one step and not step {step}; give its workdir.')
  found = {step: root} if single else steps(root)
  if step is not None and step not in found:
    raise CheckpointError(f'{root} has no step {step}; there are: {sorted(found) or "none"}.')
  reasons = []
  for number in found if step is None else [step]:
    reason = damage(found[number])
    if reason is None:
      return found[number]
    reasons.append(f'{found[number]} is not a complete checkpoint: {reason}.')
    if step is None and not single:
      logging.warning('Passed over: %s', reasons[-1])
  raise CheckpointError(' '.join(reasons) or f'{root} has no checkpoint in it yet.')


def read_metadata(path: epath.PathLike, step: int | None = None) -> dict[str, Any]:
  """What was saved beside the arrays: step, position, config, data_hash, version; see `find`."""
  return json.loads((find(path, step) / OURS / 'metadata.json').read_text(encoding='utf-8'))


def tokenizer_folder(path: epath.PathLike, step: int | None = None) -> epath.Path:
  """The folder with the tokenizer's files inside a step, for `tokenizer.load`; see `find`."""
  return find(path, step) / OURS / 'tokenizer'
