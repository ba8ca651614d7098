"""What the loop trains: all that train.py needs to know of a task, and nothing else.

Pre-training (pretraining.py) and every fine-tuning (finetune/) make a Job from their configuration;
the loop, the step, the checkpoints, the metrics and the resume are then the same code.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from etils import epath
from flax import nnx

from bertjax import state
from bertjax.alarms import Alarms
from bertjax.objectives import Objective
from bertjax.optim import OptimizerSettings

# Field name -> (global shape, numpy type) of a batch.
Shapes = dict[str, tuple[tuple[int, ...], type[np.generic]]]
Scores = dict[str, float | None]


@dataclasses.dataclass(frozen=True)
class CheckpointSettings:
  """When to save and what to keep, in steps; keep_every 0 keeps no old ones for good.

  Raises:
    ValueError: numbers below their least.
  """

  every: int = 1000
  keep_last: int = 3
  keep_every: int = 0

  def __post_init__(self):
    if self.every < 1 or self.keep_last < 1 or self.keep_every < 0:
      raise ValueError(
          f'checkpoint: every {self.every} and keep_last {self.keep_last} must be at least 1, '
          f'keep_every {self.keep_every} at least 0')


@runtime_checkable
class Stream(Protocol):
  """The batches of a stage; batch s is a pure function of the data, the seed and s.

  Attributes:
    shapes: the few shapes that batches have; the step is compiled once for each.
    examples_per_row: 1, or of packed rows how many there are on average.
    mean_length: tokens of a row, padding included, on average.
    statistics: of the data, for the record.
  """

  shapes: tuple[Shapes, ...]
  examples_per_row: float
  mean_length: float
  statistics: dict[str, Any]

  def batches(self, first: int, num_steps: int) -> Iterator[dict[str, np.ndarray]]:
    """This process's rows of `num_steps` batches, from step `first` of the stage on."""
    ...


@runtime_checkable
class Evaluator(Protocol):
  """Measures a model on data that it was not trained on; each example counts once.

  Attributes:
    split: what the data are called in the records, e.g. 'heldout'.
  """

  split: str

  def run(self, params: state.Params, stopped: Callable[[], bool] = lambda: False) -> Scores | None:
    """The scores (None for one that is undefined); None if `stopped` in between."""
    ...


@dataclasses.dataclass(frozen=True)
class Stage:
  """A stretch of steps: a phase of pre-training, or the whole of a fine-tuning.

  Attributes:
    objective: the losses.
    num_steps: steps of the stage.
    batch_size: rows of a global batch.
    optimizer: with the length of the schedule that the stage is part of.
    open: makes the stream; called when the stage begins.
    flops_per_row: forward and backward, of a row's length; for the MFU.
    accumulate: parts into which each batch is cut to save memory.
    warmup_end: the step of the run at which the warm-up of the stage's schedule is over.
    restart_moments: forget Adam's moments where the stage begins.
    restart_schedule: begin a new schedule where the stage begins.
  """

  objective: Objective
  num_steps: int
  batch_size: int
  optimizer: OptimizerSettings
  open: Callable[[], Stream]
  flops_per_row: Callable[[float], float]
  accumulate: int = 1
  warmup_end: int = 0
  restart_moments: bool = False
  restart_schedule: bool = False


def _nothing_differs(stored: Mapping[str, Any], step: int) -> list[str]:
  del stored, step
  return []


def _never(step: int, params: state.Params, scores: Scores) -> bool:
  del step, params, scores
  return False


@dataclasses.dataclass(frozen=True)
class Job:
  """A training run but for its workdir.

  Attributes:
    title: what it is, for the start-up block.
    build: from nnx.Rngs to the model.
    stages: in turn.
    mesh: the devices.
    seed: of weights and dropout.
    metadata: JSON that every checkpoint carries: config, data_hash, tokenizer_hash, head.
    tokenizer: folder whose files every checkpoint carries.
    checkpoint: when to save.
    log_every: steps between lines.
    evaluate_every: steps between evaluations; 0: only at the end.
    open_evaluator: makes the evaluator, or None where there is nothing to evaluate on.
    alarms: what is said when the losses look wrong.
    baselines: numbers to draw beside the losses, e.g. the unigram entropy.
    initial: weights to begin with and in words where they are from; None: a fresh model.
    differences: what a stored configuration has otherwise than this one, a line each.
    describe: lines of the start-up block, after title, workdir, start and devices.
    judge: told of every evaluation; True ends the training there.
    forget: removes what an earlier run left here that saved no checkpoint; called before step 0.
    is_over: whether a run that stands at a step has nothing left to do (early stopping).
    farewell: what to do next, given the workdir.
  """

  title: str
  build: Callable[[nnx.Rngs], nnx.Module]
  stages: tuple[Stage, ...]
  mesh: jax.sharding.Mesh
  seed: int
  metadata: dict[str, Any]
  tokenizer: epath.Path
  checkpoint: CheckpointSettings = CheckpointSettings()
  log_every: int = 100
  evaluate_every: int = 0
  open_evaluator: Callable[[], Evaluator | None] = lambda: None
  alarms: Alarms = dataclasses.field(default_factory=Alarms)
  baselines: dict[str, float] = dataclasses.field(default_factory=dict)
  initial: Callable[[], tuple[state.Params, str]] | None = None
  differences: Callable[[Mapping[str, Any], int], list[str]] = _nothing_differs
  describe: Callable[[], list[str]] = list
  judge: Callable[[int, state.Params, Scores], bool] = _never
  forget: Callable[[], None] = lambda: None
  is_over: Callable[[int], bool] = lambda step: False
  farewell: Callable[[epath.Path], list[str]] = lambda workdir: []

  @property
  def num_steps(self) -> int:
    return sum(stage.num_steps for stage in self.stages)

  def starts(self) -> tuple[int, ...]:
    """The step at which each stage begins."""
    starts = [0]
    for stage in self.stages[:-1]:
      starts.append(starts[-1] + stage.num_steps)
    return tuple(starts)

  def stage_at(self, step: int) -> int:
    """The stage that takes `step`; the last one at the very end."""
    return max(i for i, start in enumerate(self.starts()) if start <= step)

  def position(self, step: int) -> dict[str, int]:
    """Where in the data a step stands: all that a resume needs."""
    stage, starts = self.stage_at(step), self.starts()
    seen = sum(s.batch_size * min(s.num_steps, max(0, step - start))
               for s, start in zip(self.stages, starts, strict=True))
    return {'phase': stage, 'step_in_phase': step - starts[stage], 'rows_seen': seen}
