"""Metrics: one division, one step late, one history in metrics.jsonl, the line, the timer."""

import json
import logging
import math

import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertjax import chips, metrics
from bertjax.alarms import Alarms, NonFiniteError

SIZES = {
    'base': {'hidden_size': 768, 'num_hidden_layers': 12, 'intermediate_size': 3072},
    'large': {'hidden_size': 1024, 'num_hidden_layers': 24, 'intermediate_size': 4096},
}


class Clock:
  """A clock that only moves when told."""

  def __init__(self):
    self.now = 100.0

  def __call__(self):
    return self.now


def device_metrics(loss=2.0, weight=4.0, rate=1e-3, norm=1.0, correct=1.0):
  values = {
      'masked_lm_loss_sum': loss * weight, 'masked_lm_weight': weight,
      'masked_lm_correct_sum': correct, 'next_sentence_loss_sum': 1.0,
      'next_sentence_weight': 2.0, 'next_sentence_correct_sum': 1.0,
      'next_sentence_positive_sum': 0.5, 'grad_norm': norm, 'learning_rate': rate,
  }
  return {name: jnp.float32(value) for name, value in values.items()}


def host_metrics(**values):
  return {name: float(value) for name, value in device_metrics(**values).items()}


def make_writer(workdir, clock=None, **changes):
  arguments = {'total_steps': 20, 'log_every': 5, 'alarms': Alarms()} | changes
  return metrics.MetricsWriter(
      workdir, timer=metrics.StepTimer(clock or Clock()), **arguments)


def records(workdir, split=None):
  lines = (workdir / 'metrics.jsonl').read_text(encoding='utf-8').splitlines()
  parsed = [json.loads(line) for line in lines]
  return [r for r in parsed if split is None or r['split'] == split]


@pytest.mark.parametrize(('size', 'seq_length', 'num_predictions', 'giga'), [
    ('base', 128, 20, 69.9), ('base', 512, 77, 300.9),
    ('large', 128, 20, 240.6), ('large', 512, 77, 1019.8), ('base', 128, 128, 85.5),
])
def test_flops_of_the_published_models(size, seq_length, num_predictions, giga):
  flops = metrics.model_flops_per_example(
      **SIZES[size], vocab_size=30522, seq_length=seq_length, num_predictions=num_predictions)
  assert flops / 1e9 == pytest.approx(giga, rel=2e-3)


@given(st.lists(
    st.tuples(st.floats(0, 1e3), st.integers(0, 80)), min_size=1, max_size=8))
def test_b050_means_are_sums_divided_once(parts):
  total = {'masked_lm_loss_sum': 0.0, 'masked_lm_correct_sum': 0.0, 'masked_lm_weight': 0.0}
  for loss, weight in parts:
    total['masked_lm_loss_sum'] += loss * weight
    total['masked_lm_weight'] += weight
  result = metrics.means(total)
  weights = sum(weight for _, weight in parts)
  if weights == 0:
    assert result == {'loss': 0.0}
  else:
    expected = sum(loss * weight for loss, weight in parts) / weights
    assert result['masked_lm_loss'] == pytest.approx(expected)


def test_b049_a_batch_without_labels_is_not_perfect():
  result = metrics.means(
      {'masked_lm_loss_sum': 0.0, 'masked_lm_correct_sum': 0.0, 'masked_lm_weight': 0.0})
  assert 'masked_lm_accuracy' not in result


def test_metrics_are_read_one_step_late(tmp_path):
  with make_writer(tmp_path) as writer:
    writer.start_phase(2, 1e9)
    writer.push(1, device_metrics(norm=math.nan))
    with pytest.raises(NonFiniteError, match='step 1: grad_norm is nan'):
      writer.push(2, device_metrics())


def test_wait_before_a_save_sees_the_last_step(tmp_path):
  with make_writer(tmp_path) as writer:
    writer.start_phase(2, 1e9)
    writer.push(1, device_metrics())
    writer.push(2, device_metrics(loss=math.inf))
    with pytest.raises(NonFiniteError, match='step 2: masked_lm_loss_sum is inf'):
      writer.wait()
    writer.wait()  # said once


