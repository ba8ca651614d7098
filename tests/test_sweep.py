"""Several runs in one command: their names and settings, and the table of what came out."""

import json
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from bertjax import best
from bertjax.alarms import NonFiniteError
from bertjax.config import ConfigError
from bertjax.data.examples import Examples
from bertjax.finetune import sweep
from bertjax.finetune.job import Origin
from bertjax.finetune.settings import Settings
from bertjax.finetune.task import Task

EXAMPLES = Examples({'input_ids': [np.zeros(8, np.int32)]}, {})


def settings(**values) -> Settings:
  return Settings(data=None, optimizer={'learning_rate': 2e-5, 'b1': 0.8}, **values)


def task(train=EXAMPLES, **baseline) -> Task:
  return Task('toy', 'classification', ('no', 'yes'), 'accuracy', train, (), baseline)


# --- Runs --------------------------------------------------------------------------------------


def test_one_run_stays_in_the_workdir_itself():
  only = settings(seed=3)
  assert sweep.runs(only) == [('', only)]


@pytest.mark.parametrize(('values', 'names'), [
    ({'seeds': (0, 7)}, ['lr2e-05_seed0', 'lr2e-05_seed7']),
    ({'seed': 4, 'learning_rates': (1e-5, 3e-4)}, ['lr1e-05_seed4', 'lr0.0003_seed4']),
    ({'seeds': (5,)}, ['lr2e-05_seed5']),
    ({'seeds': (0, 1), 'learning_rates': (2e-5, 5e-5)},
     ['lr2e-05_seed0', 'lr2e-05_seed1', 'lr5e-05_seed0', 'lr5e-05_seed1']),
])
def test_a_folder_for_each_rate_and_seed(values, names):
  runs = sweep.runs(settings(**values))
  assert [name for name, _ in runs] == names
  for name, own in runs:
    rate = own.optimizer_settings(100).learning_rate
    assert name == f'lr{rate:g}_seed{own.seed}'
    assert not own.seeds and not own.learning_rates  # a run of its own, that resumes as one
    assert own.optimizer_settings(100).b1 == 0.8  # all else is kept


def compiled_anew(word):
  """What a run that differs in its seed compiles."""
  step = jax.jit(lambda x, seed: jnp.cos(x @ x) + seed)
  return step.lower(jnp.ones((64, 64)), np.uint32(word)).compile()


def test_runs_of_one_program_compile_it_once():
  hits, heard = [], lambda event, **_: hits.append(event)
  before = {name: getattr(jax.config, name) for name in (
      'jax_persistent_cache_min_compile_time_secs', 'jax_persistent_cache_min_entry_size_bytes')}
  jax.monitoring.register_event_listener(heard)
  try:
    for name in before:
      jax.config.update(name, 0)
    with sweep._kept_programs():
      folder = jax.config.jax_compilation_cache_dir
      compiled_anew(1)
      assert '/jax/compilation_cache/cache_hits' not in hits
      compiled_anew(2)
      assert '/jax/compilation_cache/cache_hits' in hits
  finally:
    for name, value in before.items():
      jax.config.update(name, value)
    jax.monitoring.unregister_event_listener(heard)
  assert jax.config.jax_compilation_cache_dir is None and not epath.Path(folder).exists()


def test_the_users_own_cache_of_programs_stays(tmp_path):
  jax.config.update('jax_compilation_cache_dir', str(tmp_path))
  try:
    with sweep._kept_programs():
      assert jax.config.jax_compilation_cache_dir == str(tmp_path)
    assert jax.config.jax_compilation_cache_dir == str(tmp_path)
  finally:
    jax.config.update('jax_compilation_cache_dir', None)


# --- The results -------------------------------------------------------------------------------


