"""Trains, evaluates or predicts: what all fine-tuning entry points share.

    LoadTask(settings, origin) ──> Task ──> sweep.run (train)
                                       └──> Predictor ──> scores (eval), files (predict)
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

import jax
from absl import logging
from etils import epath

from bertjax import best, checkpoint, heads, hosts, sharding, state, step_folder
from bertjax.config import ConfigError
from bertjax.data.encoding import write_files
from bertjax.evals import predictions
from bertjax.finetune import sweep
from bertjax.finetune.job import (
  Origin,
  bert_config,
  check_segments,
  open_mesh,
  open_origin,
  predictors,
  same_head,
  with_lengths,
)
from bertjax.finetune.settings import Settings
from bertjax.finetune.task import Split, Task

LoadTask = Callable[[Settings, Origin], Task]


def run(settings: Settings, workdir: str, load_task: LoadTask) -> int:
  """Trains, evaluates or predicts, as `settings.mode` says; returns the exit code.

  Raises:
    One of errors.EXPECTED, in words.
  """
  home = epath.Path(workdir)
  if settings.mode == 'train':
    origin = open_origin(settings.init_from)
    return sweep.run(settings, home, origin, load_task(settings, origin))
  # Process 0's word: another that sees the folder late would take other weights.
  trained = hosts.agreed(best.find(home) is not None or (home / step_folder.FOLDER).exists())
  if not trained and hosts.agreed(best.holds_runs(home)):
    raise ConfigError(f'{home} holds several runs and no best one: they have not ended, or nothing '
                      'was evaluated; go on with mode=train, or give the folder of one of them as '
                      '--workdir')
  origin = open_origin(str(home if trained else settings.init_from))
  logging.info('Model: %s, step %s', origin.path, origin.metadata['step'])
  task = load_task(settings, origin)
  if not same_head(origin, task):
    raise ConfigError(
        f'{origin.path} has a head of {_in_words(origin.head)}, and the task is '
        f'{_in_words({"kind": task.kind, "task": task.name, "labels": list(task.labels)})}; '
        'fine-tune it first (mode=train)')
  _tell_differences(settings, origin, task)
  return _apply(settings, home, origin, task)


def _in_words(head: Mapping[str, Any]) -> str:
  return f'kind {head["kind"]}, task {head.get("task", "unknown")}, labels {head.get("labels", [])}'


def _tell_differences(settings: Settings, origin: Origin, task: Task) -> None:
  """Names what the model was trained with otherwise: its scores may be others than in training."""
  now = task.facts | {'seq_length': settings.seq_length}
  then = {**origin.head, 'seq_length': origin.metadata['config'].get('seq_length')}
  for name, value in now.items():
    if then.get(name) not in (None, value):
      logging.warning('The model was trained with %s %s; it is now %s', name, then[name], value)


def _apply(settings: Settings, workdir: epath.Path, origin: Origin, task: Task) -> int:
  """Evaluates or predicts with a fine-tuned model.

  mode=eval prints scores as JSON and writes scores_SPLIT.json; mode=predict writes the files of the
  task into WORKDIR/predictions.

  Raises:
    ConfigError: no data, no labels to evaluate with, or outputs that are not finite.
  """
  if not task.splits:
    raise ConfigError('no data: set data.path, or data.dev to evaluate (mode=eval), data.test to '
                      'predict (mode=predict)')
  parts = [split.examples for split in task.splits]
  settings = with_lengths(settings, parts, 1)
  head = heads.HeadConfig(**origin.head['config']) if 'config' in origin.head else (
      heads.HeadConfig(task.kind, task.num_outputs))
  mesh = open_mesh(settings, origin, head)
  bert = bert_config(settings, origin, mesh)
  check_segments(bert, parts)
  build = lambda rngs: heads.HEADS[task.kind](bert, head, rngs)
  with jax.set_mesh(mesh):
    _, shapes = state.split(build)
    params = jax.device_put(checkpoint.restore_params(origin.path, abstract=shapes),
                            sharding.shardings(shapes, mesh))
    for split, predictor in predictors(settings, build, task, task.splits, mesh):
      found = predictor.run(params)
      if settings.mode == 'eval':
        _report(workdir, split, found)
      elif jax.process_index() == 0:
        for file in split.write(found.outputs, workdir / 'predictions'):
          logging.info('%s: the predictions are in %s', split.name, file)
  return 0


def _report(workdir: epath.Path, split: Split, found: predictions.Predicted) -> None:
  if split.scores is None:
    raise ConfigError(f'{split.name} has no labels: it can be predicted (mode=predict), not scored')
  split.check(found.outputs)
  scores = ({} if found.loss is None else {'loss': found.loss}) | split.scores(found.outputs)
  text = json.dumps({'split': split.name} | scores)
  if jax.process_index() == 0:
    print(text)
    write_files(workdir, {f'scores_{split.name}.json': f'{text}\n'.encode()})
