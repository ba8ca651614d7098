"""`checkpoint.save_params`: parameters alone, the only checkpoint of their workdir."""

import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from bertjax import checkpoint, step_folder
from bertjax.tools import inspect

PARAMS = {'bert': {'kernel': np.arange(12, dtype=np.float32).reshape(3, 4)}}
FILES = {'vocab.txt': '[PAD]\né\n'.encode(), 'tokenizer_config.json': b'{}\n'}


def steps(workdir) -> list[int]:
  return sorted(step_folder.steps(epath.Path(workdir) / 'checkpoints'))


def test_what_was_saved_comes_back_with_its_metadata_and_tokenizer(tmp_path):
  metadata = {'config': {'model': {'hidden_size': 4}}, 'head': {'kind': 'encoder', 'labels': []}}
  folder = checkpoint.save_params(tmp_path, 0, PARAMS, metadata, FILES)
  assert folder == epath.Path(tmp_path) / 'checkpoints' / '0' and step_folder.damage(folder) is None
  stored = checkpoint.read_metadata(tmp_path)
  assert stored['step'] == 0 and stored['head'] == metadata['head'] and stored['version']
  back = checkpoint.restore_params(tmp_path)
  np.testing.assert_array_equal(back['bert']['kernel'], PARAMS['bert']['kernel'])
  kept = checkpoint.tokenizer_folder(tmp_path)
  assert {path.name: path.read_bytes() for path in kept.iterdir()} == FILES
  assert inspect.describe(tmp_path)['num_parameters'] == 12
  assert 'encoder' in inspect.render(inspect.describe(tmp_path))


@pytest.mark.parametrize('second', [3, 7, 9])
def test_a_new_one_takes_the_place_of_any_other(tmp_path, second):
  checkpoint.save_params(tmp_path, 7, PARAMS, {})
  checkpoint.save_params(tmp_path, second, {'bert': {'kernel': jnp.ones((2, 2), jnp.bfloat16)}}, {})
  assert steps(tmp_path) == [second]
  assert checkpoint.restore_params(tmp_path)['bert']['kernel'].dtype == 'bfloat16'


def test_a_save_that_fails_leaves_the_one_before(tmp_path, monkeypatch):
  checkpoint.save_params(tmp_path, 1, PARAMS, {})
  def fail(self, directory):
    raise OSError(28, 'No space left on device')
  monkeypatch.setattr(checkpoint._Sidecar, 'save', fail)
  with pytest.raises(checkpoint.CheckpointError, match=r'no space left.*there: \[1\]'):
    checkpoint.save_params(tmp_path, 2, PARAMS, {})
  assert steps(tmp_path) == [1]
  assert checkpoint.read_metadata(tmp_path)['step'] == 1


def test_metadata_that_is_not_json_fails_before_anything_is_written(tmp_path):
  with pytest.raises(TypeError):
    checkpoint.save_params(tmp_path, 1, PARAMS, {'a': np.zeros(3)})
  assert not list(tmp_path.iterdir())