@pytest.fixture
def trained(monkeypatch):
  """Training that leaves the given score of each folder's name, and which folders were trained."""
  folders, scores = [], {}

  def train(job, folder, stopping):
    folders.append(folder.name)
    found = scores.get(folder.name, 0.5)
    if found == 'asked to stop at its end':
      os.kill(os.getpid(), signal.SIGTERM)
      found = 0.5
    if isinstance(found, int):
      return found
    if found == 'diverged':
      raise NonFiniteError('the loss is nan', 5)
    if found != 'none':
      stored = {'step': 7, 'metric': 'accuracy', 'scores': {'accuracy': found, 'loss': 1.0}}
      records[folder.name] = stored
    return 0

  records = {}
  monkeypatch.setattr(sweep.train, 'train', train)
  monkeypatch.setattr(sweep, 'job', lambda own, folder, origin, task: None)
  monkeypatch.setattr(best, 'read', lambda folder: records.get(folder.name))
  return folders, scores


def run(values, workdir, toy=None):
  # The origin goes untouched to the job, which these tests leave out.
  origin = Origin(epath.Path('nowhere'), {}, None, epath.Path('nowhere'))
  return sweep.run(values, epath.Path(workdir), origin, toy or task(accuracy=0.6))


def results(workdir):
  return json.loads((workdir / 'results.json').read_text(encoding='utf-8'))


def test_results_and_table_of_five_seeds(trained, tmp_path, capsys):
  folders, scores = trained
  scores |= {f'lr2e-05_seed{seed}': score
             for seed, score in enumerate([0.9, 0.6, 0.7, 0.8, 0.55])}
  assert run(settings(seeds=(0, 1, 2, 3, 4)), tmp_path) == 0
  assert folders == [f'lr2e-05_seed{seed}' for seed in range(5)]
  found = results(tmp_path)
  assert found[1] == {
      'task': 'toy', 'seed': 1, 'folder': 'lr2e-05_seed1', 'learning_rate': 2e-5,
      'metric': 'accuracy', 'step': 7, 'score': 0.6, 'baseline': 0.6, 'failed': True,
      'scores': {'accuracy': 0.6, 'loss': 1.0}}
  # A run at the majority rate has learned nothing, as one below it.
  assert [result['failed'] for result in found] == [False, True, False, False, True]
  header, _, row, last = capsys.readouterr().out.splitlines()
  assert last == f'the best run: {tmp_path}/lr2e-05_seed0'
  assert 'toy: accuracy' in header and 'knows nothing: 0.6000' in header
  assert row.split() == ['2e-05', '5', '2', '0.7000', '0.9000', '0.5500', '0.1432']


def test_a_run_that_diverges_is_a_failed_one_whatever_it_had_scored_before(
    trained, tmp_path, capsys):
  _, scores = trained
  scores |= {'lr2e-05_seed0': 'diverged', 'lr2e-05_seed1': 0.7}
  assert run(settings(seeds=(0, 1)), tmp_path) == 0
  assert [(one['failed'], one['score']) for one in results(tmp_path)] == [
      (True, None), (False, 0.7)]
  assert capsys.readouterr().out.splitlines()[2].split()[:3] == ['2e-05', '2', '1']
  scores |= {'lr2e-05_seed1': 'diverged'}
  assert run(settings(seeds=(0, 1)), tmp_path) == 0
  assert 'the best run: none' in capsys.readouterr().out


@pytest.mark.parametrize(('metric', 'best_of'), [('accuracy', 'b'), ('loss', 'a')])
def test_the_best_run_of_a_sweep(tmp_path, metric, best_of):
  home = epath.Path(tmp_path)
  assert best.best_run(home) is None
  records = [{'folder': name, 'metric': metric, 'score': score}
             for name, score in (('a', 0.2), ('b', 0.6), ('c', None))]
  (tmp_path / 'results.json').write_text(json.dumps(records), encoding='utf-8')
  assert best.best_run(home) == home / best_of
  records = [{'folder': '', 'metric': metric, 'score': 0.5}]  # a single run, no sweep
  (tmp_path / 'results.json').write_text(json.dumps(records), encoding='utf-8')
  assert best.best_run(home) is None


def test_one_run_has_results_but_no_table(trained, tmp_path, capsys):
  assert run(settings(), tmp_path) == 0
  assert [result['score'] for result in results(tmp_path)] == [0.5]
  assert not capsys.readouterr().out


def test_a_signal_ends_the_whole_command(trained, tmp_path):
  folders, scores = trained
  scores['lr2e-05_seed1'] = 143
  assert run(settings(seeds=(0, 1, 2)), tmp_path) == 143
  assert folders == ['lr2e-05_seed0', 'lr2e-05_seed1']
  assert not (tmp_path / 'results.json').exists()


