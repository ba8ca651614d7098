"""Losses: values against NumPy in float64, weights, ties, gradients, sharded vocabularies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from bertjax import losses


def reference(logits, labels):
  """Cross entropies in float64."""
  logits = np.asarray(logits, np.float64)
  shifted = logits - logits.max(axis=-1, keepdims=True)
  normaliser = np.log(np.exp(shifted).sum(axis=-1))
  return normaliser - shifted[np.arange(len(labels)), labels]


def masked_lm_mean(logits, ids, weights):
  sums = losses.masked_lm(logits, ids, weights)
  return losses.mean(sums.loss, sums.weight)


def random_case(n=12, v=50, seed=0):
  rng = np.random.default_rng(seed)
  logits = jnp.asarray(rng.normal(size=(n, v)) * 3, jnp.float32)
  ids = jnp.asarray(rng.integers(0, v, n), jnp.int32)
  weights = jnp.asarray(rng.integers(0, 2, n), jnp.float32)
  return logits, ids, weights


def test_masked_lm_is_the_weighted_sum():
  logits, ids, weights = random_case()
  sums = losses.masked_lm(logits, ids, weights)
  np.testing.assert_allclose(sums.loss, (reference(logits, ids) * weights).sum(), rtol=1e-6)
  assert sums.weight == weights.sum()
  assert sums.correct == ((np.argmax(logits, -1) == ids) * weights).sum()


def test_masked_lm_gradient_is_that_of_the_log_softmax():
  logits, ids, weights = random_case()

  def plain(logits):
    picked = jax.nn.log_softmax(logits)[jnp.arange(len(ids)), ids]
    return -(picked * weights).sum() / weights.sum()

  ours = jax.jit(jax.grad(masked_lm_mean))(logits, ids, weights)
  np.testing.assert_allclose(ours, jax.grad(plain)(logits), atol=1e-7)


@settings(deadline=None, max_examples=50)
@given(
    hnp.arrays(np.float32, (3, 5), elements=st.floats(-1e4, 1e4, width=32)),
    hnp.arrays(np.int32, (3,), elements=st.integers(0, 4)),
    st.floats(-1e4, 1e4, width=32),
)
def test_cross_entropy_of_any_finite_logits(logits, ids, shift):
  ones = jnp.ones(3)
  sums = losses.masked_lm(jnp.asarray(logits), jnp.asarray(ids), ones)
  np.testing.assert_allclose(sums.loss, reference(logits, ids).sum(), rtol=1e-5, atol=1e-6)
  moved = losses.masked_lm(jnp.asarray(logits + shift), jnp.asarray(ids), ones)
  # The sum logits + shift is itself rounded; the loss adds nothing to that.
  np.testing.assert_allclose(moved.loss, reference(logits + shift, ids).sum(), rtol=1e-5, atol=1e-6)
  assert np.isfinite(jax.grad(masked_lm_mean)(jnp.asarray(logits), jnp.asarray(ids), ones)).all()


def test_padded_vocabulary_rows_of_minus_infinity():
  logits, ids, weights = random_case()
  padded = jnp.pad(logits, ((0, 0), (0, 6)), constant_values=-jnp.inf)
  assert losses.masked_lm(padded, ids, weights) == losses.masked_lm(logits, ids, weights)
  gradient = jax.grad(masked_lm_mean)(padded, ids, weights)
  assert np.isfinite(gradient).all()
  assert (gradient[:, -6:] == 0).all()


def test_bfloat16_logits_are_summed_in_float32():
  logits, ids, weights = random_case(v=4000)
  low = logits.astype(jnp.bfloat16)
  sums = losses.masked_lm(low, ids, weights)
  assert sums.loss.dtype == jnp.float32
  np.testing.assert_allclose(sums.loss, (reference(low, ids) * weights).sum(), rtol=1e-6)
  assert jax.grad(masked_lm_mean)(low, ids, weights).dtype == jnp.bfloat16


def test_an_id_outside_of_the_vocabulary_is_not_silent():
  logits, ids, _ = random_case()
  ones = jnp.ones(len(ids))
  assert np.isnan(losses.masked_lm(logits, ids.at[3].set(50), ones).loss)


def test_next_sentence():
  logits = jnp.asarray([[2.0, -1.0], [0.5, 0.7], [0.0, 3.0], [9.0, -9.0]])
  labels = jnp.asarray([0, 0, 1, 1])
  sums = losses.next_sentence(logits, labels, jnp.asarray([1.0, 1.0, 1.0, 0.0]))
  np.testing.assert_allclose(sums.loss, reference(logits, labels)[:3].sum(), rtol=1e-6)
  assert (sums.correct, sums.weight) == (2, 3)


def test_next_sentence_of_a_head_of_zeros_is_right_for_one_label_only():
  labels = jnp.asarray([0, 1, 1, 1])
  sums = losses.next_sentence(jnp.zeros((4, 2)), labels, jnp.ones(4))
  assert (sums.correct, sums.weight) == (1, 4)


def test_b049_batch_in_which_nothing_is_masked():
  logits, ids, _ = random_case()
  none = jnp.zeros(len(ids))
  loss, gradient = jax.jit(jax.value_and_grad(masked_lm_mean))(logits, ids, none)
  assert loss == 0
  assert (gradient == 0).all()  # exactly, and not NaN
  sums = losses.masked_lm(logits, jnp.argmax(logits, -1), none)
  assert (sums.correct, sums.weight) == (0, 0)  # and not counted as all right


def test_mean_has_no_gradient_where_there_is_no_weight():
  value, gradient = jax.value_and_grad(losses.mean, argnums=(0, 1))(jnp.float32(0), jnp.float32(0))
  assert (value, *gradient) == (0, 0, 0)
  assert losses.mean(jnp.float32(3), jnp.float32(2)) == 1.5


def test_b050_unequal_counts_on_two_devices():
  # Device A: one token of loss 4; device B: nine tokens of loss 1. Logits [0, x] with label 0 have
  # the loss log(1 + e^x).
  nats = np.array([4.0] + [1.0] * 9)
  logits = jnp.stack([jnp.zeros(10), jnp.asarray(np.log(np.expm1(nats)), jnp.float32)], axis=1)
  logits = jnp.concatenate([logits, jnp.zeros((8, 2))])
  weights = jnp.concatenate([jnp.ones(10), jnp.zeros(8)])
  ids = jnp.zeros(18, jnp.int32)
  # Rows 0 and 10..17 (unused) lie on device A, 1..9 on device B.
  order = np.array([0, *range(10, 18), *range(1, 10)])
  mesh = jax.make_mesh((2,), ('data',), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
  args = [
      jax.device_put(x[order], NamedSharding(mesh, P('data'))) for x in (logits, ids, weights)
  ]
  loss, gradient = jax.jit(jax.value_and_grad(masked_lm_mean))(*args)
  np.testing.assert_allclose(loss, 1.3, rtol=1e-6)
  alone = jax.grad(masked_lm_mean)(logits, ids, weights)[order]
  np.testing.assert_allclose(gradient, alone, atol=1e-7)


@pytest.mark.parametrize('slots', [20, 80])
def test_b051_unused_slots_do_not_dilute_the_loss(slots):
  logits, ids, _ = random_case(n=slots)
  weights = jnp.zeros(slots).at[0].set(1)
  expected = reference(logits[:1], ids[:1])[0]
  np.testing.assert_allclose(masked_lm_mean(logits, ids, weights), expected, rtol=1e-6)


@pytest.mark.parametrize('spec', [P('data', None), P(None, 'model'), P('data', 'model')])
def test_any_sharding_gives_the_same_and_never_gathers_the_logits(spec):
  logits, ids, weights = random_case(n=16, v=64)
  mesh = jax.make_mesh((2, 4), ('data', 'model'), axis_types=(AxisType.Auto,) * 2)
  sharded = jax.device_put(logits, NamedSharding(mesh, spec))
  rows = NamedSharding(mesh, P(spec[0]))
  args = sharded, jax.device_put(ids, rows), jax.device_put(weights, rows)
  step = jax.jit(jax.value_and_grad(masked_lm_mean)).lower(*args).compile()
  loss, gradient = step(*args)
  expected = jax.value_and_grad(masked_lm_mean)(logits, ids, weights)
  np.testing.assert_allclose(loss, expected[0], rtol=1e-6)
  np.testing.assert_allclose(gradient, expected[1], atol=1e-7)
  assert 'all-gather' not in step.as_text()
  assert 'scatter' not in step.as_text()


# --- Heads of fine-tuning -------------------------------------------------------------------------


def test_classification_is_the_weighted_sum_and_of_ties_the_first_answer_counts():
  logits, labels, weights = random_case(v=3)
  sums = losses.classification(logits, labels, weights)
  np.testing.assert_allclose(sums.loss, (reference(logits, labels) * weights).sum(), rtol=1e-6)
  assert sums.correct == ((np.argmax(logits, -1) == labels) * weights).sum()
  assert sums.weight == weights.sum()
  tied = losses.classification(jnp.zeros((3, 4)), jnp.asarray([0, 1, 3]), jnp.ones(3))
  assert tied.correct == 1


def test_regression_is_the_squared_error_of_real_numbers():
  """B106: labels are never cut to whole numbers."""
  predictions, labels = jnp.asarray([[4.5], [1.0], [9.0]]), jnp.asarray([4.75, 2.6, 0.0])
  sums = losses.regression(predictions, labels, jnp.asarray([1.0, 1.0, 0.0]))
  np.testing.assert_allclose(sums.loss, 0.25**2 + 1.6**2, rtol=1e-6)
  assert sums.correct is None and sums.weight == 2
  gradient = jax.grad(lambda p: losses.regression(p, labels, jnp.ones(3)).loss)(predictions)
  np.testing.assert_allclose(gradient[:, 0], 2 * (predictions[:, 0] - labels), rtol=1e-6)


@settings(deadline=None, max_examples=50)
@given(
    hnp.arrays(np.float32, (4, 3), elements=st.floats(-1e4, 1e4, width=32)),
    hnp.arrays(np.float32, (4, 3), elements=st.sampled_from([0.0, 1.0])),
    hnp.arrays(np.float32, (4,), elements=st.sampled_from([0.0, 1.0])),
)
def test_multi_label_of_any_finite_logits(logits, labels, weights):
  given_weights = jnp.asarray(weights)
  loss = lambda x: losses.multi_label(x, jnp.asarray(labels), given_weights)
  sums = loss(jnp.asarray(logits))
  x = logits.astype(np.float64)
  wanted = (np.logaddexp(0, x) - x * labels).mean(1)
  np.testing.assert_allclose(sums.loss, (wanted * weights).sum(), rtol=1e-5, atol=1e-5)
  assert sums.correct == ((x > 0) == (labels > 0)).all(1) @ weights
  gradient = jax.grad(lambda x: loss(x).loss)(jnp.asarray(logits))
  assert np.isfinite(gradient).all() and (gradient[weights == 0] == 0).all()


def test_span_is_the_mean_of_both_cross_entropies():
  draw = np.random.default_rng(0)
  logits = jnp.asarray(draw.normal(size=(3, 6, 2)), jnp.float32)
  starts, ends, weights = jnp.asarray([0, 2, 5]), jnp.asarray([0, 4, 5]), jnp.ones(3)
  sums = losses.span(logits, starts, ends, weights)
  wanted = (reference(logits[..., 0], starts) + reference(logits[..., 1], ends)) / 2
  np.testing.assert_allclose(sums.loss, wanted.sum(), rtol=1e-6)
  sure = jnp.zeros((2, 6, 2)).at[0, 2, 0].set(9).at[0, 4, 1].set(9).at[1, 2, 0].set(9)
  assert losses.span(sure, jnp.asarray([2, 2]), jnp.asarray([4, 4]), jnp.ones(2)).correct == 1


@pytest.mark.parametrize(('start', 'end'), [(6, 6), (2, 6), (99, 2)])
def test_a_span_outside_of_its_row_is_left_out(start, end):
  logits = jnp.ones((2, 6, 2))
  starts, ends = jnp.asarray([1, start]), jnp.asarray([3, end])
  weights = losses.span_weights(starts, ends, jnp.ones(2), 6)
  assert weights.tolist() == [1, 0]
  sums = losses.span(logits, starts, ends, weights)
  np.testing.assert_allclose(sums.loss, np.log(6), rtol=1e-6)
  assert sums.weight == 1
  gradient = jax.grad(lambda x: losses.span(x, starts, ends, weights).loss)(logits)
  assert (gradient[1] == 0).all() and (gradient[0] != 0).any()


@pytest.mark.parametrize('loss', ['classification', 'regression', 'multi_label', 'span'])
def test_fillers_have_no_part_in_loss_hits_and_gradient(loss):
  draw = np.random.default_rng(1)
  rows = {'classification': (5, 3), 'regression': (5, 1), 'multi_label': (5, 3), 'span': (5, 7, 2)}
  logits = jnp.asarray(draw.normal(size=rows[loss]), jnp.float32)
  labels = {'classification': [jnp.asarray(draw.integers(0, 3, 5))],
            'regression': [jnp.asarray(draw.normal(size=5), jnp.float32)],
            'multi_label': [jnp.asarray(draw.integers(0, 2, (5, 3)), jnp.float32)],
            'span': [jnp.asarray(draw.integers(0, 7, 5)) for _ in range(2)]}[loss]
  function, weights = getattr(losses, loss), jnp.asarray([1.0, 1, 1, 0, 0])
  with_fillers = function(logits, *labels, weights)
  without = function(logits[:3], *(part[:3] for part in labels), jnp.ones(3))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), with_fillers, without)
  gradient = jax.grad(lambda x: function(x, *labels, weights).loss)(logits)
  assert (gradient[3:] == 0).all() and (gradient[:3] != 0).any()
