"""Weights from another checkpoint: whole groups, new ones named, nothing filled in silently."""

import copy

import jax
import numpy as np
import pytest
from flax import traverse_util
from test_model import TINY

from bertjax import checkpoint, heads, state, warm_start


def build_of(kind, num_outputs=3, **head):
  if kind == 'pretraining':
    return lambda rngs: heads.BertForPreTraining(TINY, rngs)
  if kind == 'encoder':
    return lambda rngs: heads.BertEncoder(TINY, rngs, head.get('pooler', True))
  config = heads.HeadConfig(kind, num_outputs, **head)
  return lambda rngs: heads.HEADS[kind](TINY, config, rngs)


def stored(kind, num_outputs=3, seed=0, **head):
  """The parameters of a checkpoint, all of them different from any start."""
  shapes = state.split(build_of(kind, num_outputs, **head))[1]
  draw = np.random.default_rng(seed)
  return jax.tree.map(lambda leaf: draw.normal(size=leaf.shape).astype(leaf.dtype), shapes)


def complete(params, build, seed=0, drop=()):
  """What `complete` gives; it must have the shapes of the model and leave `params` as they are."""
  before = copy.deepcopy(params)
  shapes = state.split(build)[1]
  made, new, unused = warm_start.complete(params, shapes, build, seed, drop)
  jax.tree.map(np.testing.assert_array_equal, params, before)
  assert jax.tree.structure(made) == jax.tree.structure(shapes)
  jax.tree.map(lambda a, b: np.testing.assert_equal((a.shape, a.dtype), (b.shape, b.dtype)),
               made, shapes)
  return made, new, unused


def flat(tree):
  return traverse_util.flatten_dict(tree, sep='/')


def without(params, *paths):
  return traverse_util.unflatten_dict(
      {path: array for path, array in flat(params).items() if path not in paths}, sep='/')


def assert_taken(made, params, *groups):
  """These parameters are the checkpoint's, bit for bit."""
  made, params = flat(made), flat(params)
  for path in made:
    if path.startswith(groups):
      np.testing.assert_array_equal(made[path], params[path], err_msg=path)


def test_a_checkpoint_of_the_same_model_is_taken_over_whole():
  params = stored('pretraining')
  made, new, unused = complete(params, build_of('pretraining'))
  jax.tree.map(np.testing.assert_array_equal, made, params)
  assert (new, unused) == ((), ())


def test_a_missing_head_is_new_and_named():
  params = stored('pretraining')
  build = build_of('classification')
  made, new, unused = complete(params, build, seed=5)
  assert new == ('classifier',) and unused == ('masked_lm', 'next_sentence')
  assert_taken(made, params, 'bert/')
  # As a fresh model of that seed has it.
  fresh = jax.jit(lambda: state.init_params(build, 5))()
  np.testing.assert_array_equal(made['classifier']['kernel'], fresh['classifier']['kernel'])
  other, _, _ = complete(params, build, seed=6)
  assert not np.array_equal(made['classifier']['kernel'], other['classifier']['kernel'])
  text = warm_start.in_words('ckpt', 7, new, unused)
  assert 'weights of ckpt (step 7)' in text and 'newly initialised: classifier' in text
  assert 'not used: masked_lm, next_sentence' in text


def test_an_encoder_alone_goes_on_in_pretraining_with_new_heads():
  params = stored('encoder', pooler=False)
  made, new, unused = complete(params, build_of('pretraining'))
  assert new == ('bert/pooler', 'masked_lm', 'next_sentence') and unused == ()
  assert_taken(made, params, 'bert/embeddings', 'bert/encoder')


def test_a_pooler_that_the_task_has_no_use_for_is_named():
  params = stored('pretraining')
  _, new, unused = complete(params, build_of('tagging'))
  assert new == ('classifier',) and unused == ('bert/pooler', 'masked_lm', 'next_sentence')


def test_b106_a_head_of_another_task_is_replaced_and_named():
  """From a classifier of three classes to a regression with one output."""
  params = stored('classification', 3)
  build = build_of('regression', 1)
  made, new, unused = complete(params, build, drop=('classifier', 'qa_outputs', 'layer_weights'))
  assert new == ('classifier',) and unused == ('classifier',)
  assert made['classifier']['kernel'].shape == (TINY.hidden_size, 1)
  assert_taken(made, params, 'bert/')


def test_a_head_of_another_task_is_replaced_though_its_shape_would_fit():
  """Three classes of one task say nothing about the three of another."""
  params = stored('classification', 3)
  made, new, _ = complete(params, build_of('classification', 3), drop=('classifier',))
  assert new == ('classifier',)
  assert not np.array_equal(made['classifier']['kernel'], params['classifier']['kernel'])


def test_a_head_of_another_shape_that_is_not_to_be_dropped_stops():
  with pytest.raises(checkpoint.CheckpointError, match=r'classifier/kernel is \(32, 3\) and'):
    complete(stored('classification', 3), build_of('classification', 2))


def test_the_head_of_the_same_task_is_kept():
  params = stored('span', 2)
  made, new, unused = complete(params, build_of('span', 2))
  assert_taken(made, params, 'qa_outputs', 'bert/')
  assert (new, unused) == ((), ())


def test_layer_weights_come_and_go_with_the_setting():
  params = stored('classification')
  made, new, _ = complete(params, build_of('classification', layers='weighted_sum'))
  assert new == ('layer_weights',) and not made['layer_weights'].any()
  assert_taken(made, params, 'classifier', 'bert/')
  params = stored('classification', layers='weighted_sum')
  _, new, unused = complete(params, build_of('classification'))
  assert new == () and unused == ('layer_weights',)


@pytest.mark.parametrize('path', [
    'bert/embeddings/position_embeddings/embedding', 'bert/embeddings/layer_norm/scale',
    'bert/encoder/layers/attention/query/bias', 'bert/encoder/layers/output/kernel',
    # A group that is there must be there whole.
    'bert/pooler/bias', 'masked_lm/layer_norm/scale'])
def test_a_tensor_short_stops_and_names_it(path):
  with pytest.raises(checkpoint.CheckpointError, match=f'does not fit the model: {path} is absent'):
    complete(without(stored('pretraining'), path), build_of('pretraining'))


def test_a_wrong_shape_stops_and_names_both():
  params = stored('pretraining')
  params['bert']['embeddings']['position_embeddings']['embedding'] = np.zeros((16, 32), np.float32)
  with pytest.raises(checkpoint.CheckpointError, match=(
      r'position_embeddings/embedding is \(16, 32\) and the model has \(32, 32\). Take the model')):
    complete(params, build_of('classification'))


def test_a_tensor_that_the_encoder_does_not_know_stops():
  params = stored('pretraining')
  params['bert']['relative_positions'] = {'embedding': np.zeros((3, 3), np.float32)}
  with pytest.raises(checkpoint.CheckpointError, match='relative_positions/embedding is unknown'):
    complete(params, build_of('classification'))


def test_of_many_faults_five_are_named():
  shallow = jax.tree.map(lambda array: array[:1], stored('pretraining'))
  with pytest.raises(checkpoint.CheckpointError, match=r'and \d+ more. Take'):
    complete(shallow, build_of('pretraining'))
