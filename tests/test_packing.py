"""Packed rows: the same examples and masks as unpacked, each once, seekable, on any host count."""

import jax
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from small_corpora import TinyVocabulary, random_documents
from test_pretrain import same, stream_of

from bertjax import heads, losses, objectives, state
from bertjax.data import packing, pipeline
from bertjax.model import BertConfig

DOCUMENTS = random_documents(3, 60)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
  monkeypatch.setattr(packing, 'BLOCK_EXAMPLES', 64)


def packed_of(max_examples=4, **changes):
  return packing.PackedStream(stream_of(DOCUMENTS, **changes), max_examples)


def unpack(batch, row, number):
  """One example of a packed row as its own row would hold it, without padding."""
  here = np.flatnonzero(batch['segment_ids'][row] == number + 1)
  start, stop = here[0], here[-1] + 1
  assert list(here) == list(range(start, stop))  # in one piece
  assert list(batch['position_ids'][row, here]) == list(range(stop - start))  # from 0
  slots = np.flatnonzero((batch['masked_lm_weights'][row] > 0)
                         & (batch['masked_lm_positions'][row] >= start)
                         & (batch['masked_lm_positions'][row] < stop))
  assert batch['cls_positions'][row, number] == start
  return {
      'input_ids': batch['input_ids'][row, here],
      'token_type_ids': batch['token_type_ids'][row, here],
      'masked_lm_positions': batch['masked_lm_positions'][row, slots] - start,
      'masked_lm_ids': batch['masked_lm_ids'][row, slots],
      'next_sentence_labels': batch['next_sentence_labels'][row, number],
      'next_sentence_weights': batch['next_sentence_weights'][row, number]}


def alone(batch, row):
  length = batch['attention_mask'][row].sum()
  slots = np.flatnonzero(batch['masked_lm_weights'][row] > 0)
  return {
      'input_ids': batch['input_ids'][row, :length],
      'token_type_ids': batch['token_type_ids'][row, :length],
      'masked_lm_positions': batch['masked_lm_positions'][row, slots],
      'masked_lm_ids': batch['masked_lm_ids'][row, slots],
      'next_sentence_labels': batch['next_sentence_labels'][row],
      'next_sentence_weights': batch['next_sentence_weights'][row]}


