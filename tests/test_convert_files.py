"""The file formats: safetensors, and torch files without torch; whole, damaged and hostile."""

import collections
import io
import json
import os
import pickle
import sys
import types
import zipfile

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from etils import epath
from hypothesis import given, settings
from hypothesis import strategies as st

from bertjax.convert import hugging_face, safetensors_file, torch_file
from bertjax.convert.names import ConversionError

ARRAYS = {'a.weight': np.arange(6, dtype=np.float32).reshape(2, 3), 'empty': np.zeros((0, 4)),
          'b': np.array(7, np.int64), 'half': np.ones(3, np.float16)}

# --- safetensors -----------------------------------------------------------------------------


def same(left: dict, right: dict):
  assert left.keys() == right.keys()
  for name in left:
    assert left[name].dtype == right[name].dtype and left[name].shape == right[name].shape
    assert left[name].tobytes() == right[name].tobytes(), name


def test_what_we_write_the_package_reads_and_the_other_way_round(tmp_path):
  path = epath.Path(tmp_path) / 'model.safetensors'
  safetensors_file.write(path, ARRAYS)
  same(safetensors.numpy.load_file(path), ARRAYS)
  safetensors.numpy.save_file(ARRAYS, path)
  same(safetensors_file.read(path), ARRAYS)


def test_b124_bfloat16_comes_back_bit_for_bit(tmp_path):
  path = epath.Path(tmp_path) / 'model.safetensors'
  every = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16)
  safetensors_file.write(path, {'w': every})
  assert safetensors_file.read(path)['w'].dtype == ml_dtypes.bfloat16
  same(safetensors_file.read(path), {'w': every})
  assert json.loads(path.read_bytes()[8:].split(b'}}')[0] + b'}}')['w']['dtype'] == 'BF16'


