"""The encoder and its heads: values of independent implementations, invariances, precision."""

import dataclasses
import json

import hugging_face
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from bertjax import attention, dropout, heads, losses, model, objectives, state

TINY = model.BertConfig(
    vocab_size=200, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
    intermediate_size=64, max_position_embeddings=32, hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0)
ACTIVATION = {'gelu': 'gelu', 'gelu_new': 'gelu_tanh', 'relu': 'relu'}
GOLDEN_CONFIGS = ('cfg_a', 'cfg_b', 'cfg_c', 'cfg_d')
SIZES = ('vocab_size', 'hidden_size', 'num_hidden_layers', 'num_attention_heads',

         'intermediate_size', 'max_position_embeddings', 'type_vocab_size', 'layer_norm_eps')


def built(config: model.BertConfig, seed: int = 0):
  build = lambda rngs: heads.BertForPreTraining(config, rngs)
  return state.split(build)[0], jax.jit(lambda: state.init_params(build, seed))()


def random_batch(config=TINY, rows=4, length=16, predictions=5, seed=0):
  draw = np.random.default_rng(seed)
  lengths = draw.integers(4, length + 1, rows)
  mask = (np.arange(length) < lengths[:, None]).astype(np.int32)
  ids = draw.integers(5, config.vocab_size, (rows, length)).astype(np.int32) * mask
  positions = np.sort(draw.integers(1, 4, (rows, predictions)), axis=1).astype(np.int32)
  batch = {
      'input_ids': ids, 'token_type_ids': (np.arange(length) > lengths[:, None] // 2) * mask,
      'attention_mask': mask, 'masked_lm_positions': positions,
      'masked_lm_ids': draw.integers(5, config.vocab_size, (rows, predictions)).astype(np.int32),
      'masked_lm_weights': draw.integers(0, 2, (rows, predictions)).astype(np.float32),
      'next_sentence_labels': draw.integers(0, 2, rows).astype(np.int32),
      'next_sentence_weights': np.ones(rows, np.float32)}
  return {name: jnp.asarray(array) for name, array in batch.items()}


@jax.jit(static_argnums=0)
def encode(graphdef, params, batch):
  bert = nnx.merge(graphdef, params).bert
  return bert(batch['input_ids'], batch['token_type_ids'], batch['attention_mask'])


@jax.jit(static_argnums=0)
def pool_and_hidden_states(graphdef, params, batch):
  bert = nnx.merge(graphdef, params).bert
  args = batch['input_ids'], batch['token_type_ids'], batch['attention_mask']
  return bert.pool(bert(*args)[:, 0]), bert.hidden_states(*args)


@jax.jit(static_argnums=0)
def predict(graphdef, params, batch, positions):
  return nnx.merge(graphdef, params)(
      batch['input_ids'], batch['token_type_ids'], batch['attention_mask'], positions)


@jax.jit(static_argnums=0)
def terms(graphdef, params, batch):
  return objectives.PRETRAINING.terms(nnx.merge(graphdef, params), batch, None)


@jax.jit(static_argnums=0)
def gradients(graphdef, params, batch):
  def loss(params):
    sums = objectives.PRETRAINING.terms(nnx.merge(graphdef, params), batch, None)
    return sum(losses.mean(term.loss, term.weight) for term in sums.values())

  return jax.grad(loss)(params)


# --- Independent implementations -------------------------------------------------------------


@pytest.fixture(params=GOLDEN_CONFIGS)
def reference(request, golden):
  """One configuration of golden/01_encoder: our model with its weights, and the stored values."""
  folder = golden / '01_encoder' / request.param
  values = json.loads((folder / 'config.json').read_text(encoding='utf-8'))
  config = model.BertConfig(
      **{name: values[name] for name in SIZES}, hidden_act=ACTIVATION[values['hidden_act']],
      hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
  graphdef, shapes = state.split(lambda rngs: heads.BertForPreTraining(config, rngs))
  params = hugging_face.fill(shapes, load_file(folder / 'model.safetensors'))
  return config, graphdef, params, folder


def golden_batch(folder, name):
  stored = np.load(folder / 'batches.npz')
  batch = {key.split('/')[1]: stored[key] for key in stored if key.startswith(f'{name}/')}
  if 'nsp_labels' in batch:
    batch['next_sentence_labels'] = batch.pop('nsp_labels').astype(np.int32)
    batch['next_sentence_weights'] = np.ones(len(batch['next_sentence_labels']), np.float32)
  return {key: jnp.asarray(array, np.int32 if array.dtype == np.int64 else array.dtype)
          for key, array in batch.items()}


@pytest.mark.parametrize('name', ['b0', 'b1', 'b2'])
def test_hidden_states_and_pooled_output_are_the_references(reference, name):
  _, graphdef, params, folder = reference
  batch, expected = golden_batch(folder, name), np.load(folder / 'outputs.npz')
  pooled, hidden = pool_and_hidden_states(graphdef, params, batch)
  real = batch['attention_mask'][None, ..., None] > 0
  hidden = np.asarray(hidden)
  np.testing.assert_allclose(hidden * real, expected[f'{name}/hidden_states'] * real, atol=1e-4)
  some = batch['attention_mask'].any(1)
  np.testing.assert_allclose(pooled[some], expected[f'{name}/pooled_output'][some], atol=1e-4)


@pytest.mark.parametrize('name', ['b0', 'b1'])
def test_logits_and_losses_are_the_references(reference, name):
  config, graphdef, params, folder = reference
  batch, expected = golden_batch(folder, name), np.load(folder / 'outputs.npz')
  every = jnp.broadcast_to(jnp.arange(batch['input_ids'].shape[1]), batch['input_ids'].shape)
  masked_lm, next_sentence = predict(graphdef, params, batch, every)
  wanted = expected[f'{name}/mlm_logits']
  real = batch['attention_mask'][..., None] > 0
  masked_lm = np.asarray(masked_lm)[:, :config.vocab_size].reshape(wanted.shape)
  np.testing.assert_allclose(masked_lm * real, wanted * real, atol=1e-4)
  np.testing.assert_allclose(next_sentence, expected[f'{name}/nsp_logits'], atol=1e-4)
  sums = terms(graphdef, params, batch)
  for term, reference_name in (('masked_lm', 'mlm'), ('next_sentence', 'nsp')):
    loss = losses.mean(sums[term].loss, sums[term].weight)
    np.testing.assert_allclose(loss, expected[f'{name}/{reference_name}_loss'], atol=1e-4)
    assert sums[term].correct == expected[f'{name}/{reference_name}_correct']
  assert sums['masked_lm'].weight == expected[f'{name}/mlm_count']


@pytest.mark.parametrize('name', ['b0', 'b1'])
def test_gradients_are_the_references(reference, name):
  _, graphdef, params, folder = reference
  batch = golden_batch(folder, name)
  wanted = hugging_face.fill(params, dict(np.load(folder / f'grads_{name}.npz')))
  grads = gradients(graphdef, params, batch)

  def same(path, ours, theirs):
    scale = max(1.0, np.abs(theirs).max())
    name = jax.tree_util.keystr(path)
    np.testing.assert_allclose(ours / scale, theirs / scale, atol=1e-4, err_msg=name)

  jax.tree_util.tree_map_with_path(same, grads, wanted)


# --- Invariances -----------------------------------------------------------------------------


def test_padding_does_not_change_the_vectors_of_real_tokens():
  graphdef, params = built(TINY)
  batch = random_batch(rows=3, length=12)
  batch['attention_mask'] = jnp.ones_like(batch['attention_mask'])
  alone = encode(graphdef, params, batch)
  for length in (16, 32):
    wide = {name: jnp.pad(batch[name], ((0, 0), (0, length - 12)), constant_values=fill)
            for name, fill in (('input_ids', 7), ('token_type_ids', 1), ('attention_mask', 0))}
    np.testing.assert_allclose(encode(graphdef, params, wide)[:, :12], alone, atol=1e-5)


def test_padding_rows_of_the_vocabulary_never_win_and_get_no_gradient():
  """Also B121: whatever stands in the rows that only pad the table."""
  config = dataclasses.replace(TINY, vocab_size=140)
  graphdef, params = built(config)
  assert params['masked_lm']['bias'].shape == (256,)
  params['masked_lm']['bias'] = params['masked_lm']['bias'].at[140:].set(50.0)
  batch = random_batch(config)
  logits, _ = predict(graphdef, params, batch, batch['masked_lm_positions'])
  assert logits.argmax(-1).max() < 140
  np.testing.assert_array_equal(jax.nn.softmax(logits)[:, 140:], 0)
  grads = gradients(graphdef, params, batch)
  np.testing.assert_array_equal(grads['masked_lm']['bias'][140:], 0)
  np.testing.assert_array_equal(
      grads['bert']['embeddings']['word_embeddings']['embedding'][140:], 0)


def test_speed_settings_do_not_change_results():
  batch = random_batch()
  graphdef, params = built(TINY)
  plain = gradients(graphdef, params, batch)
  for change in ({'scan_unroll': 2}, {'remat': 'full'}, {'remat': 'dots'}):
    other, _ = built(dataclasses.replace(TINY, **change))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6),
                 gradients(other, params, batch), plain)


