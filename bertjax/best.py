"""The best model of a run: kept in WORKDIR/best, a workdir of its own that every tool reads."""

import dataclasses
import json
import re
from typing import Any

import jax
from absl import logging
from etils import epath

from bertjax import checkpoint, hosts, state, step_folder
from bertjax.data.encoding import write_files
from bertjax.job import Scores

FOLDER = 'best'
RESULTS = 'results.json'  # of all runs of a workdir, by finetune.sweep
_RUN = re.compile(r'lr.+_seed\d+')  # a folder of finetune.sweep.runs
_OVER = 'over.json'  # in FOLDER: the step at which the patience had run out


def is_better(metric: str, score: float | None, than: float | None) -> bool:
  """Higher is better, but for a loss; an undefined score is worse than any other."""
  if score is None or than is None:
    return score is not None
  return score < than if metric.endswith('loss') else score > than


def find(workdir: epath.PathLike) -> epath.Path | None:
  """Where the best model is: this run's, or where several runs are, that of the best of them."""
  folder = step_folder.absolute(workdir)
  if holds_run(folder):
    return _kept(folder)
  swept = best_run(folder)
  return find(swept) if swept else None


def holds_runs(workdir: epath.Path) -> bool:
  """Whether a sweep was begun there (the folders are named by finetune.sweep.runs)."""
  return workdir.is_dir() and any(
      holds_run(run) for run in workdir.iterdir() if _RUN.fullmatch(run.name))


def holds_run(workdir: epath.Path) -> bool:
  """Whether a single run was begun there."""
  return (workdir / step_folder.FOLDER).exists() or (workdir / FOLDER).exists()


def best_run(workdir: epath.Path) -> epath.Path | None:
  """The folder of the best run of a sweep, by its results.json; None where there was no sweep."""
  if not (workdir / RESULTS).exists():
    return None
  try:
    results = json.loads((workdir / RESULTS).read_text(encoding='utf-8'))
    judged = [(one['score'], one['folder'], one['metric']) for one in results
              if one['folder'] and one['score'] is not None]
  except (ValueError, KeyError, TypeError):  # somebody else's file of that name
    return None
  if not judged:
    return None
  sign = -1 if judged[0][2].endswith('loss') else 1
  return workdir / max(judged, key=lambda one: sign * one[0])[1]


def _kept(workdir: epath.PathLike) -> epath.Path | None:
  """Where this run's best model is; None if none was kept, or a kill cut its first save short."""
  folder = step_folder.absolute(workdir) / FOLDER
  if not folder.exists():
    return None
  steps = step_folder.steps(folder / step_folder.FOLDER).values()
  if any(step_folder.damage(step) is None for step in steps):
    return folder
  logging.warning('Passed over %s: there is no complete model in it', folder)
  return None


def read(workdir: epath.PathLike) -> dict[str, Any] | None:
  """The metadata of this run's best model, None if there is none."""
  folder = _kept(workdir)
  return checkpoint.read_metadata(folder) if folder else None


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

  def forget(self) -> None:
    """Removes what a run left that ended before its first checkpoint: another one begins here."""
    folder = self.workdir / FOLDER
    if jax.process_index() == 0 and folder.exists():
      logging.info('%s is of a run that left no checkpoint: removed', folder)
      folder.rmtree()

  def judge(self, step: int, params: state.Params, scores: Scores) -> bool:
    """Keeps the model if it is better than all before; True if training may end."""
    # All processes save together or none does: they go by what process 0 finds.
    stored = read(self.workdir) if jax.process_index() == 0 else None
    # A score of a later step was kept by a run that was killed: this step has been there as well.
    if hosts.agreed(stored is None or (stored['step'] < step and is_better(
        self.metric, scores[self.metric], stored['scores'][self.metric]))):
      head = self.metadata['head'] | self.learned(scores)
      checkpoint.save_params(
          self.workdir / FOLDER, step, params,
          self.metadata | {'scores': scores, 'metric': self.metric, 'head': head}, self.tokenizer)
      return False
    last = hosts.agreed(stored['step'] if stored else 0)
    over = bool(self.patience) and step - last >= self.patience * self.every
    if over:
      logging.info('%s was last better at step %d', self.metric, last)
      if jax.process_index() == 0:
        write_files(self.workdir / FOLDER, {_OVER: json.dumps({'step': step}).encode()})
    return over

  def is_over(self, step: int) -> bool:
    """Whether `judge` has ended the training at this step.

    The steps since the best one do not say so: a signal may have cut the evaluation short.
    """
    file = self.workdir / FOLDER / _OVER
    return bool(hosts.agreed(
        jax.process_index() == 0 and file.exists()
        and json.loads(file.read_text(encoding='utf-8'))['step'] == step))
