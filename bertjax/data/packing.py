"""Several examples in a row, so that little of a batch is padding.

    numbers of a block ── ExampleStream.lengths ──> pack ──> rows of numbers ── lay_out ──> batch

Examples kN to kN + N - 1 of the run make up block k, which has R rows whatever its examples: row r
of the run is row r mod R of block r div R. So a row is a pure function of (manifest, settings, its
number), as an example is: a resume is a seek, and any number of processes makes the same batches.

N examples need a little more or fewer rows each time; R is what a sample of blocks needs, and a
margin. Where a block needs more, the examples left over go into the next block, which has room for
them: none is dropped, none comes twice. Only lengths are looked at, never a token.
"""

import functools
from typing import NamedTuple

import numpy as np
from absl import logging
from jaxtyping import Int

from bertjax.data import hashing, pretrain
from bertjax.data.sampling import SamplingError

Batch = dict[str, np.ndarray]
Shapes = dict[str, tuple[tuple[int, ...], type[np.generic]]]

BLOCK_EXAMPLES = 2048
_SAMPLE_BLOCKS = 8
_MARGIN = 0.005  # of a block's rows, above the most that a sample of blocks needs
_TURN = 88  # purpose of the draw: order of the rows of a block


class Plan(NamedTuple):
  """A block's rows, as lists of example numbers, and the numbers that go into the next block."""

  rows: list[list[int]]
  left_over: list[int]


def pack(
    lengths: Int[np.ndarray, 'N'], capacity: int, most: int
) -> list[list[int]]:
  """Packs items into few rows: the longest first, each where it leaves the least room.

  Args:
    lengths: of the items, none above `capacity`.
    capacity: tokens of a row.
    most: items of a row at most.

  Returns:
    The items of each row, the fullest rows first.
  """
  rows: list[list[int]] = []
  open_rows: list[list[int]] = [[] for _ in range(capacity + 1)]  # by the room that they have
  some = 0  # bit i is set where there is an open row with room i
  for item in np.argsort(-lengths, kind='stable').tolist():
    length = int(lengths[item])
    fitting = some >> length
    if fitting:
      room = length + (fitting & -fitting).bit_length() - 1
      row = open_rows[room].pop()
      if not open_rows[room]:
        some &= ~(1 << room)
    else:
      row, room = len(rows), capacity
      rows.append([])
    rows[row].append(item)
    if len(rows[row]) < most:
      open_rows[room - length].append(row)
      some |= 1 << (room - length)
  return sorted(rows, key=lambda row: -int(lengths[row].sum()))


