"""Batches of rows of a few lengths: the same examples, each once, seekable, on any host count."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx
from small_corpora import TinyVocabulary, random_documents
from test_packing import small_model
from test_pretrain import same, stream_of

from bertjax import losses, objectives
from bertjax.data import bucketing, pipeline

DOCUMENTS = random_documents(3, 60)
BATCH = 16


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
  monkeypatch.setattr(bucketing, '_BLOCK_EXAMPLES', 8 * BATCH)


def bucketed_of(seq_lengths=(16, 24, 32), **changes):
  return bucketing.BucketedStream(stream_of(DOCUMENTS, **changes), seq_lengths, BATCH)


def batch_of(bucketed, step):
  return bucketed.batch(step * BATCH + np.arange(BATCH))


def padded(batch, like):
  """The rows as wide as they are in `like`."""
  fillers = {'input_ids': TinyVocabulary().pad_id}
  return {name: np.pad(array, [(0, 0), (0, like[name].shape[1] - array.shape[1])],
                       constant_values=fillers.get(name, 0))
          if array.ndim == 2 else array for name, array in batch.items()}


@pytest.mark.parametrize('task', ['nsp', 'none'])
@pytest.mark.parametrize('whole_words', [False, True])
def test_batches_have_the_examples_and_masks_of_the_stream(task, whole_words):
  bucketed = bucketed_of(next_sentence=task, whole_word_masking=whole_words)
  seen = []
  for step in range(8, 24):  # the second and the third block
    length, numbers, tokens = bucketed.group(step)
    batch, alone = batch_of(bucketed, step), bucketed.examples.batch(numbers)
    same(padded(batch, alone), alone)
    longest = batch['attention_mask'].sum(1).max()
    assert tokens == batch['attention_mask'].sum()
    assert length == min(bucket for bucket in bucketed.seq_lengths if bucket >= longest)
    seen += numbers.tolist()
  assert sorted(seen) == list(range(8 * BATCH, 24 * BATCH))  # each once


def test_less_is_padding_and_the_shares_are_measured():
  bucketed = bucketed_of()
  plain = 1 - bucketed.examples.statistics.padding
  assert bucketed.real_tokens > plain + 0.05
  lengths = np.array([bucketed.group(step).seq_length for step in range(32)])
  assert bucketed.shares == {length: (lengths == length).mean() for length in (16, 24, 32)}
  assert len(set(lengths)) > 1 and bucketed.mean_length == lengths.mean()
  tokens = sum(batch_of(bucketed, step)['attention_mask'].sum() for step in range(32))
  assert bucketed.real_tokens == pytest.approx(tokens / (lengths.sum() * BATCH))


def test_short_and_long_batches_take_turns_and_every_block_has_another_order():
  turns = [tuple(bucketed_of().group(8 * block + place).seq_length for place in range(8))
           for block in range(4)]
  assert len(set(turns)) > 1 and any(list(turn) != sorted(turn) for turn in turns)


def test_batches_do_not_depend_on_what_was_asked_before():
  steps = [40, 3, 17, 0]
  bucketed = bucketed_of()
  for step in steps:
    same(batch_of(bucketed, step), batch_of(bucketed_of(), step))


def test_hosts_read_the_rows_that_their_devices_hold():
  for own in np.arange(BATCH)[::2], np.arange(BATCH)[1::2]:  # scattered, as on a TPU
    for step, share in enumerate(pipeline.batches(bucketed_of(), BATCH, 5, 4, own), 5):
      whole = batch_of(bucketed_of(), step)
      same({name: rows[own] for name, rows in whole.items()}, share)


def test_batches_have_the_shapes_that_are_compiled_for():
  bucketed = bucketed_of()
  for step in range(8):
    batch, length = batch_of(bucketed, step), bucketed.group(step).seq_length
    assert {name: (array.shape, array.dtype.type) for name, array in batch.items()} == (
        bucketed.batch_shapes(BATCH, length))
  shapes = bucketed.batch_shapes(4)
  assert shapes['input_ids'] == ((4, None), np.int32)
  assert shapes['next_sentence_labels'] == ((4,), np.int32)


def test_slots_for_predictions_follow_the_length_but_of_the_longest_rows_are_as_asked_for():
  few, many = (bucketed_of(max_predictions_per_seq=most).examples.settings for most in (3, 9))
  assert [bucketing.num_predictions(few, length) for length in (16, 24, 32)] == [3, 3, 3]
  assert [bucketing.num_predictions(many, length) for length in (16, 24, 32)] == [3, 4, 9]
  short = dataclasses.replace(many, next_sentence='none', seq_length=4, max_predictions_per_seq=0)
  assert bucketing.num_predictions(short, 3) == 1


@pytest.mark.parametrize('lengths', [(16, 24), (32, 16), (16, 16, 32), (16, 64), (7, 32)])
def test_lengths_that_do_not_lead_to_the_examples_own_are_refused(lengths):
  with pytest.raises(ValueError, match='give ascending .* the last of them the seq_length, 32'):
    bucketed_of(lengths)


def test_cut_rows_give_the_losses_and_gradients_of_whole_ones():
  bucketed = bucketed_of(vocabulary=TinyVocabulary())
  graphdef, params = small_model(bucketed.examples.tokenizer.vocab_size)
  objective = objectives.PRETRAINING

  @jax.jit
  @jax.grad
  def gradients(params, batch):
    terms = objective.terms(nnx.merge(graphdef, params), batch, None)
    weights = objective.weights(batch)
    return sum(losses.mean(term.loss, weights[name]) for name, term in terms.items())

  step = next(step for step in range(32) if bucketed.group(step).seq_length == 24)
  found, wanted = (
      gradients(params, jax.tree.map(jax.numpy.asarray, batch)) for batch in (
          batch_of(bucketed, step), bucketed.examples.batch(bucketed.group(step).numbers)))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, wanted)
