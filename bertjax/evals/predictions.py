"""A head's outputs for every example, in order, on any batch size and any number of processes."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jaxtyping import Float32

from bertjax import objectives, sharding, state
from bertjax.data import examples as examples_lib
from bertjax.data import loader
from bertjax.data.examples import Examples

Step = Callable[[state.Params, dict[str, jax.Array]], jax.Array]


class Predicted(NamedTuple):
  """Outputs of N examples and, where they have targets, their mean loss."""

  outputs: Float32[np.ndarray, 'N ...']
  loss: float | None


def jit_outputs(graphdef: nnx.GraphDef, kind: str, with_loss: bool) -> Step:
  """(params, batch) -> (outputs, loss sum, weight), without dropout; one for all splits."""
  head = objectives.FINE_TUNING[kind]

  def step(params, batch):
    outputs = head.outputs(nnx.merge(graphdef, params), batch, None)
    if not with_loss:
      return outputs, 0.0, 0.0
    sums = head.sums(outputs, batch)
    return outputs, sums.loss, sums.weight

  return jax.jit(step)


def has_targets(examples: Examples) -> bool:
  return 'labels' in examples.values or 'labels' in examples.tokens or (
      'start_positions' in examples.values)


class Predictor:
  """Runs a model over the same examples each time.

  Args:
    step: from `jit_outputs`.
    examples: at least one.
    buckets: lengths of rows; see examples.plan_epoch.
    batch_size: rows of a global batch; filled up to what the devices divide.
    mesh: the devices.
  """

  def __init__(self, step: Step, examples: Examples, buckets: Sequence[int], batch_size: int,
               mesh: jax.sharding.Mesh):
    ways = sharding.row_ways(mesh.shape)
    self._rows = -(-batch_size // ways) * ways
    self._step, self._examples, self._mesh = step, examples, mesh
    self._groups = examples_lib.plan_epoch(examples.lengths, buckets, self._rows, epoch=None)
    self._own = sharding.own_rows(mesh, self._rows)

  def run(
      self, params: state.Params, stopped: Callable[[], bool] = lambda: False
  ) -> Predicted | None:
    """The outputs on every process; token axes are as long as the longest rows. None if `stopped`.

    Args:
      params: of the model.
      stopped: asked between batches.
    """
    outputs, loss, weight = None, 0.0, 0.0
    longest = max(group.length for group in self._groups)
    for group in self._groups:
      if stopped():
        return None
      batch = examples_lib.make_batch(self._examples, group, self._rows, self._own)
      found, batch_loss, batch_weight = self._step(params, loader.to_devices(batch, self._mesh))
      found = multihost_utils.process_allgather(found, tiled=True)
      if outputs is None:
        # Outputs of tokens are [B, T, C]; padding beyond a group's length stays 0.
        tokens = (longest,) if found.ndim == 3 else ()
        outputs = np.zeros((len(self._examples), *tokens, found.shape[-1]), np.float32)
      where = (group.indices, slice(group.length)) if found.ndim == 3 else group.indices
      outputs[where] = found[:len(group.indices)]
      loss, weight = loss + float(batch_loss), weight + float(batch_weight)
    return Predicted(outputs, loss / weight if weight else None)
