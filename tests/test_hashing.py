"""Counter hashes: draws for different purposes are independent, permutations are bijections."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from bertjax.data import hashing


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 2**63), st.integers(0, 100), st.integers(0, 100))
def test_folding_in_a_number_is_no_draw_for_a_purpose(key, number, purpose):
  # Else what is drawn for a document would tell something of the keys of its examples.
  folded = hashing.fold(key, number)
  assert folded[0] != hashing.bits(np.array([key], np.uint64), purpose)[0]


def test_draws_of_neighbouring_keys_and_purposes_are_uncorrelated():
  keys = hashing.fold(7, np.arange(20_000))
  draws = [hashing.uniform(hashing.bits(keys, purpose)) for purpose in range(4)]
  draws += [hashing.uniform(hashing.fold(keys, number)) for number in range(4)]
  draws += [hashing.uniform(keys), np.roll(hashing.uniform(keys), 1)]
  correlation = np.corrcoef(draws) - np.eye(len(draws))
  assert np.abs(correlation).max() < 0.03  # four standard deviations


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 3000), st.integers(0, 2**63))
def test_permutations_are_bijections(size, key):
  images = hashing.permute(np.arange(size), size, key)
  assert np.array_equal(np.sort(images), np.arange(size))


def test_binomial_draws_have_its_mean_and_variance():
  trials = np.repeat([1, 10, 64, 200], 5000)
  heads = hashing.binomial_half(hashing.fold(1, np.arange(len(trials))), trials)
  assert (heads >= 0).all() and (heads <= trials).all()
  for n in (1, 10, 64, 200):
    some = heads[trials == n]
    assert abs(some.mean() - n / 2) < 0.08 * np.sqrt(n) and abs(some.var() / (n / 4) - 1) < 0.1
