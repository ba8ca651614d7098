"""The train step: one device is eight, parts are the whole, one compilation, exact sums."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_model import TINY, random_batch

from bertjax import heads, objectives, optim, sharding, state, step

SETTINGS = optim.OptimizerSettings(learning_rate=1e-3, warmup_steps=2, num_steps=10)
DROPPING = dataclasses.replace(TINY, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)


def train(config, batches, *, data=1, fsdp=1, model=1, accumulate=1, settings=SETTINGS, seed=0):
  """Steps over `batches` on a mesh of that shape: the last state, the metrics of each, the jit."""
  mesh = sharding.make_mesh(
      sharding.MeshSettings(data, fsdp, model), jax.devices()[:data * fsdp * model])
  build = lambda rngs: heads.BertForPreTraining(config, rngs)
  graphdef, shapes = state.split(build)
  optimizer = optim.make(settings, shapes)
  with jax.set_mesh(mesh):
    like = state.abstract(shapes, optimizer, mesh)
    current = state.create(build, 0, optimizer, like)
    jitted = step.jit_train_step(
        step.TrainStep(graphdef, objectives.PRETRAINING, optimizer, settings, seed, accumulate),
        like)
    metrics = []
    for batch in batches:
      current, values = jitted(current, jax.device_put(batch, sharding.batch_sharding(mesh)))
      metrics.append(jax.device_get(values))
  return current, metrics, jitted


def uneven_batches(count=3, rows=8):
  """Rows with very unequal numbers of predictions (B050)."""
  batches = [random_batch(rows=rows, seed=seed) for seed in range(count)]
  for batch in batches:
    share = np.linspace(0, 1, rows)[:, None]
    used = np.arange(batch['masked_lm_weights'].shape[1])[None] < share * 5
    batch['masked_lm_weights'] = jnp.asarray(used, jnp.float32)
  return batches


def assert_same(one, other, atol=1e-6):
  (state_one, metrics_one, _), (state_other, metrics_other, _) = one, other
  for a, b in zip(metrics_one, metrics_other, strict=True):
    for name in a:
      np.testing.assert_allclose(a[name], b[name], rtol=2e-5, err_msg=name)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=atol),
               jax.device_get(state_one.params), jax.device_get(state_other.params))


@pytest.fixture(scope='module')
def alone():
  """Three steps on one device with dropout on."""
  return train(DROPPING, uneven_batches())


@pytest.mark.parametrize('mesh', [
    {'data': 2}, {'data': 8}, {'fsdp': 8}, {'data': 2, 'fsdp': 4},
    {'data': 2, 'fsdp': 2, 'model': 2},
])
def test_b050_any_mesh_gives_the_losses_and_weights_of_one_device(alone, mesh):
  """With dropout on: a bit depends on the row of the global batch, never on the device."""
  assert_same(train(DROPPING, uneven_batches(), **mesh), alone, atol=2e-6)


@pytest.mark.parametrize('accumulate', [2, 4])
def test_accumulated_parts_are_the_whole_batch(alone, accumulate):
  assert_same(train(DROPPING, uneven_batches(), accumulate=accumulate), alone, atol=2e-6)
  sharded = train(DROPPING, uneven_batches(), accumulate=accumulate, data=2)
  assert_same(sharded, alone, atol=2e-6)


def test_the_step_is_compiled_once_and_its_state_donated():
  current, _, jitted = train(TINY, uneven_batches(), data=2, fsdp=2)
  assert jitted._cache_size() == 1
  mesh = sharding.make_mesh(sharding.MeshSettings(2, 2, 1), jax.devices()[:4])
  batch = jax.device_put(uneven_batches(1)[0], sharding.batch_sharding(mesh))
  with jax.set_mesh(mesh):
    jitted(current, batch)
  assert all(leaf.is_deleted() for leaf in jax.tree.leaves(current.params))


def test_fsdp_shards_parameters_and_moments_by_the_same_table():
  current, _, _ = train(TINY, uneven_batches(1), data=2, fsdp=4)
  moments = current.opt_state[1]
  for tree in (current.params, moments.mu, moments.nu):
    layers = tree['bert']['encoder']['layers']
    kernel = layers['intermediate']['kernel']
    assert kernel.addressable_shards[0].data.shape == (2, TINY.hidden_size // 4, 64)
    table = tree['bert']['embeddings']['word_embeddings']['embedding']
    assert table.addressable_shards[0].data.shape[0] == TINY.padded_vocab_size // 4


def test_pure_data_parallelism_communicates_nothing_but_reductions():
  """No all-gather and no all-to-all: gradients and metrics are all-reduced."""
  _, _, jitted = train(TINY, [])
  mesh = sharding.make_mesh(sharding.MeshSettings(8), jax.devices())
  build = lambda rngs: heads.BertForPreTraining(TINY, rngs)
  graphdef, shapes = state.split(build)
  optimizer = optim.make(SETTINGS, shapes)
  with jax.set_mesh(mesh):
    like = state.abstract(shapes, optimizer, mesh)
    jitted = step.jit_train_step(
        step.TrainStep(graphdef, objectives.PRETRAINING, optimizer, SETTINGS, 0), like)
    batch = jax.device_put(uneven_batches(1)[0], sharding.batch_sharding(mesh))
    program = jitted.lower(like, batch).compile().as_text()
  assert ' all-reduce' in program
  assert ' all-gather' not in program and ' all-to-all' not in program


def test_b057_the_logged_rate_is_the_applied_rate():
  """Against the schedule of the paper's code: the first update of a warm-up has rate 0."""
  _, metrics, _ = train(TINY, uneven_batches(4))
  rates = [float(values['learning_rate']) for values in metrics]
  np.testing.assert_allclose(rates, [0, 5e-4, 1e-3 * (1 - 2 / 10), 1e-3 * (1 - 3 / 10)], rtol=1e-6)


