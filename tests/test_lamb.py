"""LAMB against MLCommons' and optax's (golden/03_optim), and its trust ratio by itself."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_optim import GOOGLE, arrays, trajectory

from bertjax import optim

LAMB = dataclasses.replace(GOOGLE, name='lamb', bias_correction=True)


@pytest.fixture
def float64():
  with jax.enable_x64(True):
    yield


@pytest.mark.parametrize('file, changes', [
    ('lamb_biascorr_excluded_mlcommons.npz', {}),
    ('lamb_biascorr_all_adapted_optax.npz', {'trust_exempt': False}),
    ('lamb_no_biascorr_excluded_google_albert.npz', {'bias_correction': False}),
])
def test_lamb_is_that_of_the_references(golden, float64, file, changes):
  folder = golden / '03_optim'
  expected = arrays(folder / file, 'p')
  settings = dataclasses.replace(LAMB, **changes)
  for i, (ours, _, _) in enumerate(trajectory(settings, folder / 'inputs.npz', jnp.float64)):
    for name in expected:
      # The references agree to 1e-9 among themselves (meta.json).
      np.testing.assert_allclose(ours[name], expected[name][i], rtol=0, atol=2e-9)


def step(params, grads, **changes):
  settings = optim.OptimizerSettings(
      name='lamb', learning_rate=0.1, warmup_steps=0, num_steps=10, power=0.0, bias_correction=True,
      clip_norm=0.0, weight_decay=0.0, decay_exclude=(), **changes)
  transformation = optim.make(settings, params)
  return transformation.update(grads, transformation.init(params), params)[0]


def test_each_stacked_layer_is_adapted_by_itself():
  draw = np.random.default_rng(0)
  layers = draw.normal(size=(3, 4, 4)) * np.array([0.1, 1, 10])[:, None, None]
  grads = draw.normal(size=(3, 4, 4))
  name = lambda tree: {'bert': {'encoder': {'layers': {'output': {'kernel': jnp.asarray(tree)}}}}}
  stacked = jax.tree.leaves(step(name(layers), name(grads)))[0]
  for layer in range(3):
    alone = step({'kernel': jnp.asarray(layers[layer])}, {'kernel': jnp.asarray(grads[layer])})
    np.testing.assert_allclose(stacked[layer], alone['kernel'], rtol=1e-5)
    np.testing.assert_allclose(  # the update is as long as rate times the parameter
        np.linalg.norm(stacked[layer]), 0.1 * np.linalg.norm(layers[layer]), rtol=1e-5)


def test_a_parameter_or_update_of_zero_is_not_adapted():
  params, grads = {'kernel': jnp.zeros((2, 2))}, {'kernel': jnp.ones((2, 2))}
  np.testing.assert_allclose(step(params, grads)['kernel'], -0.1 * np.ones((2, 2)), rtol=1e-4)
  params, grads = {'kernel': jnp.ones((2, 2))}, {'kernel': jnp.zeros((2, 2))}
  np.testing.assert_array_equal(step(params, grads)['kernel'], np.zeros((2, 2)))


def test_the_state_is_that_of_adamw():
  params = {'encoder': {'layers': {'kernel': jnp.ones((2, 3))}}, 'bias': jnp.ones(3)}
  exempt = {'warmup_steps': 0, 'num_steps': 5, 'decay_exclude': ('bias$',)}
  trees = [jax.tree.structure(optim.make(
      optim.OptimizerSettings(name=name, **exempt), params).init(params))
           for name in ('adamw', 'lamb')]
  assert trees[0] == trees[1]