def test_a_signal_that_comes_too_late_for_a_run_ends_the_command_before_the_next(
    trained, tmp_path):
  folders, scores = trained
  scores['lr2e-05_seed1'] = 'asked to stop at its end'
  assert run(settings(seeds=(0, 1, 2)), tmp_path) == 143
  assert folders == ['lr2e-05_seed0', 'lr2e-05_seed1']
  assert run(settings(seeds=(0, 1)), tmp_path) == 0  # that was the last of the runs


def test_a_sweep_does_not_go_into_the_workdir_of_a_single_run(trained, tmp_path):
  (tmp_path / 'checkpoints').mkdir()
  with pytest.raises(ConfigError, match='holds a single run; take a new --workdir'):
    run(settings(seeds=(0, 1)), tmp_path)
  assert run(settings(), tmp_path) == 0


def test_b106_a_run_whose_correlation_is_undefined_has_failed_and_is_counted(
    trained, tmp_path, capsys):
  """All predictions equal: what a regression run does that never left its start."""
  _, scores = trained
  scores |= {'lr2e-05_seed0': None, 'lr2e-05_seed1': 0.8, 'lr2e-05_seed2': 0.6}
  assert run(settings(seeds=(0, 1, 2)), tmp_path, task(accuracy=None)) == 0
  assert [result['failed'] for result in results(tmp_path)] == [True, False, False]
  header, _, row, _ = capsys.readouterr().out.splitlines()
  assert 'knows nothing: none' in header
  assert row.split()[:5] == ['2e-05', '3', '1', '0.7000', '0.8000']


def test_a_rate_at_which_every_score_is_undefined_has_its_row(trained, tmp_path, capsys):
  _, scores = trained
  scores['lr0.1_seed0'] = None
  run(settings(learning_rates=(1e-5, 0.1)), tmp_path, task(accuracy=None))
  rows = [row.split() for row in capsys.readouterr().out.splitlines()[2:-1]]
  assert rows == [['1e-05', '1', '0', '0.5000', '0.5000', '0.5000', '0.0000'],
                  ['0.1', '1', '1', 'undefined']]


def test_without_dev_data_there_is_no_table(trained, tmp_path, capsys):
  _, scores = trained
  scores |= {'lr2e-05_seed0': 'none', 'lr2e-05_seed1': 'none'}
  assert run(settings(seeds=(0, 1)), tmp_path) == 0
  assert results(tmp_path)[0] == {
      'task': 'toy', 'seed': 0, 'folder': 'lr2e-05_seed0', 'learning_rate': 2e-5}
  assert capsys.readouterr().out == '2 runs, and nothing was evaluated\nthe best run: none\n'


def test_of_losses_the_lowest_is_the_best():
  rows = [{'task': 'toy', 'metric': 'loss', 'baseline': None, 'failed': False, 'score': score,
           'learning_rate': 1e-5} for score in (0.5, 0.25, 1.0)]
  row = sweep.table(rows).splitlines()[2].split()
  assert row[3:6] == ['0.5000', '0.2500', '1.0000']


def test_each_rate_has_its_row_in_the_order_given():
  rows = [{'task': 'toy', 'metric': 'f1', 'baseline': 0.1, 'failed': rate > 4e-5,
           'score': rate * 1e4, 'learning_rate': rate} for rate in (5e-5, 2e-5, 5e-5)]
  table = [row.split() for row in sweep.table(rows).splitlines()[2:]]
  assert [row[:3] for row in table] == [['5e-05', '2', '2'], ['2e-05', '1', '0']]


@pytest.mark.parametrize(('train', 'message'), [
    (None, 'no training data'), (Examples({'input_ids': []}, {}), 'no example to learn from')])
def test_no_training_data(trained, tmp_path, train, message):
  with pytest.raises(ConfigError, match=message):
    run(settings(), tmp_path, task(train))


def test_rates_must_be_positive(trained, tmp_path):
  with pytest.raises(ConfigError, match='each must be positive'):
    run(settings(learning_rates=(1e-5, 0.0)), tmp_path)
  assert not trained[0]