def test_records_of_a_run(tmp_path):
  clock = Clock()
  with make_writer(tmp_path, clock, baselines={'unigram_entropy': 6.25}) as writer:
    writer.start_phase(8, 1e9)
    for step in range(1, 13):
      with writer.timer.waiting_for_data():
        clock.now += 0.1
      clock.now += 5.0 if step == 2 else 0.4  # the first step ends while the second is pushed
      writer.push(step, device_metrics(loss=step, weight=2.0 + step % 2, rate=step * 1e-4))
    clock.now += 0.5
    writer.wait()
    with writer.timer.excluded():
      clock.now += 100.0
      values = metrics.heldout_means(host_metrics(loss=3.0))
      writer.write_evaluation('heldout', 12, values)
  assert values['masked_lm_perplexity'] == pytest.approx(math.exp(3.0))

  all_records = records(tmp_path)
  assert [(r['split'], r['step']) for r in all_records] == [
      ('start', 0), ('train', 1), ('train', 5), ('train', 10), ('heldout', 12), ('train', 12)]
  assert all_records[0]['unigram_entropy'] == 6.25
  assert all_records[0]['total_steps'] == 20
  first, second = records(tmp_path, 'train')[:2]
  assert first['first_step_seconds'] == pytest.approx(0.5 + 5.1)
  assert 'sequences_per_second' not in first
  # Steps 2..5: sums over steps of unequal weight, divided once.
  weights = [2, 3, 2, 3]
  expected = sum(w * s for w, s in zip(weights, (2, 3, 4, 5), strict=True)) / sum(weights)
  assert second['masked_lm_loss'] == pytest.approx(expected)
  assert second['masked_lm_accuracy'] == pytest.approx(4 / 10)
  assert second['loss'] == pytest.approx(expected + 0.5)
  assert second['next_sentence_accuracy'] == 0.5
  assert second['next_sentence_majority'] == 0.75
  assert second['learning_rate'] == pytest.approx(5e-4)
  assert second['steps'] == 4
  assert second['sequences_per_second'] == pytest.approx(8 / 0.5)
  assert second['data_wait'] == pytest.approx(0.2)
  assert 'mfu' not in second  # nobody knows the peak of a CPU
  assert records(tmp_path, 'train')[-1]['sequences_per_second'] == pytest.approx(16)


def test_terminal_line(tmp_path, caplog):
  clock = Clock()
  with caplog.at_level(logging.INFO), make_writer(tmp_path, clock, total_steps=2000) as writer:
    writer.start_phase(8, 1e9)
    for step in range(1, 12):
      clock.now += 2.0
      writer.push(step, device_metrics(norm=1.25))
  lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith('step ')]
  assert lines[0].endswith('(first step: 4.0 s)')
  assert lines[1] == (
      'step     5/2,000  loss  2.5000  masked_lm  2.0000 acc 0.250  next_sentence acc 0.500  '
      'lr 1.00e-03  grad_norm  1.250      4.0 seq/s  wait   0%  ETA 1h 06m'
  )
  assert len(lines[2]) == len(lines[1])  # aligned
  assert [line[:12] for line in lines] == [
      'step     1/2', 'step     5/2', 'step    10/2', 'step    11/2']
  told = [r for r in caplog.records if 'No MFU' in r.getMessage()]
  assert len(told) == 1


def test_mfu_where_the_peak_is_known(tmp_path, monkeypatch):
  monkeypatch.setattr(chips, 'peak_flops', lambda kind: 1e12)
  clock = Clock()
  with make_writer(tmp_path, clock) as writer:
    writer.start_phase(8, 2e11)
    for step in range(1, 6):
      clock.now += 0.4
      writer.push(step, device_metrics())
    clock.now += 0.4
  # 20 examples/s of 0.2 TFLOP on 8 devices of 1 TFLOP/s.
  assert records(tmp_path, 'train')[-1]['mfu'] == pytest.approx(0.5)


def test_a_new_phase_begins_a_new_window(tmp_path):
  clock = Clock()
  with make_writer(tmp_path, clock) as writer:
    writer.start_phase(8, 1e9)
    for step in range(1, 8):
      clock.now += 1.0
      writer.push(step, device_metrics(loss=1.0))
    writer.start_phase(2, 1e9)
    for step in range(8, 11):
      clock.now += 10.0
      writer.push(step, device_metrics(loss=5.0))
  train = records(tmp_path, 'train')
  assert [r['step'] for r in train] == [1, 5, 7, 8, 10]
  assert [r['masked_lm_loss'] for r in train] == [1, 1, 1, 5, 5]
  assert train[2]['sequences_per_second'] == pytest.approx(16)  # step 7 ended with the last wait
  assert train[4]['sequences_per_second'] == pytest.approx(2 / 5)


def test_alarms_are_said_and_written(tmp_path, caplog):
  with caplog.at_level(logging.WARNING), make_writer(
      tmp_path, alarms=Alarms(unigram_entropy=1.0, window_steps=2)) as writer:
    writer.start_phase(8, 1e9)
    for step in (1, 2, 3):
      writer.push(step, device_metrics(loss=4.0))
  assert any('unigram entropy' in r.getMessage() for r in caplog.records)
  assert ['unigram entropy' in r['message'] for r in records(tmp_path, 'alarm')] == [False, True]