def test_gradient_norm_is_that_of_the_unclipped_global_gradient():
  batches = uneven_batches(1)
  free = train(TINY, batches, settings=dataclasses.replace(SETTINGS, clip_norm=0.0))
  clipped = train(TINY, batches, settings=dataclasses.replace(SETTINGS, clip_norm=1e-3), data=4)
  np.testing.assert_allclose(
      free[1][0]['grad_norm'], clipped[1][0]['grad_norm'], rtol=1e-5)
  assert free[1][0]['grad_norm'] > 0.01


def test_another_seed_drops_other_elements(alone):
  other = train(DROPPING, uneven_batches(), seed=1)
  assert other[1][0]['masked_lm_loss_sum'] != alone[1][0]['masked_lm_loss_sum']


@pytest.mark.parametrize('sizes, mend', [
    ({'data': 3}, 'set one axis to -1'), ({'data': -1, 'fsdp': -1}, 'one may be -1'),
    ({'data': 0}, 'positive'), ({'data': 2, 'fsdp': 2}, 'does not fit 8 devices')])
def test_a_mesh_that_does_not_fit_is_refused_with_the_mend(sizes, mend):
  with pytest.raises(ValueError, match=mend):
    sharding.make_mesh(sharding.MeshSettings(**sizes))


def test_every_parameter_is_named_in_the_sharding_table():
  """The last rule, 'replicated', is for vectors only: a matrix that it takes was forgotten."""
  _, shapes = state.split(lambda rngs: heads.BertForPreTraining(TINY, rngs))
  mesh = sharding.make_mesh(sharding.MeshSettings(data=1, fsdp=8))

  def check(path, leaf):
    name = jax.tree_util.keystr(path, simple=True, separator='/')
    small = 'position' in name or 'token_type' in name or name == 'next_sentence/kernel'
    stacked = 'layers/' in name
    if leaf.ndim - stacked >= 2 and not small:
      assert any(sharding.spec_of(name, leaf.shape, mesh)), name

  jax.tree_util.tree_map_with_path(check, shapes)
