"""Several corpora as one stream: which corpus example i comes from, by arithmetic.

Examples are dealt in cycles of CYCLE. Each corpus has a fixed number of places in a cycle (its
weight, rounded), and their order is shuffled anew in every cycle. So both the corpus of example i
and how many examples of that corpus came before are known without counting.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int64

from bertjax.data import hashing

CYCLE = 4096
_DEAL = 32


def sampling_weights(sizes: Sequence[int], exponent: float) -> list[float]:
  """Weights proportional to size ** exponent, summing to 1.

  1 draws every example equally often, 0 every corpus; languages of unequal size are usually mixed
  with 0.7 (multilingual BERT) or 0.3 (XLM-R).

  Raises:
    ValueError: for an exponent outside [0, 1].
  """
  if not 0 <= exponent <= 1:
    raise ValueError(f'the sampling exponent must lie between 0 and 1, not {exponent}')
  powers = np.asarray(sizes, np.float64) ** exponent
  return (powers / powers.sum()).tolist()


class Mixture:
  """Deals examples from corpora in fixed proportions.

  Attributes:
    quotas: places of each corpus in a cycle of CYCLE examples.
  """

  def __init__(self, weights: Sequence[float], seed: int):
    """Rounds the weights to quotas, at least 1 each, by largest remainders.

    Raises:
      ValueError: if a weight is not positive.
    """
    if not weights or min(weights) <= 0:
      raise ValueError(f'mixture weights must be positive, not {list(weights)}')
    exact = np.asarray(weights, np.float64) / np.sum(weights) * CYCLE
    quotas = np.maximum(np.floor(exact), 1).astype(np.int64)
    while quotas.sum() != CYCLE:
      short = quotas.sum() < CYCLE
      behind = exact - quotas
      # Only a corpus with more than one place can give one up.
      pick = np.argmax(behind) if short else np.argmin(np.where(quotas > 1, behind, np.inf))
      quotas[pick] += 1 if short else -1
    self.quotas = quotas
    self._ends = np.cumsum(quotas)
    self._seed = seed

  def locate(
      self, index: Int64[np.ndarray, 'n']
  ) -> tuple[Int64[np.ndarray, 'n'], Int64[np.ndarray, 'n']]:
    """The corpus of each example, and its number among the examples of that corpus."""
    if len(self.quotas) == 1:
      return np.zeros_like(index), index
    cycle, place = np.divmod(index, CYCLE)
    for c in np.unique(cycle).tolist():
      rows = cycle == c
      place[rows] = hashing.permute(place[rows], CYCLE, hashing.fold_int(self._seed, _DEAL, c))
    corpus = np.searchsorted(self._ends, place, 'right')
    quota = self.quotas[corpus]
    return corpus, cycle * quota + place - (self._ends[corpus] - quota)
