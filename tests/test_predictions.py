"""Outputs of every example, in order, the same on any batch size and any number of devices."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from test_model import TINY

from bertjax import heads, objectives, sharding, state
from bertjax.data.examples import Examples
from bertjax.evals import predictions

OUTPUTS = {'classification': 3, 'regression': 1, 'multi_label': 4, 'choice': 1, 'tagging': 5,
           'span': 2}
BUCKETS = (8, 16, 32)


def drawn(kind, count=13, lengths=range(3, 31), seed=0) -> Examples:
  """Examples of these lengths, the shortest and the longest among them."""
  draw = np.random.default_rng(seed)
  tokens = {'input_ids': [], 'token_type_ids': [], 'attention_mask': []}
  lengths = np.array([lengths[0], lengths[-1], *draw.choice(lengths, count)])[:count]
  for length in lengths:
    shape = (4, length) if kind == 'choice' else (length,)
    tokens['input_ids'].append(draw.integers(5, TINY.vocab_size, shape).astype(np.int32))
    tokens['token_type_ids'].append(draw.integers(0, 2, shape).astype(np.int32))
    tokens['attention_mask'].append(np.ones(shape, np.int32))
    if kind == 'tagging':
      tokens.setdefault('labels', []).append(draw.integers(0, 5, shape).astype(np.int32))
      weights = draw.integers(0, 2, shape).astype(np.float32)
      tokens.setdefault('label_weights', []).append(weights)
  labels = {
      'classification': draw.integers(0, 3, count).astype(np.int32),
      'regression': draw.normal(size=count).astype(np.float32),
      'multi_label': draw.integers(0, 2, (count, 4)).astype(np.float32),
      'choice': draw.integers(0, 4, count).astype(np.int32)}
  values = {'labels': labels[kind]} if kind in labels else {}
  if kind == 'span':
    values = {name: draw.integers(0, lengths).astype(np.int32)
              for name in ('start_positions', 'end_positions')}
  return Examples(tokens, values)


class Toy(nnx.Module):
  """A head of that kind on nothing but a table of words: it compiles in no time.

  At padding it gives what would show in a loss that counted it.
  """

  def __init__(self, kind, rngs):
    self.kind = kind
    width = OUTPUTS[kind]
    self.table = nnx.Param(jax.random.normal(rngs.params(), (TINY.vocab_size, width)))

  def __call__(self, input_ids, token_type_ids, attention_mask, dropout_keys):
    assert dropout_keys is None  # nothing is dropped in evaluation
    words = self.table[...][input_ids] * (1.0 + token_type_ids[..., None])
    if self.kind in ('tagging', 'span'):
      return jnp.where(attention_mask[..., None] > 0, words, -99.0)
    rows = (words * attention_mask[..., None]).sum(-2)
    return rows[..., 0] if self.kind == 'choice' else rows


@functools.cache
def model(kind, toy=True):
  """graphdef, parameters and the compiled function."""
  # Weights far from the tiny ones of a start: outputs differ.
  config = dataclasses.replace(TINY, initializer_range=0.3)
  head = heads.HeadConfig(kind, OUTPUTS[kind])
  build = lambda rngs: Toy(kind, rngs) if toy else heads.HEADS[kind](config, head, rngs)
  params = jax.device_get(jax.jit(lambda: state.init_params(build, 0))())
  graphdef, _ = state.split(build)
  return graphdef, params, predictions.jit_outputs(graphdef, kind, with_loss=True)


def run(kind, examples, batch_size, devices=1, toy=True, **more):
  _, params, step = model(kind, toy)
  mesh = sharding.make_mesh(sharding.MeshSettings(), jax.devices()[:devices])
  with jax.set_mesh(mesh):
    params = jax.device_put(params, sharding.shardings(params, mesh))
    return predictions.Predictor(step, examples, BUCKETS, batch_size, mesh).run(params, **more)


def one_by_one(kind, examples, toy=True):
  """Each example alone, at its own length and without the batching code; and the mean loss."""
  graphdef, params, _ = model(kind, toy)
  head, outputs, total, weight = objectives.FINE_TUNING[kind], [], 0.0, 0.0

  @jax.jit
  def step(params, batch):
    found = head.outputs(nnx.merge(graphdef, params), batch, None)
    return found, head.sums(found, batch)

  for number in range(len(examples)):
    batch = {name: rows[number][None] for name, rows in examples.tokens.items()}
    batch |= {name: rows[number][None] for name, rows in examples.values.items()}
    found, sums = step(params, batch | {'weights': np.ones(1, np.float32)})
    outputs.append(np.asarray(found[0]))
    total, weight = total + float(sums.loss), weight + float(sums.weight)
  return outputs, total / weight


def assert_are(found, outputs, loss, atol=2e-5):
  assert len(found.outputs) == len(outputs) and found.outputs.dtype == np.float32
  for row, wanted in zip(found.outputs, outputs, strict=True):
    np.testing.assert_allclose(row[:len(wanted)] if wanted.ndim == 2 else row, wanted, atol=atol)
  np.testing.assert_allclose(found.loss, loss, rtol=1e-5)


@functools.cache
def thirteen(kind):
  """Thirteen examples and what is to be found of them."""
  examples = drawn(kind, lengths=(3, 12))
  return examples, one_by_one(kind, examples)


@pytest.mark.parametrize('devices', [1, 2, 8])
@pytest.mark.parametrize('batch_size', [1, 5, 8, 13, 64])
@pytest.mark.parametrize('kind', OUTPUTS)
def test_b132_any_batch_size_and_any_number_of_devices(kind, batch_size, devices):
  """The last batch is hardly ever full, and all thirteen count."""
  examples, (outputs, loss) = thirteen(kind)
  assert_are(run(kind, examples, batch_size, devices), outputs, loss, atol=1e-6)


@pytest.mark.parametrize('kind', ['classification', 'choice', 'tagging'])
def test_b132_outputs_of_a_bert_are_those_of_each_example_alone(kind):
  examples = drawn(kind, count=7, lengths=(3, 12))
  outputs, loss = one_by_one(kind, examples, toy=False)
  found = run(kind, examples, 5, devices=2, toy=False)
  assert_are(found, outputs, loss)
  assert not np.allclose(found.outputs[0], found.outputs[1], atol=1e-2)  # nor are all the same


@pytest.mark.parametrize('kind', OUTPUTS)
def test_b133_one_example(kind):
  examples = drawn(kind, count=1, lengths=(5,))
  found = run(kind, examples, 8)
  assert len(found.outputs) == 1
  assert_are(found, *one_by_one(kind, examples))


@pytest.mark.parametrize('kind', ['tagging', 'span'])
def test_outputs_of_tokens_are_as_long_as_the_longest_rows(kind):
  examples = drawn(kind)
  found = run(kind, examples, 4)
  assert found.outputs.shape == (13, 32, OUTPUTS[kind])
  short = run(kind, Examples(
      {name: rows[:1] for name, rows in examples.tokens.items()},
      {name: rows[:1] for name, rows in examples.values.items()}), 4)
  assert short.outputs.shape == (1, 8, OUTPUTS[kind])  # its one example has 3 tokens
  np.testing.assert_allclose(short.outputs[0, :3], found.outputs[0, :3], atol=5e-6)


def test_without_targets_there_is_no_loss():
  examples = drawn('classification', count=3)
  graphdef, params, _ = model('classification')
  step = predictions.jit_outputs(graphdef, 'classification', with_loss=False)
  mesh = sharding.make_mesh(sharding.MeshSettings(), jax.devices()[:1])
  with jax.set_mesh(mesh):
    found = predictions.Predictor(step, Examples(examples.tokens, {}), BUCKETS, 2, mesh).run(params)
  assert found.loss is None
  np.testing.assert_array_equal(found.outputs, run('classification', examples, 2).outputs)


def test_tokens_of_which_none_has_a_label_have_no_loss():
  examples = drawn('tagging', count=2)
  for weights in examples.tokens['label_weights']:
    weights[:] = 0
  assert run('tagging', examples, 2).loss is None


def test_has_targets():
  assert all(predictions.has_targets(drawn(kind, count=2)) for kind in OUTPUTS)
  assert not predictions.has_targets(Examples(drawn('span', count=2).tokens, {}))


def test_a_request_to_stop_is_heard_between_batches():
  asked = []

  def stopped():
    asked.append(1)
    return len(asked) == 3

  assert run('classification', drawn('classification'), 2, stopped=stopped) is None
  assert len(asked) == 3
