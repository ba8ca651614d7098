"""Examples to batches: each once an epoch, few shapes, every batch a function of its step."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertjax.data import examples, tokenizer
from bertjax.data.examples import EpochBatches, Examples, Group

BUCKETS = st.lists(st.integers(1, 40), min_size=1, max_size=5, unique=True).map(sorted)


@st.composite
def lengths_and_buckets(draw, least=0):
  """Lengths that fit into the buckets."""
  buckets = draw(BUCKETS)
  lengths = draw(st.lists(st.integers(1, buckets[-1]), min_size=least, max_size=60))
  return np.array(lengths, np.int32), buckets


def numbered(lengths, choices=None, pad_id=7) -> Examples:
  """Examples whose ids and labels say which they are: the number of the example plus 100."""
  shape = lambda n: (n,) if choices is None else (choices, n)
  tokens = {
      'input_ids': [np.full(shape(n), 100 + i, np.int32) for i, n in enumerate(lengths)],
      'token_type_ids': [np.ones(shape(n), np.int32) for n in lengths],
      'attention_mask': [np.ones(shape(n), np.int32) for n in lengths]}
  return Examples(tokens, {'labels': np.arange(len(lengths), dtype=np.int32) + 100}, pad_id)


def same(one, other) -> bool:
  return one.keys() == other.keys() and all(
      one[name].dtype == other[name].dtype and np.array_equal(one[name], other[name])
      for name in one)


# --- The lengths of rows -----------------------------------------------------------------------


def places(lengths, rows) -> int:
  """Tokens and padding of examples, each in the shortest row that holds it."""
  return int(np.array(rows)[np.searchsorted(rows, lengths)].sum())


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(1, 300))
def test_no_other_lengths_as_many_leave_less_padding(lengths, num_batches):
  lengths = np.array(lengths)
  rows = examples.choose_lengths(lengths, 40, num_batches)
  top = max(8, -(-lengths.max() // 4) * 4)
  chosen = [length for length in rows if length <= top]
  assert rows == tuple(sorted({*chosen, 40})) and chosen[-1] == top
  others = itertools.combinations(range(8, top, 4), len(chosen) - 1)
  assert places(lengths, chosen) == min(places(lengths, [*other, top]) for other in others)


def test_a_length_is_compiled_only_if_it_saves_that_many_steps():
  lengths = np.array([8] * 500 + [32] * 500)  # one length more saves 3/8 of the places
  assert examples.choose_lengths(lengths, 128, 21) == (32, 128)
  assert examples.choose_lengths(lengths, 128, 22) == (8, 32, 128)
  assert examples.choose_lengths(lengths, 32, 10**6) == (8, 32)
  assert len(examples.choose_lengths(np.arange(1, 500), 512, 10**6)) == 6 + 1  # and the longest
  assert examples.choose_lengths(np.array([], np.int32), 128, 8) == (128,)
  assert examples.choose_lengths(np.arange(1, 500), 512, 10**6, 128) == (128, 256, 384, 512)


# --- The plan of an epoch ----------------------------------------------------------------------


@given(lengths_and_buckets(), st.integers(1, 16), st.integers(0, 2**32), st.none() | st.integers(
    0, 1000))
def test_every_example_is_in_one_batch_of_rows_long_enough(data, batch_size, seed, epoch):
  lengths, buckets = data
  groups = examples.plan_epoch(lengths, buckets, batch_size, seed, epoch)
  assert sorted(i for group in groups for i in group.indices) == list(range(len(lengths)))
  assert len(groups) == -(-len(lengths) // batch_size)
  sizes = sorted(len(group.indices) for group in groups)
  assert all(size == batch_size for size in sizes[1:])
  for group in groups:
    assert group.length in buckets and group.length >= lengths[group.indices].max()


@given(lengths_and_buckets(), st.integers(1, 16), st.integers(0, 2**32), st.integers(0, 1000))
def test_shapes_depend_on_neither_seed_nor_epoch(data, batch_size, seed, epoch):
  shapes = lambda *of: sorted(
      (group.length, len(group.indices)) for group in examples.plan_epoch(*data, batch_size, *of))
  assert shapes(seed, epoch) == shapes(0, 0) == shapes(0, None)


def test_orders_differ_between_epochs_and_seeds_but_not_in_evaluation():
  lengths = np.arange(1, 65, dtype=np.int32) % 16 + 1
  order = lambda *of: [tuple(group.indices) for group in examples.plan_epoch(
      lengths, [8, 16], 4, *of)]
  assert order(0, 0) == order(0, 0)
  assert len({tuple(order(seed, epoch)) for seed in (0, 1) for epoch in (0, 1, 2)}) == 6
  assert order(0, None) == order(5, None)
  short = [i for indices in order(0, None)[:8] for i in indices]
  assert short == sorted(np.flatnonzero(lengths <= 8))  # as they stand in the file
  # Not only the order of the batches differs: other examples meet.
  assert {frozenset(indices) for indices in order(0, 0)} != {
      frozenset(indices) for indices in order(0, 1)}


def test_long_and_short_batches_take_turns():
  """Sorted by length, the gradient of a whole stretch would be that of one length."""
  lengths = np.repeat([4, 30], 200).astype(np.int32)
  turns = [group.length for group in examples.plan_epoch(lengths, [8, 32], 4)]
  assert sum(a != b for a, b in zip(turns, turns[1:], strict=False)) > 20


def test_only_what_is_left_over_moves_to_longer_rows():
  lengths = np.array([5] * 10 + [12] * 3 + [20], np.int32)
  groups = examples.plan_epoch(lengths, [8, 16, 24, 32], 4, epoch=None)
  assert [group.length for group in groups] == [8, 8, 16, 24]  # 32 is needed by nobody
  assert [list(group.indices) for group in groups] == [
      [0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13]]


def test_an_example_that_is_too_long_is_refused_with_the_mend():
  with pytest.raises(ValueError, match=r'33 tokens is longer .* rows, 32; .*seq_lengths'):
    examples.plan_epoch(np.array([3, 33], np.int32), [8, 32], 4)
  with pytest.raises(ValueError, match='33 tokens'):
    EpochBatches(numbered([3, 33]), [8, 32], 4, seed=0)


# --- Batches -----------------------------------------------------------------------------------


@pytest.mark.parametrize('choices', [None, 3])
def test_padding_is_of_the_pad_id_and_fillers_are_empty_and_weigh_nothing(choices):
  made = numbered([3, 5, 2], choices)
  batch = examples.make_batch(made, Group(6, np.array([1, 2])), 4)
  inner = () if choices is None else (choices,)
  assert {name: array.shape for name, array in batch.items()} == {
      'input_ids': (4, *inner, 6), 'token_type_ids': (4, *inner, 6),
      'attention_mask': (4, *inner, 6), 'labels': (4,), 'weights': (4,)}
  assert batch['weights'].tolist() == [1, 1, 0, 0] and batch['weights'].dtype == np.float32
  assert batch['labels'].tolist() == [101, 102, 0, 0]
  for row, (number, length) in enumerate([(101, 5), (102, 2), (0, 0), (0, 0)]):
    ids, mask = batch['input_ids'][row], batch['attention_mask'][row]
    assert (ids[..., :length] == number).all() and (ids[..., length:] == 7).all()
    assert (mask[..., :length] == 1).all() and (mask[..., length:] == 0).all()
  shapes = examples.batch_shapes(made, 6, 4)
  assert shapes == {name: (array.shape, array.dtype.type) for name, array in batch.items()}


def test_labels_of_tokens_are_padded_with_weight_0():
  tokens = dict(numbered([2, 4]).tokens)
  tokens['labels'] = [np.array([1, 2], np.int32), np.array([3, 4, 5, 6], np.int32)]
  tokens['label_weights'] = [np.ones(2, np.float32), np.ones(4, np.float32)]
  batch = examples.make_batch(Examples(tokens, {}), Group(5, np.array([0, 1])), 3)
  assert batch['labels'].tolist() == [[1, 2, 0, 0, 0], [3, 4, 5, 6, 0], [0] * 5]
  assert batch['label_weights'].sum(1).tolist() == [2, 4, 0]
  assert batch['label_weights'].dtype == np.float32


@settings(deadline=None, max_examples=40)
@given(lengths_and_buckets(least=1), st.sampled_from([1, 2, 4]), st.integers(1, 4))
def test_processes_make_their_rows_of_the_global_batch(data, processes, share):
  lengths, buckets = data
  made, batch_size = numbered(lengths), processes * share
  whole = EpochBatches(made, buckets, batch_size, seed=3)
  steps = whole.steps_per_epoch + 1
  for number in range(processes):
    own = np.arange(number, batch_size, processes)  # scattered, as on a TPU
    part = EpochBatches(made, buckets, batch_size, 3, own)
    assert part.shapes == whole.shapes  # the shapes are those of all rows
    for batch, rows in zip(whole.batches(0, steps), part.batches(0, steps), strict=True):
      assert same({name: field[own] for name, field in batch.items()}, rows)


@settings(deadline=None, max_examples=40)
@given(lengths_and_buckets(least=1), st.integers(1, 8), st.integers(0, 30))
def test_a_seek_gives_what_going_straight_gives(data, batch_size, first):
  lengths, buckets = data
  stream = lambda: EpochBatches(numbered(lengths), buckets, batch_size, seed=1)
  straight = list(stream().batches(0, first + 5))
  assert len(straight) == first + 5
  assert all(same(a, b) for a, b in zip(straight[first:], stream().batches(first, 5), strict=True))


@settings(deadline=None, max_examples=40)
@given(lengths_and_buckets(least=1), st.integers(1, 8), st.integers(0, 2**32))
def test_an_epoch_of_batches_holds_each_example_once_in_announced_shapes(data, batch_size, seed):
  lengths, buckets = data
  stream = EpochBatches(numbered(lengths), buckets, batch_size, seed)
  shapes = [{name: (array.shape, array.dtype.type) for name, array in batch.items()}
            for batch in stream.batches(0, 3 * stream.steps_per_epoch)]
  assert all(shape in stream.shapes for shape in shapes)
  assert all(shape in shapes for shape in stream.shapes)  # none is compiled for nothing
  for epoch in range(3):
    real = []
    for batch in stream.batches(epoch * stream.steps_per_epoch, stream.steps_per_epoch):
      rows = batch['weights'] > 0
      assert not batch['attention_mask'][~rows].any()
      real += batch['labels'][rows].tolist()
      for row in np.flatnonzero(rows):
        label, mask = batch['labels'][row], batch['attention_mask'][row]
        assert (batch['input_ids'][row][mask > 0] == label).all()
        assert mask.sum() == lengths[label - 100]
    assert sorted(real) == list(range(100, 100 + len(lengths)))


def test_statistics_say_how_much_is_padding():
  lengths = [8] * 6 + [20] * 3
  stream = EpochBatches(numbered(lengths), [8, 32], 4, seed=0)
  # 4 x 8, then twice 4 x 32: two short ones move up, and 5 rows fill one batch and begin another.
  assert stream.steps_per_epoch == 3
  assert stream.mean_length == (8 + 32 + 32) / 3
  tokens, places = sum(lengths), 4 * (8 + 32 + 32)
  assert stream.statistics == {
      'examples': 9, 'padding': pytest.approx(1 - tokens / places), 'batches_of_length_8': 1,
      'batches_of_length_32': 2}


def test_padding_inside_a_choice_is_padding():
  made = numbered([8, 8], choices=4)
  made.tokens['attention_mask'][0][1:, 2:] = 0  # three of the choices are shorter
  stream = EpochBatches(made, [8], 2, seed=0)
  assert stream.statistics['padding'] == pytest.approx(1 - (64 - 18) / 64)


# --- Pairs -------------------------------------------------------------------------------------


def google_truncate(first, second, room):
  """run_classifier.py, as it is described: a token at a time from the longer, ties from B."""
  first, second = list(first), list(second)
  while len(first) + len(second) > room:
    (first if len(first) > len(second) else second).pop()
  return first, second


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 60))
def test_truncate_pair_is_the_loop_that_takes_a_token_at_a_time(a, b, room):
  first, second = np.arange(a), np.arange(100, 100 + b)
  found = examples.truncate_pair(first, second, room)
  assert tuple(part.tolist() for part in found) == google_truncate(first, second, room)


@pytest.mark.parametrize('casing', ['uncased', 'cased'])
def test_pairs_are_googles(golden, casing):
  folder = golden / '04_tokenize'
  words = tokenizer.load(folder / f'vocab_{casing}.txt', lowercase=casing == 'uncased')
  cases = json.loads((folder / f'google_{casing}_pairs.json').read_text(encoding='utf-8'))
  assert len(cases) > 20
  for case in cases:
    first, second = words.encode_batch([case['a'], case['b'] or ''])
    second = None if case['b'] is None else second
    found = examples.join(words, first, second, case['max_length'])
    assert found['input_ids'].tolist() == case['input_ids'], case
    assert found['token_type_ids'].tolist() == case['segment_ids']
    assert found['attention_mask'].tolist() == [1] * len(case['input_ids'])


WORDS = tokenizer.train(['a few words of a text'] * 4, 'wordpiece', 30)


@given(st.integers(0, 30), st.none() | st.integers(0, 30), st.integers(5, 40))
def test_join_keeps_the_special_tokens_whatever_is_cut(a, b, max_length):
  first = np.arange(10, 10 + a, dtype=np.int32)
  second = None if b is None else np.arange(50, 50 + b, dtype=np.int32)
  row = examples.join(WORDS, first, second, max_length)
  ids, kinds = row['input_ids'].tolist(), row['token_type_ids'].tolist()
  assert all(field.dtype == np.int32 and len(field) == len(ids) for field in row.values())
  assert len(ids) == min(max_length, a + 2 if b is None else a + b + 3)
  special, sep = (WORDS.cls_id, WORDS.sep_id), WORDS.sep_id
  assert (ids[0], ids[-1], ids.count(sep)) == (*special, 1 if b is None else 2)
  inside = [i for i in ids if i not in special]
  kept = sum(i < 50 for i in inside)
  assert inside == [*range(10, 10 + kept), *range(50, 50 + len(inside) - kept)]
  assert kinds == ([0] * len(ids) if b is None else
                   [0] * (kept + 2) + [1] * (len(inside) - kept + 1))
