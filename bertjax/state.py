"""The train state: abstract, created sharded, or with parameters from elsewhere."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from bertjax import sharding

Params = dict[str, Any]  # a nested dict of float32 arrays


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
  """All that a step reads and writes; the data position and the dropout bits follow from `step`."""

  step: Any  # int32 []; in place of arrays a state may hold their shapes or shardings
  params: Params
  opt_state: Any


def split(build) -> tuple[nnx.GraphDef, Params]:
  """The static part of a module and the shapes of its parameters, without allocating anything.

  Args:
    build: a function from `nnx.Rngs` to the module.
  """
  graphdef, state = nnx.split(nnx.eval_shape(lambda: build(nnx.Rngs(0))))
  return graphdef, nnx.to_pure_dict(state)


def init_params(build, seed: int) -> Params:
  """Parameters at their start, a nested dict of float32 arrays (to be called under `jit`)."""
  return nnx.to_pure_dict(nnx.state(build(nnx.Rngs(seed)), nnx.Param))


def abstract(params: Params, optimizer: optax.GradientTransformation, mesh: Mesh) -> TrainState:
  """The state as shapes with shardings: the one source of what a state looks like on this mesh."""
  shapes = TrainState(
      step=jax.ShapeDtypeStruct((), jnp.int32), params=params,
      opt_state=jax.eval_shape(optimizer.init, params))
  return jax.tree.map(
      lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
      shapes, sharding.shardings(shapes, mesh))


def create(
    build, seed: int, optimizer: optax.GradientTransformation, like: TrainState
) -> TrainState:
  """A fresh state laid out as `like`: nothing is ever materialised unsharded."""
  def init():
    params = init_params(build, seed)
    return TrainState(
        step=jnp.zeros((), jnp.int32), params=params, opt_state=optimizer.init(params))

  return jax.jit(init, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, like))()


def from_params(
    params: Params, optimizer: optax.GradientTransformation, like: TrainState
) -> TrainState:
  """A state at step 0 with given parameters (`init_from`) and fresh moments, laid out as `like`."""
  params = jax.tree.map(
      lambda array, leaf: jax.device_put(jnp.asarray(array, leaf.dtype), leaf.sharding),
      params, like.params)
  where = jax.tree.map(lambda leaf: leaf.sharding, like.opt_state)
  opt_state = jax.jit(optimizer.init, out_shardings=where)(params)
  step = jax.device_put(jnp.zeros((), jnp.int32), like.step.sharding)
  return TrainState(step=step, params=params, opt_state=opt_state)


def count_parameters(params: Params) -> int:
  return sum(leaf.size for leaf in jax.tree.leaves(params))
