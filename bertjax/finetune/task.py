"""What a fine-tuning task gives to the driver: examples, a head, scores, files of predictions."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from etils import epath
from jaxtyping import Float32

from bertjax.config import ConfigError
from bertjax.data.examples import Examples
from bertjax.job import Scores

CUSTOM = 'custom'  # the name of a task on a person's own texts
Outputs = Float32[np.ndarray, 'N ...']


def _no_facts(scores: Scores) -> dict[str, Any]:
  del scores
  return {}


@dataclasses.dataclass(frozen=True)
class Split:
  """Examples that are evaluated or predicted.

  Attributes:
    name: 'dev', 'dev_mismatched', 'test', ...
    examples: what the model sees.
    scores: outputs -> scores; None where there are no labels.
    writer: (outputs, folder) -> the files of predictions that it wrote.
  """

  name: str
  examples: Examples
  scores: Callable[[Outputs], Scores] | None
  writer: Callable[[Outputs, epath.Path], list[epath.Path]]

  def check(self, outputs: Outputs) -> None:
    """Raises ConfigError if an output is not finite: its prediction would look like any other."""
    finite = np.isfinite(outputs).reshape(len(outputs), -1).all(axis=1)
    if not finite.all():
      raise ConfigError(f'{self.name}: {np.sum(~finite)} of {len(outputs)} predictions are not'
                        f' finite, the first of example {np.argmin(finite)}; take a checkpoint of a'
                        ' run that did not diverge')

  def write(self, outputs: Outputs, folder: epath.Path) -> list[epath.Path]:
    """Writes the files of predictions, and returns them.

    Raises:
      ConfigError: an output is not finite.
    """
    self.check(outputs)
    return self.writer(outputs, folder)


def asked_file(data: Any, mode: str) -> tuple[str, str] | None:
  """Name and path of the one file that is evaluated, or predicted with mode='predict'.

  Args:
    data: has paths `dev` and `test`; a dev file may be predicted as well.
    mode: 'train', 'eval' or 'predict'.
  """
  if mode == 'predict' and (data.test or data.dev):
    return 'test', data.test or data.dev
  return ('dev', data.dev) if mode != 'predict' and data.dev else None


@dataclasses.dataclass(frozen=True)
class Task:
  """A task with its data.

  Attributes:
    name: e.g. 'rte'.
    kind: of the head, a key of heads.HEADS.
    labels: names of the outputs, in their order; () for kinds that have no labels.
    metric: the score that picks the best checkpoint; higher is better, but for a loss.
    train: examples to learn from; None when only evaluating or predicting.
    splits: what is evaluated in training (dev), or asked for by mode.
    baseline: scores of an answer that knows nothing, of the first split.
    facts: of the task, for the checkpoint: what predicting needs to know.
    learned: scores -> facts tuned on dev, e.g. SQuAD's threshold.
  """

  name: str
  kind: str
  labels: tuple[str, ...]
  metric: str
  train: Examples | None
  splits: tuple[Split, ...]
  baseline: Scores = dataclasses.field(default_factory=dict)
  facts: dict[str, Any] = dataclasses.field(default_factory=dict)
  learned: Callable[[Scores], dict[str, Any]] = _no_facts

  @property
  def num_outputs(self) -> int:
    return {'choice': 1, 'span': 2, 'regression': 1}.get(self.kind, len(self.labels))
