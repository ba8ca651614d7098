"""Alarms: what is said, when, how often."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertjax.alarms import Alarms, NonFiniteError, check_finite


def step_metrics(masked_lm=5.0, accuracy=0.7, majority=0.5, pairs=100):
  return {
      'masked_lm_loss_sum': masked_lm * 20.0,
      'masked_lm_weight': 20.0,
      'next_sentence_correct_sum': accuracy * pairs,
      'next_sentence_weight': float(pairs),
      'next_sentence_positive_sum': majority * pairs,
      'grad_norm': 1.0,
  }


def run(alarms, steps, start=0, **values):
  said = []
  for step in range(start + 1, start + steps + 1):
    said += [(step, message) for message in alarms.update(step, step_metrics(**values))]
  return said


@pytest.mark.parametrize('value', [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize('name', ['masked_lm_loss_sum', 'grad_norm'])
def test_not_finite_stops_and_names_the_step(name, value):
  alarms = Alarms()
  alarms.update(41, step_metrics())
  with pytest.raises(NonFiniteError, match=f'step 42: {name} is {value}.*this state is not saved'):
    alarms.update(42, step_metrics() | {name: value})


def test_healthy_training_is_silent():
  assert run(Alarms(unigram_entropy=6.0, window_steps=10), 1000) == []


@given(st.dictionaries(st.text(), st.floats(allow_nan=False, allow_infinity=False)))
def test_any_finite_metrics_pass(metrics):
  check_finite(1, metrics)
  Alarms(window_steps=2).update(1, metrics)


def test_next_sentence_stuck_at_the_majority_rate_is_said_once():
  alarms = Alarms(window_steps=20)
  said = run(alarms, 100, accuracy=0.56, majority=0.56)
  assert [step for step, _ in said] == [20]
  assert 'next_sentence accuracy is 0.560' in said[0][1]
  assert 'more common answer reaches 0.560' in said[0][1]
  assert '2,000 pairs' in said[0][1]


def test_a_warning_comes_again_after_it_recovered():
  alarms = Alarms(window_steps=10)
  assert len(run(alarms, 30, accuracy=0.5)) == 1
  assert run(alarms, 10, start=30, accuracy=0.8) == []
  assert [step for step, _ in run(alarms, 20, start=40, accuracy=0.5)] == [50]


def test_majority_of_the_other_label():
  # 30 % positive: always saying 0 is right 70 % of the time.
  assert len(run(Alarms(window_steps=10), 10, accuracy=0.7, majority=0.3)) == 1


def test_few_pairs_need_more_than_luck():
  # 0.53 of 100 pairs is within three standard errors of 0.5, of 100,000 it is not.
  assert len(run(Alarms(window_steps=1), 1, accuracy=0.53)) == 1
  assert run(Alarms(window_steps=1), 1, accuracy=0.53, pairs=100_000) == []


def test_next_sentence_exactly_right_is_a_leak():
  said = run(Alarms(window_steps=10), 50, accuracy=1.0)
  assert len(said) == 1
  assert 'exactly 1' in said[0][1] and 'leaks' in said[0][1]
  assert run(Alarms(window_steps=10), 50, accuracy=0.999) == []


def test_all_pairs_of_one_label_are_a_leak_too():
  said = run(Alarms(window_steps=10), 50, accuracy=1.0, majority=1.0)
  assert len(said) == 1
  assert 'all pairs have one label' in said[0][1]


def test_training_without_pairs_has_no_such_alarm():
  alarms = Alarms(window_steps=1)
  assert alarms.update(1, step_metrics(pairs=0)) == []
  assert alarms.update(2, {'masked_lm_loss_sum': 1.0, 'masked_lm_weight': 1.0}) == []


def test_masked_lm_above_the_unigram_entropy_after_warmup():
  alarms = Alarms(unigram_entropy=6.5, warmup_steps=25, window_steps=10)
  said = run(alarms, 100, masked_lm=7.25)
  # The window of steps 21..30 still holds warm-up.
  assert [step for step, _ in said] == [40]
  assert 'masked_lm loss is 7.250' in said[0][1]
  assert '6.500 nats' in said[0][1]


def test_windows_in_which_nothing_was_masked():
  alarms = Alarms(unigram_entropy=6.5, window_steps=1)
  metrics = step_metrics() | {'masked_lm_loss_sum': 0.0, 'masked_lm_weight': 0.0}
  assert alarms.update(1, metrics) == []
