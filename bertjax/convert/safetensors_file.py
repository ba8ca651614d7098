"""The safetensors format: 8 bytes of header length, a JSON header, then the arrays' bytes.

Written out here because the package `safetensors` writes bfloat16 only through frameworks, and its
errors name no tensor.

Source: the format's description in the README of huggingface/safetensors.
"""

import json
import math
from typing import Any

import ml_dtypes
import numpy as np
from etils import epath

from bertjax.convert.names import ConversionError

_TYPES = {
    'F64': np.dtype(np.float64), 'F32': np.dtype(np.float32), 'F16': np.dtype(np.float16),
    'BF16': np.dtype(ml_dtypes.bfloat16), 'I64': np.dtype(np.int64), 'I32': np.dtype(np.int32),
    'I16': np.dtype(np.int16), 'I8': np.dtype(np.int8), 'U8': np.dtype(np.uint8),
    'BOOL': np.dtype(np.bool_),
}
_NAMES = {dtype: name for name, dtype in _TYPES.items()}


def read(path: epath.Path) -> dict[str, np.ndarray]:
  """The arrays of a file by name, read-only.

  Raises:
    ConversionError: no such format, cut off, or an array of a type that NumPy cannot hold.
  """
  content = path.read_bytes()
  header, start = _header(content, path)
  tensors = {}
  for name, entry in header.items():
    if name != '__metadata__':
      tensors[name] = _tensor(content, start, name, entry, path)
  return tensors


def _header(content: bytes, path: epath.Path) -> tuple[dict[str, Any], int]:
  start = 8 + int.from_bytes(content[:8], 'little')
  if len(content) < 8 or start > len(content):
    raise ConversionError(f'{path}: not a whole safetensors file: {len(content)} bytes, header '
                          f'said to end at byte {start}; copy it again')
  try:
    header = json.loads(content[8:start])
  except ValueError as error:
    raise ConversionError(f'{path}: not a safetensors file: its header is not JSON '
                          f'({error})') from None
  if not isinstance(header, dict):
    raise ConversionError(f'{path}: not a safetensors file: its header is no JSON object')
  return header, start


def _tensor(content: bytes, start: int, name: str, entry: Any, path: epath.Path) -> np.ndarray:
  try:
    kind, shape, (first, last) = entry['dtype'], entry['shape'], entry['data_offsets']
    count = math.prod(shape)
    whole = 0 <= first <= last and all(size >= 0 for size in shape)
  except (KeyError, TypeError, ValueError):
    raise ConversionError(f'{path}: the header entry of {name} is damaged: {entry!r}') from None
  if kind not in _TYPES:
    raise ConversionError(f'{path}: {name} is of type {kind}; known are {", ".join(_TYPES)}')
  if not whole or last - first != count * _TYPES[kind].itemsize:
    raise ConversionError(f'{path}: {name} has bytes {first} to {last}, which is not the size of '
                          f'{kind} {shape}')
  if start + last > len(content):
    raise ConversionError(f'{path}: cut off in {name}: {len(content)} bytes, but this tensor ends '
                          f'at byte {start + last}; copy the file again')
  flat = np.frombuffer(content, _TYPES[kind].newbyteorder('<'), count, start + first)
  return flat.reshape(shape)


def write(path: epath.Path, tensors: dict[str, np.ndarray]):
  """Writes arrays as Transformers does, by name; `path` must not be looked at before it returns.

  Args:
    path: the file.
    tensors: float32, bfloat16, ... arrays of any shape.
  """
  header: dict[str, Any] = {'__metadata__': {'format': 'pt'}}  # Transformers refuses files without
  end = 0
  for name, array in sorted(tensors.items()):
    header[name] = {'dtype': _NAMES[array.dtype], 'shape': list(array.shape),
                    'data_offsets': [end, end + array.nbytes]}
    end += array.nbytes
  text = json.dumps(header, separators=(',', ':')).encode()
  text += b' ' * (-len(text) % 8)  # so that the arrays begin aligned
  with path.open('wb') as file:
    file.write(len(text).to_bytes(8, 'little') + text)
    for _, array in sorted(tensors.items()):
      file.write(array.tobytes())
