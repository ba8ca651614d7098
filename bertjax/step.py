"""The pure train and eval steps, and how they are jitted.

Losses are divided once, by the weight of the whole global batch: the result is the same on any
number of devices, of hosts and of accumulated parts.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, UInt

from bertjax import dropout, losses, optim, sharding
from bertjax.objectives import Batch, Objective
from bertjax.state import Params, TrainState

Metrics = dict[str, Float[Array, '']]
Seed = int | np.uint32 | UInt[Array, '']


def _metrics(sums: dict[str, losses.Sums]) -> Metrics:
  """Flat names for the writer: masked_lm_loss_sum, masked_lm_correct_sum, masked_lm_weight, ..."""
  flat = {}
  for name, term in sums.items():
    flat[f'{name}_loss_sum'] = term.loss
    if term.correct is not None:
      flat[f'{name}_correct_sum'] = term.correct
    flat[f'{name}_weight'] = term.weight
  return flat


def _gradients(
    step: 'TrainStep', params: Params, batch: Batch, keys: UInt[Array, 'B'],
) -> tuple[Params, dict[str, losses.Sums]]:
  """Gradient of the loss of the whole batch, computed over pieces of it in turn."""
  weights, parts = step.objective.weights(batch), step.accumulate

  def loss(params, batch, keys):
    params = optim.hold(step.optimizer_settings, params)
    sums = step.objective.terms(nnx.merge(step.graphdef, params), batch, keys)
    return sum(losses.mean(term.loss, weights[name]) for name, term in sums.items()), sums

  gradient = jax.grad(loss, has_aux=True)
  if parts == 1:
    return gradient(params, batch, keys)

  def piece(x):
    # Part j takes rows j, j + parts, ...: every device keeps the rows that it has.
    x = x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1)
    return sharding.constrain_parts(x)

  def add(total, part):
    return jax.tree.map(jnp.add, total, gradient(params, *part)), None

  pieces = jax.tree.map(piece, (batch, keys))
  shapes = jax.eval_shape(gradient, params, *jax.tree.map(lambda x: x[0], pieces))
  zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
  return jax.lax.scan(add, zeros, pieces)[0]


@dataclasses.dataclass(frozen=True)
class TrainStep:
  """(state, batch, seed) -> (state, metrics of the weights before the update).

  The dropout bits depend on the seed, the step and the row of the global batch. It is an argument,
  so that runs which differ in nothing else are one compiled program.

  Attributes:
    graphdef: the model without its parameters.
    objective: the losses.
    optimizer: from `optim.make(optimizer_settings, ...)`.
    optimizer_settings: read for the rate that is logged and for what is frozen.
    accumulate: parts into which a batch is cut to save memory.
  """

  graphdef: nnx.GraphDef
  objective: Objective
  optimizer: optax.GradientTransformationExtraArgs
  optimizer_settings: optim.OptimizerSettings
  accumulate: int = 1

  def __call__(
      self, state: TrainState, batch: Batch, seed: Seed = 0
  ) -> tuple[TrainState, Metrics]:
    rows = batch['input_ids'].shape[0]
    keys = dropout.row_keys(seed, state.step, rows)
    grads, sums = _gradients(self, state.params, batch, keys)
    norm = optim.global_norm(grads)
    rate = optim.learning_rate(self.optimizer_settings, state.opt_state)
    updates, opt_state = self.optimizer.update(
        grads, state.opt_state, state.params, grad_norm=norm)
    params = optax.apply_updates(state.params, updates)
    metrics = _metrics(sums) | self.objective.counts(batch)
    metrics |= {'grad_norm': norm, 'learning_rate': rate}
    return TrainState(step=state.step + 1, params=params, opt_state=opt_state), metrics


def seed_word(seed: int) -> np.uint32:
  """A seed of any size as the step takes it."""
  return np.uint32(seed & 0xFFFFFFFF)


def jit_train_step(step: TrainStep, like: TrainState) -> Callable:
  """The step compiled for the layout of `like`; the state given to it is donated."""
  def train_step(
      state: TrainState, batch: Batch, seed: Seed = 0
  ) -> tuple[TrainState, Metrics]:
    return step(state, batch, seed)  # a function, unlike an object, has a name in profiles and logs

  where = jax.tree.map(lambda leaf: leaf.sharding, like)
  return jax.jit(train_step, donate_argnums=0, out_shardings=(where, None))


def jit_eval_step(graphdef: nnx.GraphDef, objective: Objective) -> Callable:
  """(params, batch) -> metric sums, without dropout; nothing is donated."""

  def eval_step(params: Params, batch: Batch) -> Metrics:
    sums = objective.terms(nnx.merge(graphdef, params), batch, None)
    return _metrics(sums) | objective.counts(batch)

  return jax.jit(eval_step)