def test_a_ruined_evaluation_is_not_written(tmp_path):
  with make_writer(tmp_path) as writer, pytest.raises(NonFiniteError, match='step 7'):
    writer.write_evaluation(
        'heldout', 7, metrics.heldout_means(host_metrics(loss=math.nan)))
  assert records(tmp_path, 'heldout') == []


def test_resume_cuts_what_lies_beyond(tmp_path):
  straight, resumed = tmp_path / 'straight', tmp_path / 'resumed'

  def run(workdir, restored, stop):
    with make_writer(workdir, log_every=1, restored_step=restored) as writer:
      writer.start_phase(8, 1e9)
      for step in range(restored + 1, stop + 1):
        writer.push(step, device_metrics(loss=step))

  run(straight, 0, 20)
  run(resumed, 0, 11)
  run(resumed, 7, 20)
  losses = [
      [(r['step'], r['masked_lm_loss']) for r in records(folder, 'train')]
      for folder in (straight, resumed)
  ]
  assert losses[0] == losses[1]
  assert [r['step'] for r in records(resumed, 'start')] == [0, 7]
  assert not (resumed / 'metrics.jsonl.tmp').exists()
  assert list((resumed / 'tensorboard').glob('events*'))


def test_a_resume_keeps_the_alarms_of_its_step(tmp_path):
  """What led to them came before; the window that they judged does not come again."""
  file = tmp_path / 'metrics.jsonl'
  lines = [{'split': name, 'step': step}
           for step in (4, 5, 6) for name in ('train', 'alarm', 'dev')]
  file.write_text(''.join(json.dumps(line) + '\n' for line in lines), encoding='utf-8')
  metrics.JsonLines(file, restored_step=5)
  assert [(r['step'], r['split']) for r in records(tmp_path)] == [
      (4, 'train'), (4, 'alarm'), (4, 'dev'), (5, 'train'), (5, 'alarm')]


@pytest.mark.parametrize('tail', [
    '{"split": "train", "step": 9, "lo', '\0\0\0\0', '{"split": "train"}\n', '[1]\n', '"x"',
])
def test_resume_after_a_kill_in_the_middle_of_a_line(tmp_path, tail):
  file = tmp_path / 'metrics.jsonl'
  good = ''.join(f'{{"split": "train", "step": {i}}}\n' for i in (1, 2, 3))
  file.write_text(good + tail, encoding='utf-8')
  metrics.JsonLines(file, restored_step=2).write({'split': 'train', 'step': 3})
  assert [r['step'] for r in records(tmp_path)] == [1, 2, 3]


def test_a_file_that_needs_no_cut_is_not_rewritten(tmp_path):
  file = tmp_path / 'metrics.jsonl'
  file.write_text('{"split": "train", "step": 1}\n', encoding='utf-8')
  before = file.stat().st_ino
  metrics.JsonLines(file, restored_step=1)
  assert file.stat().st_ino == before


def test_numbers_that_are_no_json_are_refused(tmp_path):
  with pytest.raises(ValueError, match='JSON'):
    metrics.JsonLines(tmp_path / 'metrics.jsonl').write({'step': 1, 'loss': math.nan})


def test_only_process_0_writes(tmp_path, monkeypatch):
  monkeypatch.setattr('jax.process_index', lambda: 1)
  with make_writer(tmp_path / 'run') as writer:
    writer.start_phase(8, 1e9)
    writer.push(1, device_metrics())
    writer.write_evaluation('heldout', 1, {'loss': 1.0})
    writer.push(2, device_metrics(norm=math.nan))
    with pytest.raises(NonFiniteError):  # but every process stops
      writer.wait()
  assert not (tmp_path / 'run').exists()


def test_tensorboard_holds_the_scalars(tmp_path):
  with make_writer(tmp_path) as writer:
    writer.start_phase(8, 1e9)
    writer.push(1, device_metrics(loss=2.5))
  (file,) = (tmp_path / 'tensorboard').glob('events*')
  content = file.read_bytes()
  assert b'train/masked_lm_loss' in content
  assert b'train/learning_rate' in content


@pytest.mark.parametrize(('seconds', 'text'), [
    (0.4, '0s'), (59.4, '59s'), (59.6, '1m 00s'), (725, '12m 05s'), (12000, '3h 20m'),
    (198000, '2d 07h'),
])
def test_duration(seconds, text):
  assert metrics.duration(seconds) == text
