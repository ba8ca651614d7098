"""Attention: packed rows are separate rows, every kernel is `xla`, the choice says its reason."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from test_model import TINY, built, random_batch

from bertjax import attention, heads, model, objectives, sharding, state
from configs import large

LENGTHS = (5, 3, 6)  # three short texts of a row of 16


def arrays(rows=2, length=128, num_heads=2, width=16, seed=0):
  draw = np.random.default_rng(seed)
  return tuple(jnp.asarray(draw.normal(size=(rows, length, num_heads, width)), jnp.float32)
               for _ in range(3))


def packed_ids(rows=2, length=128, seed=0):
  """Segments 1, 2, ... side by side, then padding."""
  draw = np.random.default_rng(seed)
  ids = np.sort(draw.integers(1, 5, (rows, length)), axis=1)
  return jnp.asarray(np.where(np.arange(length) < length - 9, ids, 0))


@pytest.fixture
def interpreted(monkeypatch):
  """The splash kernel as plain JAX, which runs on a CPU."""
  monkeypatch.setattr(
      attention, 'splash', functools.partial(attention.splash, interpret=True))


# --- Packed rows -----------------------------------------------------------------------------


def test_segments_of_a_row_are_separate_rows():
  query, key, value = arrays(rows=1, length=16)
  ids = jnp.repeat(jnp.asarray([1, 2, 3, 0]), jnp.asarray([*LENGTHS, 2]),
                   total_repeat_length=16)[None]
  packed = attention.attend(query, key, value, ids > 0, segment_ids=ids)
  for number, stop in enumerate(np.cumsum(LENGTHS)):
    part = slice(stop - LENGTHS[number], stop)
    alone = attention.attend(query[:, part], key[:, part], value[:, part],
                             jnp.ones((1, LENGTHS[number]), bool))
    np.testing.assert_allclose(packed[:, part], alone, atol=1e-6)
  assert np.isfinite(packed).all()


def texts(seed=0):
  draw = np.random.default_rng(seed)
  return [draw.integers(5, TINY.vocab_size, length) for length in LENGTHS]


def pack(parts, length=16):
  """The texts in one row, as a packed batch has them."""
  fill = lambda values: jnp.asarray(
      np.pad(np.concatenate(values), (0, length - sum(map(len, values))))[None], jnp.int32)
  return {
      'input_ids': fill(parts),
      'token_type_ids': fill([np.arange(len(part)) >= 2 for part in parts]),
      'attention_mask': fill([np.ones(len(part), int) for part in parts]),
      'segment_ids': fill([np.full(len(part), i + 1) for i, part in enumerate(parts)]),
      'position_ids': fill([np.arange(len(part)) for part in parts])}


@jax.jit(static_argnums=0)
def logits(graphdef, params, batch):
  """Masked-LM logits of every token [B, T, V] and the hidden states."""
  module = nnx.merge(graphdef, params)
  hidden = module.bert(**batch)
  table = module.bert.embeddings.word_embeddings.embedding[...]
  flat = module.masked_lm(hidden.reshape(-1, hidden.shape[-1]), table)
  return flat.reshape(*hidden.shape[:2], -1), hidden


def test_b067_packed_texts_have_the_logits_of_separate_ones():
  graphdef, params = built(TINY)
  packed, _ = logits(graphdef, params, pack(texts()))
  for number, (text, stop) in enumerate(zip(texts(), np.cumsum(LENGTHS), strict=True)):
    batch = pack([text])
    del batch['segment_ids'], batch['position_ids']
    alone, _ = logits(graphdef, params, batch)
    part = slice(stop - LENGTHS[number], stop)
    np.testing.assert_allclose(packed[0, part], alone[0, :len(text)], atol=1e-5)


def test_b067_changing_one_text_of_a_row_does_not_move_the_others():
  graphdef, params = built(TINY)
  parts = texts()
  _, before = logits(graphdef, params, pack(parts))
  parts[1] = (parts[1] + 7) % TINY.vocab_size
  _, after = logits(graphdef, params, pack(parts))
  moved = np.abs(after - before)[0].max(-1) > 0
  np.testing.assert_array_equal(moved, (np.arange(16) >= 5) & (np.arange(16) < 8))


def test_padding_inside_a_segment_is_not_seen():
  """The mask holds within a segment as well."""
  query, key, value = arrays(rows=1, length=16)
  ids = jnp.ones((1, 16), jnp.int32)
  mask = jnp.arange(16)[None] < 11
  packed = attention.attend(query, key, value, mask, segment_ids=ids)
  plain = attention.attend(query, key, value, mask)
  np.testing.assert_allclose(packed[:, :11], plain[:, :11], atol=1e-6)


# --- Splash ----------------------------------------------------------------------------------


def attended_and_gradients(implementation, mask, segment_ids):
  def loss(query, key, value):
    out = attention.attend(query, key, value, mask, implementation=implementation,
                           segment_ids=segment_ids)
    return jnp.sum(jnp.sin(out) * mask[..., None, None]), out

  rows, length = mask.shape
  gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))
  return gradient(*arrays(rows, length))


@pytest.mark.parametrize('packed', [False, True])
@pytest.mark.parametrize('mesh', [None, (2, 2, 2)])
def test_splash_is_xla(interpreted, packed, mesh):
  """Values and gradients, on one device and with rows and heads spread over eight."""
  ids = packed_ids(rows=4)
  where = sharding.make_mesh(sharding.MeshSettings(*mesh)) if mesh else None
  with jax.set_mesh(where) if mesh else jax.default_device(jax.devices()[0]):
    ours, xla = (attended_and_gradients(name, ids > 0, ids if packed else None)
                 for name in ('splash', 'xla'))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), ours, xla)


def test_splash_of_several_blocks_is_xla(interpreted):
  """640 tokens are five blocks of 128: the softmax is put together from pieces."""
  ids = packed_ids(rows=1, length=640)
  ours, xla = (attended_and_gradients(name, ids > 0, ids) for name in ('splash', 'xla'))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), ours, xla)


def test_splash_of_nothing_but_padding_is_finite(interpreted):
  out = attended_and_gradients('splash', jnp.zeros((1, 128), bool), None)
  jax.tree.map(lambda array: np.testing.assert_array_equal(np.isfinite(array), True), out)


@pytest.mark.slow
def test_b066_the_model_on_splash_has_the_gradients_of_xla(interpreted):
  """The whole model: padding, every remat policy that saves what the kernel leaves, one loss."""
  config = dataclasses.replace(TINY, max_position_embeddings=128, attention='splash')
  batch = random_batch(config, rows=2, length=128)

  @jax.jit(static_argnums=0)
  def gradients(graphdef, params):
    def loss(params):
      sums = objectives.PRETRAINING.terms(nnx.merge(graphdef, params), batch, None)
      return sum(term.loss / term.weight for term in sums.values())

    return jax.grad(loss)(params)

  _, params = built(config)
  expected = None
  for change in ({'attention': 'xla'}, {}, {'remat': 'dense_attention'}):
    changed = dataclasses.replace(config, **change)
    graphdef, _ = state.split(functools.partial(heads.BertForPreTraining, changed))
    found = gradients(graphdef, params)
    expected = found if expected is None else expected
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, expected)


@pytest.mark.parametrize('implementation', ['xla', 'splash'])
def test_b066_padding_does_not_change_what_real_tokens_attend_to(interpreted, implementation):
  query, key, value = arrays(length=128)
  alone = attention.attend(*(x[:, :100] for x in (query, key, value)), jnp.ones((2, 100), bool))
  mask = jnp.broadcast_to(jnp.arange(128) < 100, (2, 128))
  padded = attention.attend(query, key, value, mask, implementation=implementation)
  np.testing.assert_allclose(padded[:, :100], alone, atol=1e-5)


# --- The choice ------------------------------------------------------------------------------

LARGE = model.BertConfig(vocab_size=200, **large.get_config('fast').model.to_dict())
DROPPING = dataclasses.replace(LARGE, attention_probs_dropout_prob=0.1)


@pytest.mark.parametrize('config, platform, lengths, chosen', [
    (LARGE, 'tpu', (128, 512), 'splash'), (LARGE, 'gpu', (128, 512), 'cudnn'),
    (LARGE, 'cpu', (128, 512), 'xla'), (DROPPING, 'tpu', (512,), 'xla'),
    (DROPPING, 'gpu', (512,), 'xla'), (LARGE, 'tpu', (64, 128), 'xla'),
    (dataclasses.replace(LARGE, dtype='float32'), 'gpu', (128,), 'xla'),
    (dataclasses.replace(LARGE, attention='xla'), 'tpu', (512,), 'xla'),
])
def test_auto_takes_a_kernel_where_it_can_do_what_is_asked(config, platform, lengths, chosen):
  assert attention.choose(config, platform, *lengths) == chosen
  assert chosen in attention.describe(config, platform, *lengths)


def test_the_start_up_block_says_why_no_kernel_was_taken():
  assert attention.describe(DROPPING, 'tpu', 512) == (
      'xla; not splash: splash cannot drop attention weights, and '
      'model.attention_probs_dropout_prob is 0.1; set it to 0')


@pytest.mark.parametrize('change, platform, length, ways, reason', [
    ({'attention': 'splash'}, 'cpu', 512, 1, 'needs a TPU, and this is a CPU'),
    ({'attention': 'cudnn'}, 'tpu', 512, 1, 'needs a GPU, and this is a TPU'),
    ({'attention': 'splash', 'attention_probs_dropout_prob': 0.1}, 'tpu', 512, 1, 'set it to 0'),
    ({'attention': 'cudnn', 'attention_probs_dropout_prob': 0.1}, 'gpu', 512, 1, 'set it to 0'),
    ({'attention': 'splash'}, 'tpu', 200, 1, 'rows of 200 tokens; it takes multiples of 128'),
    ({'attention': 'splash'}, 'tpu', 512, 3, '16 heads are not divisible by mesh.model 3'),
    ({'attention': 'splash', 'num_attention_heads': 4}, 'tpu', 512, 1, 'heads are 256 wide'),
    ({'attention': 'cudnn', 'dtype': 'float32'}, 'gpu', 512, 1, 'model.dtype is float32'),
])
def test_a_choice_that_cannot_be_is_refused_with_the_reason(
    change, platform, length, ways, reason):
  config = dataclasses.replace(LARGE, **change)
  with pytest.raises(attention.AttentionError, match=reason):
    attention.choose(config, platform, length, model_ways=ways)


def test_a_kernel_never_leaves_dropout_out_silently():
  mask = jnp.ones((2, 128), bool)
  with pytest.raises(attention.AttentionError, match='cannot drop'):
    attention.attend(*arrays(), mask, 0.1, jnp.zeros(2, jnp.uint32), 'splash')


def test_checkpoints_hold_no_kernel_and_old_ones_get_the_default():
  stored = model.to_store(dataclasses.replace(LARGE, attention='splash'))
  assert stored['attention'] == 'auto'
  del stored['attention']
  assert model.BertConfig(**stored).attention == 'auto'


def test_the_fast_variant_of_large_differs_in_attention_dropout_and_remat():
  papers, fast = large.get_config(), large.get_config('fast')
  changed = {key for key in papers.model if papers.model[key] != fast.model[key]}
  assert changed == {'attention_probs_dropout_prob', 'remat'}
  with pytest.raises(ValueError, match='fast'):
    large.get_config('quick')
