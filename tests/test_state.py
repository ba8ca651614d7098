"""The train state: shapes without arrays, a fresh one, one with given weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_model import TINY

from bertjax import heads, optim, sharding, state

SETTINGS = optim.OptimizerSettings(num_steps=10, warmup_steps=0)


def build(rngs):
  return heads.BertForPreTraining(TINY, rngs)


@pytest.fixture(scope='module')
def shapes():
  return state.split(build)[1]


@pytest.fixture(scope='module')
def params():
  return jax.device_get(jax.jit(lambda: state.init_params(build, 3))())


def on_mesh(shapes, **axes):
  mesh = sharding.make_mesh(sharding.MeshSettings(**axes))
  optimizer = optim.make(SETTINGS, shapes)
  return mesh, optimizer, state.abstract(shapes, optimizer, mesh)


def test_split_allocates_nothing(shapes, params):
  leaves = jax.tree.leaves(shapes)
  assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
  assert jax.tree.structure(shapes) == jax.tree.structure(params)
  assert [leaf.shape for leaf in leaves] == [leaf.shape for leaf in jax.tree.leaves(params)]
  assert {leaf.dtype for leaf in leaves} == {jnp.dtype('float32')}
  assert state.count_parameters(shapes) == sum(leaf.size for leaf in jax.tree.leaves(params))


def test_parameters_are_a_function_of_the_seed(params):
  again = jax.jit(lambda: state.init_params(build, 3))()
  jax.tree.map(np.testing.assert_array_equal, again, params)
  other = jax.jit(lambda: state.init_params(build, 4))()
  kernel = lambda tree: np.asarray(tree['bert']['pooler']['kernel'])
  assert not (kernel(other) == kernel(params)).any()


@pytest.mark.parametrize('axes', [{'data': 8}, {'data': 2, 'fsdp': 4}])
def test_a_fresh_state_is_the_same_on_any_mesh_and_laid_out_as_it_was_said(shapes, params, axes):
  mesh, optimizer, like = on_mesh(shapes, **axes)
  with jax.set_mesh(mesh):
    made = state.create(build, 3, optimizer, like)
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(made.params), params)
  assert made.step == 0 and made.step.dtype == jnp.int32
  assert all(not leaf.any() for leaf in jax.tree.leaves(made.opt_state))
  jax.tree.map(lambda leaf, wanted: np.testing.assert_(
      leaf.sharding.is_equivalent_to(wanted.sharding, leaf.ndim)), made, like)


def test_given_parameters_are_taken_over_bit_for_bit(shapes, params):
  mesh, optimizer, like = on_mesh(shapes, data=2, fsdp=4)
  with jax.set_mesh(mesh):
    made = state.from_params(params, optimizer, like)
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(made.params), params)
  assert made.step == 0 and all(not leaf.any() for leaf in jax.tree.leaves(made.opt_state))
  assert jax.tree.structure(made) == jax.tree.structure(like)
  jax.tree.map(lambda leaf, wanted: np.testing.assert_(
      leaf.sharding.is_equivalent_to(wanted.sharding, leaf.ndim)), made, like)


def test_parameters_of_another_model_are_refused(shapes, params):
  mesh, optimizer, like = on_mesh(shapes, data=8)
  with jax.set_mesh(mesh), pytest.raises(ValueError):
    state.from_params({'bert': params['bert']}, optimizer, like)