# --- The packing itself


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=120), st.integers(1, 9))
def test_pack_places_every_item_once_within_the_bounds(lengths, most):
  lengths = np.array(lengths)
  rows = packing.pack(lengths, 40, most)
  assert sorted(item for row in rows for item in row) == list(range(len(lengths)))
  for row in rows:
    assert lengths[row].sum() <= 40 and len(row) <= most
  fewest = max(-(-int(lengths.sum()) // 40), -(-len(lengths) // most))
  assert len(rows) <= 2 * fewest + 1  # two half-empty rows are never left open


def test_pack_fills_rows_that_can_be_filled():
  assert len(packing.pack(np.array([30, 10, 25, 15, 39, 1]), 40, 8)) == 3


# --- Rows of a run


@pytest.mark.parametrize('task', ['nsp', 'none'])
def test_every_example_comes_once_with_the_masks_that_it_has_unpacked(task):
  packed = packed_of(next_sentence=task)
  rows = 3 * packed.rows_per_block
  numbers = [number for row in range(rows) for number in packed.row_examples(row)]
  assert sorted(numbers) == list(range(3 * packing.BLOCK_EXAMPLES))
  batch = packed.batch(np.arange(rows))
  single = packed.examples.batch(np.arange(3 * packing.BLOCK_EXAMPLES))
  for row in range(rows):
    contents = packed.row_examples(row)
    assert batch['segment_ids'][row].max(initial=0) == len(contents)
    for place, number in enumerate(contents):
      same_example(unpack(batch, row, place), alone(single, number))
  # Nothing else is predicted, and fillers weigh nothing.
  assert batch['masked_lm_weights'].sum() == single['masked_lm_weights'].sum()
  assert batch['next_sentence_weights'].sum() == single['next_sentence_weights'].sum()
  assert (batch['input_ids'][batch['segment_ids'] == 0] == packed.examples.tokenizer.pad_id).all()


def same_example(one, other):
  for name in one:
    np.testing.assert_array_equal(one[name], other[name], err_msg=name)


def test_most_of_a_row_is_real(monkeypatch):
  monkeypatch.setattr(packing, 'BLOCK_EXAMPLES', 512)
  packed = packed_of(max_examples=8, seq_length=64)
  batch = packed.batch(np.arange(packed.rows_per_block))
  share = (batch['segment_ids'] > 0).mean()
  unpacked = packed.examples.batch(np.arange(packing.BLOCK_EXAMPLES))['attention_mask'].mean()
  assert share > 0.9 > unpacked
  assert packed.real_tokens == pytest.approx(share, abs=0.05)


def test_rows_do_not_depend_on_what_was_asked_before():
  packed, fresh = packed_of(), packed_of()
  packed.batch(np.arange(40))
  there = np.array([5 * packed.rows_per_block + 3, 7, 12 * packed.rows_per_block])
  same(packed.batch(there), fresh.batch(there))


def test_hosts_read_disjoint_rows_that_make_up_the_batch():
  packed = packed_of()
  whole = list(pipeline.batches(packed, 8, 3, 2))
  shares = [list(pipeline.batches(packed, 8, 3, 2, i, 2)) for i in range(2)]
  for step in range(2):
    same(whole[step], {name: np.concatenate([shares[0][step][name], shares[1][step][name]])
                       for name in whole[step]})
  same(whole[1], next(pipeline.batches(packed, 8, 4, 1)))  # a resume is a seek


def test_what_a_block_has_no_rows_for_goes_into_the_next():
  packed = packed_of()
  needed = [len(packed._pack_block(block)[0]) for block in range(6)]
  packed.rows_per_block = max(needed) - 1  # too few for some blocks
  moved = sum(bool(packed._own(block).left_over) for block in range(5))
  assert moved
  numbers = [number for row in range(6 * packed.rows_per_block)
             for number in packed.row_examples(row)]
  last = set(packed._own(5).left_over)
  assert sorted(numbers) == [n for n in range(6 * packing.BLOCK_EXAMPLES) if n not in last]
  for row in range(6 * packed.rows_per_block):
    contents = np.array(packed.row_examples(row), np.int64)
    assert len(contents) <= packed.max_examples
    assert packed.examples.lengths(contents).sum() <= packed.examples.settings.seq_length


def test_lengths_are_those_of_the_examples():
  stream = stream_of(DOCUMENTS)
  numbers = np.array([0, 99, 5, 1234])
  np.testing.assert_array_equal(
      stream.lengths(numbers), stream.batch(numbers)['attention_mask'].sum(1))


def test_batches_have_the_shapes_that_are_compiled_for():
  packed = packed_of()
  shapes = packing.batch_shapes(packed.examples.settings, packed.max_examples, 3)
  batch = packed.batch(np.arange(3))
  assert {name: (array.shape, array.dtype.type) for name, array in batch.items()} == shapes


def test_impossible_settings_are_refused():
  with pytest.raises(ValueError, match='max_examples_per_row is 0'):
    packed_of(max_examples=0)


# --- What is learnt from them


@pytest.mark.parametrize('task', ['nsp', 'none'])
def test_b067_packed_rows_give_the_losses_and_gradients_of_unpacked_ones(task):
  packed = packed_of(next_sentence=task, vocabulary=TinyVocabulary())
  config = BertConfig(
      vocab_size=packed.examples.tokenizer.vocab_size, hidden_size=16, num_hidden_layers=2,
      num_attention_heads=2, intermediate_size=32, max_position_embeddings=32,
      hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
  build = lambda rngs: heads.BertForPreTraining(config, rngs)
  graphdef, _ = state.split(build)
  params = jax.jit(lambda: state.init_params(build, 0))()

  def run(objective, batch):
    def loss(params):
      sums = objective.terms(nnx.merge(graphdef, params), batch, None)
      weights = objective.weights(batch)
      return sum(losses.mean(term.loss, weights[name]) for name, term in sums.items()), (
          sums, objective.counts(batch))

    batch = {name: jax.numpy.asarray(array) for name, array in batch.items()}
    return jax.jit(jax.grad(loss, has_aux=True))(params)

  one = run(objectives.PACKED_PRETRAINING, packed.batch(np.arange(packed.rows_per_block)))
  other = run(objectives.PRETRAINING, packed.examples.batch(np.arange(packing.BLOCK_EXAMPLES)))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), one, other)
