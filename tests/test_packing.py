"""Packed rows: the same examples and masks as unpacked, each once, seekable, on any host count."""

import jax
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from small_corpora import TinyVocabulary, make_split, random_documents
from test_pretrain import same, stream_of

from bertjax import heads, losses, objectives, state
from bertjax.data import epochs, hashing, packing, pipeline, pretrain
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


def test_hosts_read_the_rows_that_their_devices_hold():
  packed = packed_of()
  whole = list(pipeline.batches(packed, 8, 3, 2))
  for own in (np.array([0, 1, 6, 7]), np.arange(2, 6)):  # scattered, as on a TPU
    for batch, share in zip(whole, pipeline.batches(packed, 8, 3, 2, own), strict=True):
      same({name: rows[own] for name, rows in batch.items()}, share)
  same(whole[1], next(pipeline.batches(packed, 8, 4, 1)))  # a resume is a seek


def rows_of(packed, blocks):
  return [packed.row_examples(row) for row in range(blocks * packed.rows_per_block)]


def test_what_a_block_has_no_rows_for_goes_into_those_behind_it():
  packed = packed_of()
  needed = [len(packed._pack_block(block)[0]) for block in range(6)]
  packed.rows_per_block = max(needed) - 1  # too few for some blocks
  assert any(packed._own(block).left_over for block in range(6))
  contents = rows_of(packed, 6 + packing.REACH)
  numbers = [number for content in contents for number in content]
  assert len(set(numbers)) == len(numbers)
  first = range(6 * packing.BLOCK_EXAMPLES)
  assert sorted(n for n in numbers if n in first) == list(first)
  for content in contents:
    assert len(content) <= packed.max_examples
    lengths = packed.examples.lengths(np.array(content, np.int64))
    assert lengths.sum() <= packed.examples.settings.seq_length


def test_a_full_block_is_passed_over():
  """Block 0 leaves over, block 1 is full to the brim, block 2 has room."""
  packed = packed_of(max_examples=1)
  own = {0: packing.Plan([[0], [1]], [2, 3]), 1: packing.Plan([[4], [5]], [6]),
         2: packing.Plan([[7], []], []), 3: packing.Plan([[], []], [])}
  packed._own = lambda block: own.get(block, packing.Plan([[], []], []))
  packed.rows_per_block = 2
  found = [sorted(number for row in packed._plan(block) for number in row) for block in range(4)]
  assert found == [[0, 1], [4, 5], [6, 7], [2, 3]]  # the nearer block comes first


@pytest.mark.parametrize('most', [1, 2, 4])
def test_what_finds_no_room_is_left_out_and_counted(most, caplog):
  """Too few rows in every block: a run goes on with what there is room for."""
  packed, fresh = packed_of(most), packed_of(most)
  packed.rows_per_block = fresh.rows_per_block = packed.rows_per_block * 3 // 4
  with caplog.at_level('WARNING'):
    contents = rows_of(packed, 3 + packing.REACH)
  numbers = [number for content in contents for number in content]
  assert len(set(numbers)) == len(numbers)  # none twice
  missing = set(range(3 * packing.BLOCK_EXAMPLES)) - set(numbers)
  said = [record.args for record in caplog.records if 'has room' in record.message]
  assert {block: count for _, block, count, _ in said} == {
      block: sum(n // packing.BLOCK_EXAMPLES == block for n in missing) for block in range(3)}
  assert len(said) == 3  # once a block
  for row in range(len(contents))[::-7]:
    assert fresh.row_examples(row) == contents[row]  # whatever was asked before
  packed.batch(np.arange(len(contents)))


def test_windows_that_are_alike_have_the_rows_of_the_first():
  assert packing._rows_for([[1000, 1010]]) == 1015
  assert packing._rows_for([[1000, 1010], [1004, 1016], [995, 1000]]) == 1015


def test_windows_that_differ_have_more_rows_than_any_needs():
  rows = packing._rows_for([[800, 810], [1200, 1230], [1000, 1010]])
  assert 1230 < rows < 1700


def two_kinds(seed):
  """Long documents, then short ones, with epochs of two windows, all a 16th of the real sizes."""
  documents = [[np.full(25, 10)] * 40] * 1250 + [[np.full(10, 11)] * 2] * 12500
  stream = pretrain.ExampleStream(
      make_split(documents), TinyVocabulary(), pretrain.PretrainSettings(seq_length=128, seed=seed))
  seed_of_corpus = hashing.fold_int(seed, 0)
  stream.samplers = [epochs.Epochs(stream._corpora[0], stream.rule, seed_of_corpus, 1024)]
  stream.num_examples = stream.samplers[0].num_examples
  return stream


@pytest.mark.parametrize('seed', [2, 5])
def test_a_corpus_of_two_kinds_loses_nothing(seed, monkeypatch):
  monkeypatch.setattr(packing, 'BLOCK_EXAMPLES', 128)
  monkeypatch.setattr(packing, '_WINDOW_EXAMPLES', 8 * 1024)
  packed = packing.PackedStream(two_kinds(seed), 8)
  blocks = packed.examples.num_examples // 128
  needs = [len(packed._pack_block(block)[0]) for block in range(blocks)]
  assert max(needs) > 1.2 * max(needs[:8])  # the first blocks do not tell
  numbers = [number for content in rows_of(packed, blocks + packing.REACH) for number in content]
  assert len(set(numbers)) == len(numbers)
  assert set(range(128 * blocks)) < set(numbers)


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


def small_model(vocab_size):
  """Graph and parameters of a pre-training model without dropout."""
  config = BertConfig(
      vocab_size=vocab_size, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
      intermediate_size=32, max_position_embeddings=32, hidden_dropout_prob=0.0,
      attention_probs_dropout_prob=0.0)
  build = lambda rngs: heads.BertForPreTraining(config, rngs)
  return state.split(build)[0], jax.jit(lambda: state.init_params(build, 0))()


@pytest.mark.parametrize('task', ['nsp', 'none'])
def test_b067_packed_rows_give_the_losses_and_gradients_of_unpacked_ones(task):
  packed = packed_of(next_sentence=task, vocabulary=TinyVocabulary())
  graphdef, params = small_model(packed.examples.tokenizer.vocab_size)

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
