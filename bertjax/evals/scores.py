"""Scores of classification, multi-label classification and regression, in float64 on the host.

They equal scikit-learn's and SciPy's (zero_division=0 where F1 has nothing to divide by). What is
undefined, the correlation with a constant, is None, and the reason is logged; the Matthews
coefficient of a constant is 0, as in scikit-learn.
"""

import functools
import warnings
from collections.abc import Sequence

import numpy as np
from absl import logging
from jaxtyping import Bool, Float, Float64, Int, Shaped

KINDS = ('classification', 'multi_label', 'regression')

Score = float | None


def accuracy(labels: Shaped[np.ndarray, 'N *C'], predictions: Shaped[np.ndarray, 'N *C']) -> float:
  """Share of examples that are right; with several labels an example, right in all of them."""
  right = labels == predictions
  return float(np.mean(right.reshape(len(right), -1).all(axis=1)))


def f1(labels: Int[np.ndarray, 'N'], predictions: Int[np.ndarray, 'N']) -> float:
  """F1 of class 1 (the second label name), as GLUE scores MRPC and QQP."""
  return float(_f1_by_column(labels[:, None] == 1, predictions[:, None] == 1)[0])


def macro_f1(labels: Shaped[np.ndarray, 'N *C'], predictions: Shaped[np.ndarray, 'N *C']) -> float:
  """Mean F1 of the classes that occur in labels or predictions; multi-label: of all columns."""
  if labels.ndim == 1:
    classes = np.union1d(labels, predictions)
    labels, predictions = labels[:, None] == classes, predictions[:, None] == classes
  return float(np.mean(_f1_by_column(labels.astype(bool), predictions.astype(bool))))


def micro_f1(labels: Shaped[np.ndarray, 'N C'], predictions: Shaped[np.ndarray, 'N C']) -> float:
  """F1 over all (example, label) pairs of a multi-label task together."""
  pairs = labels.astype(bool).reshape(-1, 1), predictions.astype(bool).reshape(-1, 1)
  return float(_f1_by_column(*pairs)[0])


def _f1_by_column(
    labels: Bool[np.ndarray, 'N C'], predictions: Bool[np.ndarray, 'N C']
) -> Float64[np.ndarray, 'C']:
  hits = (labels & predictions).sum(axis=0)
  named = labels.sum(axis=0) + predictions.sum(axis=0)
  return 2 * hits / np.maximum(named, 1)


def matthews(labels: Int[np.ndarray, 'N'], predictions: Int[np.ndarray, 'N']) -> float:
  """Matthews correlation for any number of classes; 0 where labels or predictions are constant.

  Source: Gorodkin (2004), 'Comparing two K-category assignments by a K-category correlation
  coefficient', in the form of counts that scikit-learn uses.
  """
  classes = np.union1d(labels, predictions)
  true, predicted = (x[:, None] == classes for x in (labels, predictions))
  # Floats from here on: products of four counts of a large set pass 2**63.
  count = float(len(labels))
  by_true, by_predicted = true.sum(axis=0, dtype=float), predicted.sum(axis=0, dtype=float)
  covariance = float((labels == predictions).sum()) * count - by_true @ by_predicted
  spread = (count**2 - by_true @ by_true) * (count**2 - by_predicted @ by_predicted)
  return float(covariance / np.sqrt(spread)) if spread else 0.0


def pearson(labels: Float[np.ndarray, 'N'], predictions: Float[np.ndarray, 'N']) -> Score:
  """Pearson's correlation; None where it is undefined."""
  return _correlation('pearsonr', labels, predictions)


def spearman(labels: Float[np.ndarray, 'N'], predictions: Float[np.ndarray, 'N']) -> Score:
  """Spearman's rank correlation, ties with their mean rank; None where it is undefined."""
  return _correlation('spearmanr', labels, predictions)


