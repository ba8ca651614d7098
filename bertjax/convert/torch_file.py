"""Reads pytorch_model.bin without torch: a pickle of a state dict, with raw arrays beside it.

A pickle may call any function of any module. This reader knows the few names that a state dict of
plain tensors is made of, and refuses a file that asks for anything else before anything is called.

Both of torch's formats are read: the zip archive (since 1.6), and the run of pickles before it, in
which most BERT checkpoints of 2018 to 2020 are kept.

Source: torch/serialization.py and torch/_utils.py (what they write; no code is taken).
"""

import collections
import io
import math
import pickle
import zipfile
from typing import Any

import ml_dtypes
import numpy as np
from etils import epath

from bertjax.convert.names import ConversionError

_STORAGES = {
    'DoubleStorage': np.float64, 'FloatStorage': np.float32, 'HalfStorage': np.float16,
    'BFloat16Storage': ml_dtypes.bfloat16, 'LongStorage': np.int64, 'IntStorage': np.int32,
    'ShortStorage': np.int16, 'CharStorage': np.int8, 'ByteStorage': np.uint8,
    'BoolStorage': np.bool_,
}
_MAGIC, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001  # the beginning of the older format


class _Storage:
  """A named run of numbers; in the older format they come after the pickle that names it."""

  def __init__(self, dtype: Any, key: str, size: int):
    self.dtype, self.key, self.size = np.dtype(dtype).newbyteorder('<'), key, size
    self.data: np.ndarray | None = None


class _Tensor:
  """A view of a storage, taken when the numbers are there."""

  def __init__(self, storage: _Storage, offset: int, shape: tuple, strides: tuple):
    self.storage, self.offset, self.shape, self.strides = storage, offset, shape, strides

  def array(self) -> np.ndarray:
    data = self.storage.data
    numbers = (self.offset, *self.shape, *self.strides)
    if (data is None or len(self.shape) != len(self.strides)
        or any(not isinstance(number, int) or number < 0 for number in numbers)):
      raise ValueError('its description is damaged')
    if math.prod(self.shape) == 0:
      return np.zeros(self.shape, data.dtype)
    last = self.offset + sum(
        (size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
    if last >= len(data):
      raise ValueError(f'it ends at number {last + 1} of a storage of {len(data)}')
    strides = [stride * data.itemsize for stride in self.strides]
    return np.lib.stride_tricks.as_strided(
        data[self.offset:], self.shape, strides, writeable=False)


def _tensor(storage, offset, shape, strides, *others) -> _Tensor:
  if not isinstance(storage, _Storage):
    raise pickle.UnpicklingError('a tensor of no storage')
  return _Tensor(storage, offset, tuple(shape), tuple(strides))


def _parameter(tensor, *others) -> _Tensor:
  return tensor


class _Unpickler(pickle.Unpickler):
  """Knows only what a state dict is made of."""

  _KNOWN = {
      ('collections', 'OrderedDict'): collections.OrderedDict,
      ('torch._utils', '_rebuild_tensor_v2'): _tensor,
      ('torch._utils', '_rebuild_parameter'): _parameter,
      # Storage types are only named, in `persistent_load`: their NumPy type stands for them.
      **{('torch', name): dtype for name, dtype in _STORAGES.items()},
  }

  def __init__(self, file, storages: dict[str, _Storage]):
    super().__init__(file)
    self._storages = storages

  def find_class(self, module: str, name: str) -> Any:
    if (module, name) not in self._KNOWN:
      raise pickle.UnpicklingError(
          f'it asks for {module}.{name}, which a state dict of plain tensors does not need and '
          'which could run any code; save the state dict as model.safetensors')
    return self._KNOWN[module, name]

  def persistent_load(self, pid: Any) -> _Storage:
    kind, dtype, key, _, size, *_ = pid
    if kind != 'storage':
      raise pickle.UnpicklingError(f'a {kind!r} where a storage should be')
    return self._storages.setdefault(key, _Storage(dtype, key, size))


def read(path: epath.Path) -> dict[str, np.ndarray]:
  """The arrays of a state dict by name, read-only.

  Raises:
    ConversionError: no such format, cut off, or a pickle that holds more than plain tensors.
  """
  content = io.BytesIO(path.read_bytes())
  try:
    state = _read_zip(content) if zipfile.is_zipfile(content) else _read_pickles(content)
    if not isinstance(state, dict) or not all(
        isinstance(name, str) and isinstance(tensor, _Tensor) for name, tensor in state.items()):
      raise ValueError('it holds something else than a state dict of tensors by name')
  except Exception as error:  # pickle and zipfile raise many kinds on a damaged file
    raise ConversionError(f'{path}: cannot be read as a torch file: {error}') from None
  arrays = {}
  for name, tensor in state.items():
    try:
      arrays[name] = tensor.array()
    except ValueError as error:
      raise ConversionError(f'{path}: {name} cannot be read: {error}') from None
  return arrays


def _read_zip(content: io.BytesIO) -> Any:
  """An archive with data.pkl, data/KEY for each storage, and maybe byteorder."""
  with zipfile.ZipFile(content) as archive:
    pickles = [name for name in archive.namelist() if name.split('/', 1)[-1] == 'data.pkl']
    if len(pickles) != 1:
      raise ValueError('a zip archive without data.pkl in it')
    root = pickles[0].removesuffix('data.pkl')
    if f'{root}byteorder' in archive.namelist() and archive.read(f'{root}byteorder') != b'little':
      raise ValueError('its numbers are big-endian; save it on a little-endian machine')
    storages: dict[str, _Storage] = {}
    state = _Unpickler(io.BytesIO(archive.read(pickles[0])), storages).load()
    for key, storage in storages.items():
      storage.data = np.frombuffer(archive.read(f'{root}data/{key}'), storage.dtype)
  return state


def _read_pickles(content: io.BytesIO) -> Any:
  """Magic number, protocol, system, the state dict, the storages' keys, then their numbers."""
  content.seek(0)
  storages: dict[str, _Storage] = {}
  magic, protocol, system = (_Unpickler(content, storages).load() for _ in range(3))
  if (magic, protocol) != (_MAGIC, _PROTOCOL) or not system.get('little_endian'):
    raise ValueError('neither a zip archive nor the older format of little-endian pickles')
  state = _Unpickler(content, storages).load()
  for key in _Unpickler(content, storages).load():
    storage = storages[key]
    if int.from_bytes(content.read(8), 'little') != storage.size:
      raise ValueError(f'storage {key} has another size than its tensors say')
    data = content.read(storage.size * storage.dtype.itemsize)
    storage.data = np.frombuffer(data, storage.dtype)
  return state