def test_word_table_is_tied_and_stored_once():
  """B118: output matrix and input table are one array."""
  _, params = built(TINY)
  names = [jax.tree_util.keystr(path) for path, leaf in jax.tree_util.tree_leaves_with_path(params)
           if TINY.padded_vocab_size in leaf.shape and leaf.ndim == 2]
  assert len(names) == 1


def test_start_values_are_the_papers():
  _, params = built(model.BertConfig(vocab_size=1000, hidden_size=128, num_hidden_layers=2,
                                     num_attention_heads=2, intermediate_size=256))
  def check(path, leaf):
    name = jax.tree_util.keystr(path, simple=True, separator='/')
    if name.endswith('bias'):
      assert not leaf.any(), name
    elif name.endswith('scale'):
      assert (leaf == 1).all(), name
    else:
      # A normal of deviation 0.02 cut at two deviations has deviation 0.0176.
      real = leaf[:1000] if 'word' in name else leaf
      assert np.abs(real).max() <= 0.04 and abs(real.std() - 0.0176) < 0.002, name
  jax.tree_util.tree_map_with_path(check, params)
  kernels = params['bert']['encoder']['layers']['output']['kernel']
  assert not np.array_equal(kernels[0], kernels[1])


@pytest.mark.parametrize('change, mend', [
    ({'hidden_size': 30, 'num_attention_heads': 4}, 'try hidden_size 32'),
    ({'hidden_act': 'gelu_new'}, 'gelu_tanh'),
    ({'num_hidden_layers': 0}, 'at least 1'),
    ({'hidden_dropout_prob': 1.0}, 'must be in'),
    ({'remat': 'all'}, 'dots'),
])
def test_impossible_sizes_are_refused_with_the_mend(change, mend):
  with pytest.raises(ValueError, match=mend):
    dataclasses.replace(TINY, **change)