def batch_shapes(
    settings: pretrain.PretrainSettings, max_examples: int, batch_size: int
) -> Shapes:
  """Shape and type of each field of a batch of packed rows.

  Args:
    settings: of the examples.
    max_examples: of a row, E.
    batch_size: rows, B.
  """
  # Each example rounds its own number of predictions: half a slot more, at most, and at least 1.
  most = settings.seq_length * settings.masked_lm_prob + max_examples
  slots = min(8 * -(-int(most) // 8), max_examples * settings.num_predictions)
  tokens, predictions = (batch_size, settings.seq_length), (batch_size, slots)
  some = (batch_size, max_examples)
  return {
      'input_ids': (tokens, np.int32),
      'token_type_ids': (tokens, np.int32),
      'segment_ids': (tokens, np.int32),
      'position_ids': (tokens, np.int32),
      'masked_lm_positions': (predictions, np.int32),
      'masked_lm_ids': (predictions, np.int32),
      'masked_lm_weights': (predictions, np.float32),
      'cls_positions': (some, np.int32),
      'next_sentence_labels': (some, np.int32),
      'next_sentence_weights': (some, np.float32),
  }


class PackedStream:
  """Rows of packed examples, each a pure function of its number.

  Attributes:
    examples: the stream that the examples are from.
    max_examples: examples of a row at most, E.
    rows_per_block: R.
    examples_per_row: on average.
    real_tokens: share of the places that are no padding, in the sampled blocks.
  """

  def __init__(self, examples: pretrain.ExampleStream, max_examples: int = 8):
    """Works out how many rows a block has.

    Args:
      examples: training examples, not a held-out stream.
      max_examples: examples of a row at most.

    Raises:
      ValueError: max_examples below 1.
    """
    if max_examples < 1:
      raise ValueError(f'max_examples_per_row is {max_examples}; it must be at least 1')
    self.examples, self.max_examples = examples, max_examples
    settings = examples.settings
    sample = [self._pack_block(block) for block in range(_SAMPLE_BLOCKS)]
    needed = max(len(rows) for rows, _ in sample)
    self.rows_per_block = needed + max(1, round(_MARGIN * needed))
    self.examples_per_row = BLOCK_EXAMPLES / self.rows_per_block
    tokens = sum(int(lengths.sum()) for _, lengths in sample)
    self.real_tokens = tokens / (_SAMPLE_BLOCKS * self.rows_per_block * settings.seq_length)
    # A block's own rows are asked for twice: for its plan and for that of the next.
    self._own = functools.lru_cache(4)(self._make_own)
    self._plan = functools.lru_cache(4)(self._make_plan)
    logging.info(
        'packed: %.2f examples in a row of %d on average, at most %d; %.1f%% of the places are '
        'real tokens', self.examples_per_row, settings.seq_length, max_examples,
        100 * self.real_tokens)

  def row_examples(self, row: int) -> list[int]:
    """The numbers of the examples in a row of the run, in their order in the row."""
    block, place = divmod(row, self.rows_per_block)
    rows = self._plan(block)
    return rows[place] if place < len(rows) else []

  def batch(self, rows: Int[np.ndarray, 'B']) -> Batch:
    """The rows with the given numbers.

    Returns:
      input_ids, token_type_ids, segment_ids (1, 2, ... for the examples of a row, 0 for padding)
      and position_ids (from 0 in each example), int32 [B, T]; masked_lm_positions (ascending, in
      the row), masked_lm_ids int32 and masked_lm_weights float32 [B, P]; cls_positions int32,
      next_sentence_labels int32 and next_sentence_weights float32 [B, E].
    """
    contents = [self.row_examples(int(row)) for row in rows]
    numbers = np.array([number for content in contents for number in content], np.int64)
    counts = np.array([len(content) for content in contents])
    batch = {name: np.zeros(shape, dtype)
             for name, (shape, dtype) in self.batch_shapes(len(rows)).items()}
    batch['input_ids'][:] = self.examples.tokenizer.pad_id
    if len(numbers):
      _lay_out(batch, self.examples.batch(numbers), counts)
    return batch

  def batch_shapes(self, batch_size: int) -> Shapes:
    """Shape and type of each field of a batch of `batch_size` rows."""
    return batch_shapes(self.examples.settings, self.max_examples, batch_size)

  def _pack_block(self, block: int) -> tuple[list[list[int]], Int[np.ndarray, 'N']]:
    """The rows that a block needs by itself, and the lengths of its examples."""
    lengths = self.examples.lengths(block * BLOCK_EXAMPLES + np.arange(BLOCK_EXAMPLES))
    return pack(lengths, self.examples.settings.seq_length, self.max_examples), lengths

  def _make_own(self, block: int) -> Plan:
    """A block's rows, R at most; the emptiest of more are left over for the next block."""
    rows, _ = self._pack_block(block)
    first = block * BLOCK_EXAMPLES
    numbers = [[first + item for item in row] for row in rows]
    surplus = [number for row in numbers[self.rows_per_block:] for number in row]
    return Plan(numbers[:self.rows_per_block], sorted(surplus))

  def _make_plan(self, block: int) -> list[list[int]]:
    """A block's rows with what was left over of the one before, in shuffled order."""
    rows = [list(row) for row in self._own(block).rows]
    carried = self._own(block - 1).left_over if block else []
    rows += [[] for _ in range(self.rows_per_block - len(rows))]
    if carried:
      self._place(rows, carried, block)
    keys = hashing.fold(hashing.fold_int(self.examples.settings.seed, block), np.arange(len(rows)))
    order = np.argsort(hashing.bits(keys, _TURN), kind='stable')
    return [rows[place] for place in order]

  def _place(self, rows: list[list[int]], carried: list[int], block: int) -> None:
    """Puts each carried example into the row with the most room."""
    capacity = self.examples.settings.seq_length
    sizes = [int(self.examples.lengths(np.array(row, np.int64)).sum()) if row else 0
             for row in rows]
    for number, length in zip(carried, self.examples.lengths(np.array(carried)), strict=True):
      open_rows = [i for i, row in enumerate(rows) if len(row) < self.max_examples]
      row = min(open_rows, key=sizes.__getitem__, default=None)
      if row is None or sizes[row] + length > capacity:
        raise SamplingError(
            f'packing: block {block} has no room for what block {block - 1} left over; the lengths '
            'of examples change too much along the corpus. Train without packing')
      rows[row].append(number)
      sizes[row] += int(length)


def _lay_out(batch: Batch, examples: Batch, counts: Int[np.ndarray, 'B']) -> None:
  """Copies examples, one row each, into their places in the rows of `batch`."""
  lengths = examples['attention_mask'].sum(1)
  predicted = examples['masked_lm_weights'].sum(1).astype(np.int64)
  example = 0
  for row, count in enumerate(counts.tolist()):
    at, slot = 0, 0
    for number in range(count):
      length, slots = int(lengths[example]), int(predicted[example])
      here, there = slice(at, at + length), slice(slot, slot + slots)
      batch['input_ids'][row, here] = examples['input_ids'][example, :length]
      batch['token_type_ids'][row, here] = examples['token_type_ids'][example, :length]
      batch['segment_ids'][row, here] = number + 1
      batch['position_ids'][row, here] = np.arange(length)
      batch['masked_lm_positions'][row, there] = (
          examples['masked_lm_positions'][example, :slots] + at)
      batch['masked_lm_ids'][row, there] = examples['masked_lm_ids'][example, :slots]
      batch['masked_lm_weights'][row, there] = 1
      batch['cls_positions'][row, number] = at
      for name in ('next_sentence_labels', 'next_sentence_weights'):
        batch[name][row, number] = examples[name][example]
      at, slot, example = at + length, slot + slots, example + 1
