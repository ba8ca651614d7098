"""Several runs in one command: seeds and learning rates, and a table of what came out.

Fine-tuning on little data depends on the seed so much that a single run says little; some runs
never leave the answer that knows nothing (Devlin et al. 2018, section 4.1; Mosbach et al. 2021).
"""

import contextlib
import dataclasses
import itertools
import json
import statistics
import tempfile
from collections.abc import Iterator
from typing import Any

import jax
from absl import logging
from etils import epath
from jax.experimental.compilation_cache import compilation_cache

from bertjax import best, hosts, stop, train
from bertjax.alarms import NonFiniteError
from bertjax.config import ConfigError
from bertjax.data.encoding import write_files
from bertjax.finetune.job import Origin, job
from bertjax.finetune.settings import Settings
from bertjax.finetune.task import Task


def run(settings: Settings, workdir: epath.Path, origin: Origin, task: Task) -> int:
  """One run, or one for each learning rate and seed in folders of their own; the exit code.

  results.json has a record of each; with several runs a table is printed.

  Raises:
    ConfigError: no training data, a learning rate that is not positive, or several runs in the
      workdir of a single one.
  """
  if task.train is None:
    raise ConfigError('no training data: set data.train or data.path')
  if not len(task.train):
    raise ConfigError('the training data hold no example to learn from; the log says why')
  if any(not rate > 0 for rate in settings.learning_rates):
    raise ConfigError(f'learning_rates {settings.learning_rates}: each must be positive')
  planned = runs(settings)
  if planned[0][0] and hosts.agreed(best.holds_run(workdir)):
    # Its model would be taken for the best one of the new runs.
    raise ConfigError(f'{workdir} holds a single run; take a new --workdir for several')
  programs = contextlib.nullcontext() if len(planned) == 1 else _kept_programs()
  with programs, stop.StopRequest() as stopping:
    return _run_all(planned, workdir, origin, task, stopping)


def _run_all(
    planned: list[tuple[str, Settings]], workdir: epath.Path, origin: Origin, task: Task,
    stopping: stop.StopRequest,
) -> int:
  results = []
  for name, own in planned:
    if stopping.noticed:  # too late for the run before, which was at its end
      return stop.SAVED
    folder = workdir / name if name else workdir
    record = {'task': task.name, 'seed': own.seed, 'folder': name,
              'learning_rate': own.optimizer_settings(1).learning_rate}
    try:
      code = train.train(job(own, folder, origin, task), folder, stopping)
      if code:
        return code
      record |= _result(folder, task)
    except NonFiniteError as error:
      if not name:
        raise
      logging.error('%s: %s', folder, error)  # the other runs go on
      metric = own.evaluate.metric or task.metric
      record |= {'metric': metric, 'score': None, 'baseline': task.baseline.get(metric),
                 'failed': True}
    results.append(record)
  if jax.process_index() == 0:
    write_files(workdir, {best.RESULTS: (json.dumps(results, indent=2) + '\n').encode()})
    if len(results) > 1:
      print(table(results))
      print(f'the best run: {best.best_run(workdir) or "none"}')
  return 0


@contextlib.contextmanager
def _kept_programs() -> Iterator[None]:
  """Runs that differ in their seed only are one program, compiled once, as long as this is open.

  Where the user has JAX's cache of compiled programs, that is the one.
  """
  if jax.config.jax_compilation_cache_dir or jax.process_count() > 1:
    yield
    return
  with tempfile.TemporaryDirectory(prefix='bertjax_programs_') as folder:
    jax.config.update('jax_compilation_cache_dir', folder)
    compilation_cache.reset_cache()  # JAX asks once whether there is one
    try:
      yield
    finally:
      jax.config.update('jax_compilation_cache_dir', None)
      compilation_cache.reset_cache()


def runs(settings: Settings) -> list[tuple[str, Settings]]:
  """The name of the folder and the settings of each run; one with the name '' if there is one."""
  if not settings.seeds and not settings.learning_rates:
    return [('', settings)]
  rates = settings.learning_rates or (settings.optimizer_settings(1).learning_rate,)
  return [
      (f'lr{rate:g}_seed{seed}', dataclasses.replace(
          settings, seed=seed, seeds=(), learning_rates=(),
          optimizer=dict(settings.optimizer) | {'learning_rate': rate}))
      for rate, seed in itertools.product(rates, settings.seeds or (settings.seed,))]


def _result(folder: epath.Path, task: Task) -> dict[str, Any]:
  stored = best.read(folder)
  if stored is None:
    return {}
  metric = stored['metric']
  score, baseline = stored['scores'][metric], task.baseline.get(metric)
  # An undefined score (say, of equal predictions) is no better than an undefined baseline.
  failed = not best.is_better(metric, score, baseline)
  if failed:
    logging.warning('%s: %s is %s, no better than knowing nothing (%s)', folder, metric, score,
                    baseline)
  return {'metric': metric, 'step': stored['step'], 'score': score, 'baseline': baseline,
          'failed': failed, 'scores': stored['scores']}


def table(results: list[dict[str, Any]]) -> str:
  """Median, best and failed runs of each learning rate, as text."""
  judged = [result for result in results if 'metric' in result]
  if not judged:
    return f'{len(results)} runs, and nothing was evaluated'
  metric, baseline = judged[0]['metric'], judged[0]['baseline']
  knows_nothing = 'none' if baseline is None else f'{baseline:.4f}'
  lines = [f'{judged[0]["task"]}: {metric} of the best checkpoint of each run; an answer that '
           f'knows nothing: {knows_nothing}',
           f'{"learning rate":>13}  {"runs":>4}  {"failed":>6}  {"median":>8}  {"best":>8}  '
           f'{"worst":>8}  {"deviation":>9}']
  for rate in dict.fromkeys(result['learning_rate'] for result in judged):
    rows = [result for result in judged if result['learning_rate'] == rate]
    # Undefined ones count as runs, and as failed; the figures are of the others.
    scores = sorted(row['score'] for row in rows if row['score'] is not None)
    lines.append(f'{rate:>13g}  {len(rows):>4}  {sum(row["failed"] for row in rows):>6}  '
                 + (_figures(scores, metric) if scores else 'undefined'))
  return '\n'.join(lines)


def _figures(scores: list[float], metric: str) -> str:
  top, bottom = (scores[0], scores[-1]) if metric.endswith('loss') else (scores[-1], scores[0])
  deviation = statistics.stdev(scores) if len(scores) > 1 else 0.0
  return f'{statistics.median(scores):>8.4f}  {top:>8.4f}  {bottom:>8.4f}  {deviation:>9.4f}'
