"""The cost of devices and processes on one machine: what is run, the table, and one real run."""

import json

import pytest
from test_bench import CONFIG

from bertjax.tools import scaling


@pytest.fixture
def config(tmp_path) -> str:
  path = tmp_path / 'small.py'
  path.write_text(CONFIG, encoding='utf-8')
  return str(path)


def test_every_number_of_devices_is_run_in_every_number_of_processes_that_divides_it():
  made = scaling.runs([1, 2, 3, 6], [1, 2], 6)
  assert made[0] == {'processes': 1, 'devices': 1, 'scaling': 'same', 'batch_size': 6}
  assert [(run['processes'], run['devices'], run['batch_size']) for run in made[1:]] == [
      (1, 2, 6), (1, 3, 6), (1, 6, 6), (2, 2, 6), (2, 6, 6),
      (1, 2, 12), (1, 3, 18), (1, 6, 36), (2, 2, 12), (2, 6, 36)]
  with pytest.raises(scaling.ScalingError, match='try 12'):
    scaling.runs([1, 6], [1], 8)


def result(asked, step_ms):
  return {'devices': asked['devices'], 'processes': asked['processes'], 'variants': [{
      'step_ms': {'median': step_ms}, 'real_tokens_per_second': 5e5 / step_ms,
      'first_step_seconds': {'compile': 1.0}, 'loss': 6.0}]}


@pytest.fixture
def timed(monkeypatch):
  """Steps that take 10 ms a row of eight, and a tenth more for every further device."""
  def run(asked, more):
    assert more == ['--config=any.py', '--steps=10', '--remat=full']
    return result(asked, 10 * asked['batch_size'] / 8 * (1 + 0.1 * (asked['devices'] - 1)))

  monkeypatch.setattr(scaling, 'run_bench', run)
  return ['--config=any.py', '--batch_size=8', '--devices=1,2,4', '--processes=1,2', '--remat=full']


def test_ratios_are_of_the_same_work_on_one_device(timed, capsys):
  assert scaling.main([*timed, '--json']) == 0
  said = json.loads(capsys.readouterr().out)
  assert 'not speed' in said['note']
  assert set(said['runs'][0]) == {
      'processes', 'devices', 'scaling', 'batch_size', 'step_ms', 'ratio', 'compile_s', 'loss',
      'real_tokens_per_second', 'found_devices', 'found_processes'}
  for run in said['runs']:
    assert run['ratio'] == pytest.approx(1 + 0.1 * (run['devices'] - 1))
  assert len(said['runs']) == 1 + 2 * 4


def test_the_table_says_that_it_shows_overhead(timed, capsys):
  assert scaling.main(timed) == 0
  said = capsys.readouterr()
  assert 'overhead, not speed' in said.out and said.out.count('1.30x') == 4
  assert said.err.count('process(es)') == 9  # as they come


def test_a_run_that_fails_is_told_with_what_it_said(capsys):
  assert scaling.main(['--config=nowhere.py', '--devices=1']) == 2
  assert "no configuration file 'nowhere.py'" in capsys.readouterr().err
  assert scaling.main(['--config=nowhere.py', '--batch_size=4']) == 2
  assert 'not divisible by 8 devices' in capsys.readouterr().err


@pytest.mark.slow
def test_two_processes_are_one_run(config):
  asked = {'processes': 2, 'devices': 2, 'scaling': 'same', 'batch_size': 8}
  found = scaling.run_bench(asked, [f'--config={config}', '--steps=2'])
  row = scaling.figures(asked, found, 1.0)
  assert (row['found_processes'], row['found_devices']) == (2, 2)
  (report,) = found['variants']
  assert report['examples_per_row'] == 1  # counted on both: half of the rows each
  assert 0.5 < report['real_token_share'] <= 1