@given(cut=st.integers(0, 399))
@settings(max_examples=60, deadline=None)
def test_a_file_cut_anywhere_is_refused_by_name(tmp_path_factory, cut):
  path = epath.Path(tmp_path_factory.mktemp('cut')) / 'model.safetensors'
  safetensors_file.write(path, ARRAYS)
  content = path.read_bytes()
  path.write_bytes(content[:cut * len(content) // 400])
  with pytest.raises(ConversionError, match='model.safetensors'):
    safetensors_file.read(path)


@pytest.mark.parametrize('entry, said', [
    ({'dtype': 'F8_E5M2', 'shape': [4], 'data_offsets': [0, 4]}, 'F8_E5M2'),
    ({'dtype': 'F32', 'shape': [2], 'data_offsets': [0, 4]}, 'not the size'),
    ({'dtype': 'F32', 'shape': [-1], 'data_offsets': [0, -4]}, 'not the size'),
    ({'dtype': 'F32', 'shape': [9], 'data_offsets': [0, 36]}, 'cut off in w'),
    ({'dtype': 'F32', 'shape': 4, 'data_offsets': [0, 16]}, 'damaged'),
    ({'dtype': 'F32'}, 'damaged'), ([], 'damaged'), (None, 'damaged')])
def test_a_damaged_header_is_refused_by_the_tensors_name(tmp_path, entry, said):
  header = json.dumps({'w': entry}).encode()
  path = epath.Path(tmp_path) / 'm.safetensors'
  path.write_bytes(len(header).to_bytes(8, 'little') + header + bytes(16))
  with pytest.raises(ConversionError, match=f'(?s)m.safetensors.*{said}'):
    safetensors_file.read(path)


# --- torch files -----------------------------------------------------------------------------


class _Stored:
  """A storage as torch's pickles name it."""

  def __init__(self, key: str, data: np.ndarray):
    self.key, self.data = key, data


class _Tensor:
  """A tensor as torch's pickles describe it: a call with a storage, offset, shape and strides."""

  def __init__(self, key, array, offset=0, shape=None, strides=None):
    self.stored = _Stored(key, array)
    shape = array.shape if shape is None else shape
    strides = [s // array.itemsize for s in array.strides] if strides is None else strides
    self.view = (offset, tuple(shape), tuple(strides))

  def __reduce__(self):
    rebuild = sys.modules['torch._utils']._rebuild_tensor_v2
    return rebuild, (self.stored, *self.view, False, collections.OrderedDict())


class _Pickler(pickle.Pickler):

  def persistent_id(self, obj):
    if not isinstance(obj, _Stored):
      return None
    kind = {'float32': 'FloatStorage', 'int64': 'LongStorage', 'bfloat16': 'BFloat16Storage'}
    storage = getattr(sys.modules['torch'], kind[obj.data.dtype.name])
    return 'storage', storage, obj.key, 'cpu', obj.data.size


@pytest.fixture
def pickled(monkeypatch):
  """Pickles a state dict as torch does, by modules that only have torch's names."""
  torch, torch_utils = types.ModuleType('torch'), types.ModuleType('torch._utils')
  for name in ('FloatStorage', 'LongStorage', 'BFloat16Storage'):
    setattr(torch, name, type(name, (), {'__module__': 'torch'}))
  def _rebuild_tensor_v2(*args):
    raise AssertionError('only named')
  _rebuild_tensor_v2.__module__ = 'torch._utils'
  _rebuild_tensor_v2.__qualname__ = '_rebuild_tensor_v2'
  torch_utils._rebuild_tensor_v2 = _rebuild_tensor_v2
  monkeypatch.setitem(sys.modules, 'torch', torch)
  monkeypatch.setitem(sys.modules, 'torch._utils', torch_utils)
  def write(state) -> bytes:
    file = io.BytesIO()
    _Pickler(file, protocol=2).dump(state)
    return file.getvalue()
  return write


def zipped(path: epath.Path, state: bytes, storages: dict[str, bytes], order: bytes = b'little'):
  with zipfile.ZipFile(path, 'w') as archive:
    archive.writestr('archive/data.pkl', state)
    archive.writestr('archive/byteorder', order)
    for key, data in storages.items():
      archive.writestr(f'archive/data/{key}', data)


def test_a_zip_of_tensors_and_views_is_read(tmp_path, pickled):
  path, data = epath.Path(tmp_path) / 'pytorch_model.bin', np.arange(12, dtype=np.float32)
  low = np.array([1.5, -2.0], ml_dtypes.bfloat16)
  state = collections.OrderedDict(
      plain=_Tensor('0', data.reshape(3, 4)), turned=_Tensor('0', data, 0, (4, 3), (1, 4)),
      part=_Tensor('0', data, 5, (2,), (3,)), nothing=_Tensor('0', data, 3, (0, 2), (2, 1)),
      low=_Tensor('1', low))
  zipped(path, pickled(state), {'0': data.tobytes(), '1': low.tobytes()})
  read = torch_file.read(path)
  np.testing.assert_array_equal(read['plain'], data.reshape(3, 4))
  np.testing.assert_array_equal(read['turned'], data.reshape(3, 4).T)
  np.testing.assert_array_equal(read['part'], [5, 8])
  assert read['nothing'].shape == (0, 2) and read['low'].dtype == ml_dtypes.bfloat16
  np.testing.assert_array_equal(read['low'], low)


def test_torch_files_with_an_index_are_one_model(tmp_path, pickled):
  folder = epath.Path(tmp_path)
  arrays = {name: np.arange(number, number + 6, dtype=np.float32).reshape(2, 3)
            for number, name in enumerate(('a.weight', 'b.weight', 'b.bias'))}
  shards = {name: f'pytorch_model-{name[0]}.bin' for name in arrays}
  for shard in sorted(set(shards.values())):
    here = {name: array for name, array in arrays.items() if shards[name] == shard}
    zipped(folder / shard, pickled({name: _Tensor(name, array) for name, array in here.items()}),
           {name: array.tobytes() for name, array in here.items()})
  index = folder / 'pytorch_model.bin.index.json'
  index.write_text(json.dumps({'metadata': {'total_size': 72}, 'weight_map': shards}))
  tensors, file = hugging_face._read_weights(folder)
  assert file == index
  same(tensors, arrays)
  (folder / 'pytorch_model-b.bin').unlink()
  with pytest.raises(ConversionError, match='pytorch_model-b.bin: no such file, but .* lists it'):
    hugging_face._read_weights(folder)


def old_format(pickled, state, storages: dict[str, np.ndarray]) -> bytes:
  head = [torch_file._MAGIC, 1001, {'little_endian': True, 'protocol_version': 1001}]
  parts = [pickle.dumps(value, 2) for value in head] + [pickled(state)]
  parts.append(pickle.dumps(list(storages), 2))
  parts += [array.size.to_bytes(8, 'little') + array.tobytes() for array in storages.values()]
  return b''.join(parts)


def test_the_format_before_torch_1_6_is_read(tmp_path, pickled):
  path, data = epath.Path(tmp_path) / 'pytorch_model.bin', np.arange(12, dtype=np.float32)
  path.write_bytes(old_format(pickled, {'w': _Tensor('77', data.reshape(3, 4))}, {'77': data}))
  np.testing.assert_array_equal(torch_file.read(path)['w'], data.reshape(3, 4))


class _Hostile:

  def __init__(self, function, *args):
    self.call = function, args

  def __reduce__(self):
    return self.call


@pytest.mark.parametrize('call', [
    (os.mkdir, 'harm'), (eval, '1'), (pickle.loads, b''), (getattr, dict, 'get'),
    (collections.Counter, 'aa')], ids=lambda call: call[0].__name__)
@pytest.mark.parametrize('old', [False, True])
def test_a_pickle_that_calls_anything_else_is_refused_before_it_does(
    tmp_path, pickled, monkeypatch, call, old):
  monkeypatch.chdir(tmp_path)
  path, state = epath.Path(tmp_path) / 'pytorch_model.bin', {'w': _Hostile(*call)}
  if old:
    path.write_bytes(old_format(pickled, state, {}))
  else:
    zipped(path, pickled(state), {})
  with pytest.raises(ConversionError, match=f'asks for .*{call[0].__name__}'):
    torch_file.read(path)
  assert not (tmp_path / 'harm').exists()


@pytest.mark.parametrize('view, said', [
    ((5, (8,), (1,)), 'w cannot be read: it ends at number 13'),
    ((0, (4, 4), (4, 1)), 'ends at number 16'), ((-1, (1,), (1,)), 'description'),
    ((0, (3,), (-1,)), 'description'), ((0, (3,), ()), 'description')])
def test_a_view_outside_its_storage_is_refused(tmp_path, pickled, view, said):
  path, data = epath.Path(tmp_path) / 'x.bin', np.arange(12, dtype=np.float32)
  zipped(path, pickled({'w': _Tensor('0', data, *view)}), {'0': data.tobytes()})
  with pytest.raises(ConversionError, match=said):
    torch_file.read(path)


def test_what_is_no_state_dict_is_refused(tmp_path, pickled):
  path, data = epath.Path(tmp_path) / 'x.bin', np.arange(12, dtype=np.float32)
  zipped(path, pickled({'model': {'w': _Tensor('0', data)}}), {'0': data.tobytes()})
  with pytest.raises(ConversionError, match='something else than a state dict'):
    torch_file.read(path)
  zipped(path, pickled({'w': _Tensor('0', data)}), {})
  with pytest.raises(ConversionError, match=r'x\.bin'):
    torch_file.read(path)
  zipped(path, pickled({'w': _Tensor('0', data)}), {'0': data.tobytes()}, order=b'big')
  with pytest.raises(ConversionError, match='big-endian'):
    torch_file.read(path)


@given(content=st.binary(max_size=60))
@settings(max_examples=100, deadline=None)
def test_any_bytes_are_refused_in_words(tmp_path_factory, content):
  path = epath.Path(tmp_path_factory.mktemp('any')) / 'pytorch_model.bin'
  path.write_bytes(content)
  with pytest.raises(ConversionError, match='pytorch_model.bin: cannot be read'):
    torch_file.read(path)


def test_a_cut_file_is_refused(tmp_path, pickled):
  path, data = epath.Path(tmp_path) / 'x.bin', np.arange(1200, dtype=np.float32)
  for content in (old_format(pickled, {'w': _Tensor('7', data)}, {'7': data}),):
    for share in (0.1, 0.5, 0.99):
      path.write_bytes(content[:int(len(content) * share)])
      with pytest.raises(ConversionError, match=r'x\.bin'):
        torch_file.read(path)
  zipped(path, pickled({'w': _Tensor('7', data)}), {'7': data.tobytes()})
  path.write_bytes(path.read_bytes()[:-200])
  with pytest.raises(ConversionError, match=r'x\.bin'):
    torch_file.read(path)