def test_rows_longer_than_the_position_table_are_refused():
  graphdef, params = built(TINY)
  with pytest.raises(ValueError, match='max_position_embeddings'):
    encode(graphdef, params, random_batch(length=40))


# --- Precision (bug reports of kind 7) -------------------------------------------------------


@pytest.mark.parametrize('dtype, tolerance', [('bfloat16', 0.15), ('float16', 0.02)])
def test_b060_padding_is_finite_in_every_precision(dtype, tolerance):
  batch = random_batch()
  graphdef, params = built(TINY)
  exact = encode(graphdef, params, batch)
  low = encode(built(dataclasses.replace(TINY, dtype=dtype))[0], params, batch)
  assert low.dtype == dtype
  real = batch['attention_mask'][..., None] > 0
  np.testing.assert_allclose(jnp.where(real, low, 0), jnp.where(real, exact, 0),
                             atol=tolerance)
  assert np.isfinite(low.astype(np.float32)).all()


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'float16'])
def test_b061_masked_keys_weigh_exactly_nothing(dtype):
  query = jnp.full((1, 4, 1, 2), -5.0, dtype)
  key = jnp.full((1, 4, 1, 2), 7.0, dtype)  # scores of about -50
  value = jnp.asarray([1.0, 2.0, 1000.0, -1000.0], dtype).reshape(1, 4, 1, 1)
  value = jnp.broadcast_to(value, (1, 4, 1, 2))
  mask = jnp.asarray([[True, True, False, False]])
  np.testing.assert_array_equal(attention.attend(query, key, value, mask).astype(np.float32), 1.5)
  nothing = attention.attend(query, key, value, jnp.zeros((1, 4), bool))
  assert np.isfinite(nothing.astype(np.float32)).all()


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'float16'])
def test_b062_a_row_of_padding_changes_nothing_else(dtype):
  config = dataclasses.replace(TINY, dtype=dtype)
  graphdef, params = built(config)
  batch = random_batch(rows=3)
  filled = {name: jnp.concatenate([array, jnp.zeros_like(array[:1])])
            for name, array in batch.items()}
  grads, more = gradients(graphdef, params, batch), gradients(graphdef, params, filled)
  jax.tree.map(lambda a: np.testing.assert_array_equal(np.isfinite(a), True), more)
  if dtype == 'float32':
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), grads, more)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'float16'])
def test_b063_layer_norm_of_a_constant_row_is_its_bias(dtype):
  norm = model.LayerNorm(TINY)
  norm.bias[...] = jnp.arange(32, dtype=jnp.float32)
  out = norm(jnp.zeros((1, 32), dtype))
  np.testing.assert_array_equal(out[0].astype(np.float32), np.arange(32))


