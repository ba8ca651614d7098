"""Several corpora in one stream."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_corpora import TinyVocabulary, make_split, random_documents

from bertjax.data import mixture, pretrain


@settings(deadline=None, max_examples=30)
@given(st.lists(st.floats(1e-3, 1), min_size=1, max_size=6), st.integers(0, 99))
def test_every_corpus_is_counted_through_without_gaps(weights, seed):
  mix = mixture.Mixture(weights, seed)
  corpus, number = mix.locate(np.arange(3 * mixture.CYCLE))
  assert mix.quotas.sum() == mixture.CYCLE or len(weights) == 1
  for c, quota in enumerate(mix.quotas.tolist()):
    count = 3 * mixture.CYCLE if len(weights) == 1 else 3 * quota
    np.testing.assert_array_equal(np.sort(number[corpus == c]), np.arange(count))
    assert abs(quota / mixture.CYCLE - weights[c] / sum(weights)) < 2 / mixture.CYCLE


def test_order_is_shuffled_and_changes_by_cycle():
  mix = mixture.Mixture([0.5, 0.5], 0)
  corpus, _ = mix.locate(np.arange(2 * mixture.CYCLE))
  one, two = corpus[: mixture.CYCLE], corpus[mixture.CYCLE :]
  assert (one != two).mean() > 0.4
  assert abs(np.mean(one[1:] == one[:-1]) - 0.5) < 0.05


def test_sampling_exponent():
  assert mixture.sampling_weights([900, 100], 1.0) == pytest.approx([0.9, 0.1])
  assert mixture.sampling_weights([900, 100], 0.0) == pytest.approx([0.5, 0.5])
  assert mixture.sampling_weights([900, 100], 0.5) == pytest.approx([0.75, 0.25])
  with pytest.raises(ValueError, match='between 0 and 1'):
    mixture.sampling_weights([1, 2], 2.0)
  with pytest.raises(ValueError, match='positive'):
    mixture.Mixture([1.0, 0.0], 0)


def test_partners_come_from_the_same_corpus_and_weights_hold():
  low, high = random_documents(1, 30, last=50), random_documents(2, 10, first=50)
  stream = pretrain.ExampleStream(
      [make_split(low), make_split(high)], TinyVocabulary(),
      pretrain.PretrainSettings(seq_length=32, masked_lm_prob=0.01), weights=[0.25, 0.75],
  )
  batch = stream.batch(np.arange(mixture.CYCLE))
  text = batch['input_ids']
  is_low, is_high = (text >= 10) & (text < 50), text >= 50
  # One masked token per row may be a random word of the other range.
  assert ((is_low.sum(1) <= 1) | (is_high.sum(1) <= 1)).all()
  assert abs((is_high.sum(1) > is_low.sum(1)).mean() - 0.75) < 0.02
  with pytest.raises(ValueError, match='1 mixture weights for 2 corpora'):
    pretrain.ExampleStream([make_split(low)] * 2, TinyVocabulary(),
                           pretrain.PretrainSettings(), weights=[1.0])
