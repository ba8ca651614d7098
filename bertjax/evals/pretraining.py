"""Masked-LM and next-sentence quality on held-out documents, with masks fixed once."""

from collections.abc import Callable, Iterable

import jax
import numpy as np
from flax import nnx

from bertjax import metrics, objectives
from bertjax import step as step_lib
from bertjax.data import loader
from bertjax.state import Params


class PretrainingEvaluator:
  """Runs a model over the same held-out batches each time (a job.Evaluator).

  The batches are kept in memory: they are few, and making them again would cost more.
  """

  split = 'heldout'

  def __init__(
      self, graphdef: nnx.GraphDef, batches: Iterable[dict[str, np.ndarray]],
      mesh: jax.sharding.Mesh, num_examples: int,
  ):
    self._step = step_lib.jit_eval_step(graphdef, objectives.PRETRAINING)
    self._batches, self._mesh = list(batches), mesh
    self.num_examples = num_examples

  def run(
      self, params: Params, stopped: Callable[[], bool] = lambda: False
  ) -> dict[str, float] | None:
    """Losses and accuracies over all examples, each counted once; None if `stopped` in between.

    Args:
      params: of the model.
      stopped: asked between batches.
    """
    totals: dict[str, float] = {}
    for batch in self._batches:
      if stopped():
        return None
      sums = jax.device_get(self._step(params, loader.to_devices(batch, self._mesh)))
      for name, value in sums.items():  # added up in float64 on the host
        totals[name] = totals.get(name, 0.0) + float(value)
    return metrics.heldout_means(totals)
