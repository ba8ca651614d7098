"""The best model of a run: kept in WORKDIR/best, a workdir of its own that every tool reads."""

import dataclasses
from typing import Any

from absl import logging
from etils import epath

from bertjax import checkpoint, state
from bertjax.job import Scores

FOLDER = 'best'


def is_better(metric: str, score: float | None, than: float | None) -> bool:
  """Higher is better, but for a loss; an undefined score is worse than any other."""
  if score is None or than is None:
    return score is not None
  return score < than if metric.endswith('loss') else score > than


def read(workdir: epath.PathLike) -> dict[str, Any] | None:
  """The metadata of the best model, None if there is none."""
  folder = epath.Path(workdir) / FOLDER
  return checkpoint.read_metadata(folder) if folder.exists() else None


@dataclasses.dataclass
class Keeper:
  """Told of every evaluation: keeps the best model and says when it no longer gets better.

  What it knows is on disk, so a resumed run goes on with it.

  Attributes:
    workdir: of the run.
    metric: the score that counts.
    every: steps between evaluations.
    patience: evaluations without a better score after which training ends; 0: never early.
    metadata: of every checkpoint of the run.
    tokenizer: folder whose files come along.
    learned: scores -> facts for the head's metadata.
  """

  workdir: epath.Path
  metric: str
  every: int
  patience: int
  metadata: dict[str, Any]
  tokenizer: epath.Path
  learned: Any

  def judge(self, step: int, params: state.Params, scores: Scores) -> bool:
    """Keeps the model if it is better than all before; True if training may end."""
    stored = read(self.workdir)
    # A score of a later step was kept by a run that was killed: this step has been there as well.
    if stored is None or (stored['step'] < step and is_better(
        self.metric, scores[self.metric], stored['scores'][self.metric])):
      head = self.metadata['head'] | self.learned(scores)
      checkpoint.save_params(
          self.workdir / FOLDER, step, params,
          self.metadata | {'scores': scores, 'metric': self.metric, 'head': head}, self.tokenizer)
      return False
    return self.is_over(step)

  def is_over(self, step: int) -> bool:
    """Whether the patience has run out at this step."""
    stored = read(self.workdir)
    if not self.patience or stored is None:
      return False
    over = step - stored['step'] >= self.patience * self.every
    if over:
      logging.info('%s was last better at step %d', self.metric, stored['step'])
    return over