def _correlation(
    function: str, labels: Float[np.ndarray, 'N'], predictions: Float[np.ndarray, 'N']
) -> Score:
  name = function.removesuffix('r')
  for what, x in (('labels', labels), ('predictions', predictions)):
    if not np.isfinite(x).all():
      return _undefined(name, f'some {what} are not finite')
    if (x == x[0]).all():
      return _undefined(name, f'all {what} are equal' if len(x) > 1 else 'there is one example')

  # Two seconds to import, and most tasks have no need of it. It comes with JAX.
  import scipy.stats

  with warnings.catch_warnings():
    warnings.simplefilter('ignore')  # of nearly constant input, whose correlation is still defined
    correlate = getattr(scipy.stats, function)
    return float(correlate(labels.astype(float), predictions.astype(float)).statistic)


def _undefined(name: str, reason: str) -> None:
  _log_once(f'{name} is undefined and reported as null: {reason}')


@functools.cache
def _log_once(message: str) -> None:
  """A constant prediction comes back at every evaluation of a failed run."""
  logging.warning(message)


METRICS = {
  'accuracy': accuracy,
  'f1': f1,
  'macro_f1': macro_f1,
  'micro_f1': micro_f1,
  'matthews': matthews,
  'pearson': pearson,
  'spearman': spearman,
}


def compute(
    kind: str, metrics: Sequence[str], outputs: Float[np.ndarray, 'N C'],
    labels: Shaped[np.ndarray, 'M ...'],
) -> dict[str, Score]:
  """The named scores of a head's outputs.

  Args:
    kind: 'classification', 'multi_label' or 'regression'.
    metrics: names in METRICS.
    outputs: logits, or the one predicted number.
    labels: class numbers [N]; 0 or 1 [N, C]; numbers [N].

  Raises:
    ValueError: no examples, labels that do not fit the outputs, or -1 among class numbers.
  """
  _check(kind, outputs, labels)
  if kind == 'regression':
    labels, predictions = labels.astype(float), outputs[:, 0].astype(float)
  else:
    predictions = predict(kind, outputs)
  return {name: METRICS[name](labels, predictions) for name in metrics}


def predict(kind: str, outputs: Float[np.ndarray, 'N C']) -> Shaped[np.ndarray, 'N ...']:
  """Class numbers [N]; for multi_label bool [N, C]: a probability above one half."""
  return outputs > 0 if kind == 'multi_label' else outputs.argmax(axis=1)


def _check(
    kind: str, outputs: Float[np.ndarray, 'N C'], labels: Shaped[np.ndarray, 'M ...']
) -> None:
  if kind not in KINDS:
    raise ValueError(f'kind {kind!r} is none of {", ".join(KINDS)}')
  wanted = outputs.shape if kind == 'multi_label' else outputs.shape[:1]
  if labels.shape != wanted:
    raise ValueError(f'labels {labels.shape} do not fit outputs {outputs.shape} of a {kind} head')
  if not len(labels):
    raise ValueError('no examples to score')
  if kind == 'classification' and not 0 <= labels.min() <= labels.max() < outputs.shape[1]:
    raise ValueError(
        f'labels run from {labels.min()} to {labels.max()}, outputs are {outputs.shape[1]} classes;'
        ' -1 stands for no label, and such rows can only be predicted'
    )


def majority(
    kind: str, metrics: Sequence[str], labels: Shaped[np.ndarray, 'N ...']
) -> dict[str, Score]:
  """What knowing nothing scores: always the commonest class (label by label).

  Of numbers, whose scores are correlations, 0: a constant has none, and guesses have about 0. A run
  that does no better has failed.
  """
  if kind == 'regression':
    return dict.fromkeys(metrics, 0.0)
  if kind == 'classification':
    counts = np.bincount(labels, minlength=2)
    constant = counts == counts.max()
  else:
    constant = np.where(labels.mean(axis=0) > 0.5, 1.0, -1.0)
  return compute(kind, metrics, np.tile(constant.astype(float), (len(labels), 1)), labels)
