"""Scores: scikit-learn's and SciPy's numbers, and what is undefined."""

import json
import math

import numpy as np
import pytest

from bertjax.evals import scores
from bertjax.evals.scores import compute

LABELS = np.array([[1, 0, 0], [1, 1, 0], [0, 0, 0], [0, 1, 0], [1, 0, 0]], np.float32)
PREDICTED = np.array([[1, 0, 0], [1, 0, 0], [0, 1, 0], [0, 1, 0], [0, 0, 0]], np.float32)


def logits(predictions, classes=3) -> np.ndarray:
  return np.eye(classes, dtype=np.float32)[predictions] * 3 - 1


def test_golden(golden):
  cases = json.loads((golden / '05_metrics' / 'glue.json').read_text(encoding='utf-8'))['cases']
  for case in cases:
    if case['kind'] == 'regression':
      labels, outputs = np.array(case['labels']), np.array(case['preds'])[:, None]
    else:
      classes = max(case['labels'] + case['preds'] + [1]) + 1
      labels, outputs = np.array(case['labels']), logits(case['preds'], classes)
    names = [name for name in scores.METRICS if name in case]
    found = compute(case['kind'], names, outputs, labels)
    for name in names:
      if math.isnan(case[name]):
        assert found[name] is None, (case['name'], name)
      else:
        assert found[name] == pytest.approx(case[name], abs=1e-12), (case['name'], name)
  assert sum('macro_f1' in case for case in cases) == 16


def test_three_classes():
  # scikit-learn 1.9.1; class 3 occurs nowhere and does not count.
  labels, predictions = np.array([0, 1, 2, 2, 1, 0]), np.array([0, 2, 2, 2, 1, 1])
  found = compute('classification', ('accuracy', 'matthews', 'macro_f1'),
                  logits(predictions, 4), labels)
  assert found == pytest.approx({
      'accuracy': 4 / 6, 'matthews': 0.5222329678670935, 'macro_f1': 0.6555555555555556,
  })


def test_multi_label():
  # scikit-learn 1.9.1, zero_division=0; the third label occurs nowhere, and does count.
  names = ('micro_f1', 'macro_f1', 'accuracy')
  found = compute('multi_label', names, PREDICTED * 2 - 1, LABELS)
  assert found == pytest.approx(
      {'micro_f1': 2 / 3, 'macro_f1': 0.43333333333333335, 'accuracy': 0.4})


def test_correlations_without_golden():
  labels = np.array([1.0, 2.0, 2.0, 4.0], np.float32)
  outputs = np.array([[0.5], [0.25], [3.0], [3.0]], np.float32)
  found = compute('regression', ('pearson', 'spearman'), outputs, labels)
  assert found['pearson'] == pytest.approx(np.corrcoef(labels, outputs[:, 0])[0, 1], abs=1e-12)
  assert found['spearman'] == pytest.approx(
      np.corrcoef([1, 2.5, 2.5, 4], [2, 1, 3.5, 3.5])[0, 1], abs=1e-12)


@pytest.mark.parametrize(('labels', 'outputs', 'reason'), [
    ([1, 2, 3], [2, 2, 2], 'all predictions are equal'),
    ([2, 2, 2], [1, 2, 3], 'all labels are equal'),
    ([2], [1], 'there is one example'),
    ([1, 2, 3], [1, np.nan, 3], 'some predictions are not finite'),
])  # fmt: skip
def test_b106_undefined_correlations_are_null_with_a_reason(monkeypatch, labels, outputs, reason):
  said = []
  monkeypatch.setattr(scores.logging, 'warning', said.append)
  scores._log_once.cache_clear()
  for _ in range(3):
    found = compute('regression', ('pearson', 'spearman'),
                    np.array(outputs, float)[:, None], np.array(labels, float))
    assert found == {'pearson': None, 'spearman': None}
  assert len(said) == 2  # one for each score, though three times met
  assert all(reason in message for message in said)


def test_nearly_constant_predictions_are_scored_without_a_warning():
  outputs = np.array([[1.0], [1.0], [1.0000000000000002]])
  found = compute('regression', ('spearman',), outputs, np.array([1.0, 2.0, 3.0]))
  assert found['spearman'] == pytest.approx(np.sqrt(0.75))


def test_b109_labels_of_minus_one_are_refused():
  with pytest.raises(ValueError, match='-1 stands for no label'):
    compute('classification', ('accuracy',), logits([0, 1]), np.array([0, -1]))
  with pytest.raises(ValueError, match='3 classes'):
    compute('classification', ('accuracy',), logits([0, 1]), np.array([0, 3]))


def test_b133_one_example():
  names = ('accuracy', 'f1', 'matthews', 'macro_f1')
  found = compute('classification', names, logits([1], 2), np.array([1]))
  assert found == {'accuracy': 1.0, 'f1': 1.0, 'matthews': 0.0, 'macro_f1': 1.0}


def test_what_does_not_fit_is_refused():
  with pytest.raises(ValueError, match='do not fit'):
    compute('classification', ('accuracy',), logits([0, 1]), np.array([0]))
  with pytest.raises(ValueError, match='do not fit'):
    compute('multi_label', ('micro_f1',), PREDICTED, LABELS[:, 0])
  with pytest.raises(ValueError, match='no examples'):
    compute('classification', ('accuracy',), np.zeros((0, 2)), np.zeros(0, int))
  with pytest.raises(ValueError, match='none of classification'):
    compute('ranking', ('accuracy',), logits([0]), np.array([0]))


def test_a_large_set_does_not_overflow():
  labels = np.tile(np.array([0, 1]), 2_000_000)
  predictions = labels.copy()
  predictions[::4] ^= 1
  assert scores.matthews(labels, predictions) == pytest.approx(0.5773502691896258)


def test_majority():
  names = ('accuracy', 'f1', 'matthews')
  assert scores.majority('classification', names, np.array([0, 0, 1, 0])) == {
      'accuracy': 0.75, 'f1': 0.0, 'matthews': 0.0}
  assert scores.majority('classification', ('accuracy',), np.array([2, 2, 1])) == {
      'accuracy': pytest.approx(2 / 3)}
  assert scores.majority('regression', ('pearson',), np.array([1.0, 2.0])) == {'pearson': 0.0}
  assert scores.majority('multi_label', ('micro_f1',), LABELS)['micro_f1'] == pytest.approx(0.6)