def test_b049_nothing_masked_gives_loss_zero_and_gradient_exactly_zero():
  graphdef, params = built(TINY)
  batch = random_batch()
  for name in ('masked_lm_weights', 'next_sentence_weights'):
    batch[name] = jnp.zeros_like(batch[name])
  jax.tree.map(lambda grad: np.testing.assert_array_equal(grad, 0),
               gradients(graphdef, params, batch))


# --- Dropout ---------------------------------------------------------------------------------


def test_dropout_keeps_the_asked_share_and_the_mean():
  keys = dropout.row_keys(0, jnp.int32(3), 64)
  out = np.asarray(dropout.dropout(jnp.ones((64, 40, 50)), 0.1, keys))
  assert set(np.unique(out)) == {0.0, np.float32(1) / np.float32(0.9)}
  share = (out == 0).mean((1, 2))  # of 2,000 draws a row: deviation 0.0067
  assert abs(share.mean() - 0.1) < 0.003 and share.max() < 0.14 and share.min() > 0.06


def test_dropout_differs_by_row_step_seed_and_site():
  x = jnp.ones((2, 4096))
  def mask(seed, step, site):
    keys = dropout.fold(dropout.row_keys(seed, jnp.int32(step), 2), site)
    return np.asarray(dropout.dropout(x, 0.5, keys)) == 0
  base = mask(0, 0, 0)
  for other in (mask(1, 0, 0), mask(0, 1, 0), mask(0, 0, 1)):
    assert abs((base == other).mean() - 0.5) < 0.03
  assert abs((base[0] == base[1]).mean() - 0.5) < 0.05
  shifted = [(base[0, k:] == base[0, :-k]).mean() for k in range(1, 40)]
  assert max(abs(share - 0.5) for share in shifted) < 0.05


def test_rows_whose_keys_are_a_few_counters_apart_do_not_share_a_shifted_mask():
  keys = jnp.uint32(7) + jnp.arange(2, dtype=jnp.uint32) * jnp.uint32(0x9E3779B9)
  masks = np.asarray(dropout.dropout(jnp.ones((2, 4096)), 0.5, keys)) == 0
  for shift in range(-3, 4):
    same = np.roll(masks[0], shift)[8:-8] == masks[1][8:-8]
    assert abs(same.mean() - 0.5) < 0.04, shift


def test_no_key_means_no_dropout():
  x = jnp.ones((2, 8))
  assert dropout.dropout(x, 0.5, None) is x
