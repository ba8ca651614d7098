"""Several examples in a row, so that little of a batch is padding.

    numbers of a block ── ExampleStream.lengths ──> pack ──> rows of numbers ── lay_out ──> batch

Examples kN to kN + N - 1 of the run make up block k, which has R rows whatever its examples: row r
of the run is row r mod R of block r div R. So a row is a pure function of (manifest, settings, its
number), as an example is: a resume is a seek, and any number of processes makes the same batches.

N examples need a little more or fewer rows each time; R is what a sample of blocks needs, and a
margin. Examples are shuffled within a window of the epoch only (epochs.py), so where documents of
one kind lie together the need of blocks changes from window to window: the sample takes blocks of
several windows, and where these differ, R is above what any of them needs.

Where a block needs more than R rows, the examples left over are offered to the block behind it, and
what finds no room there to the one behind that, as far as REACH. To know a block's rows is to know
what up to REACH blocks before it left over, and no more. What finds no room at all is left out of
this epoch, and a warning says how many: as with the examples a walk gives beyond its block's slots,
others are left out in the next. No example comes twice. Only lengths are looked at, never a token.
"""

import functools
from typing import NamedTuple

import numpy as np
from absl import logging
from jaxtyping import Int

from bertjax.data import epochs, hashing, pretrain

Batch = dict[str, np.ndarray]
Shapes = dict[str, tuple[tuple[int, ...], type[np.generic]]]

BLOCK_EXAMPLES = 2048
_SAMPLE_BLOCKS = 8  # of the first window
_SAMPLE_WINDOWS = 8
_WINDOW_BLOCKS = 2  # of each other sampled window
_WINDOW_EXAMPLES = epochs.WINDOW * epochs.BLOCK_EXAMPLES  # about, and at most in a short epoch
_MARGIN = 0.005  # of a block's rows, above the most that a sample of blocks needs
# Means of blocks of windows that are alike spread by about 0.6 %, relative standard deviation.
_ALIKE = 0.015
_SPREADS = 3  # standard deviations above the windows' mean that hold what was not sampled as well
REACH = 8
_TURN = 88  # purpose of the draw: order of the rows of a block


class Plan(NamedTuple):
  """A block's R rows, as lists of example numbers, and numbers that have no place in them."""

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
    needs, tokens = self._sample()
    self.rows_per_block = _rows_for(needs)
    self.examples_per_row = BLOCK_EXAMPLES / self.rows_per_block
    self.real_tokens = tokens / (self.rows_per_block * settings.seq_length)
    # What the blocks before a block left over is asked for again by the next one.
    self._offer = functools.lru_cache((REACH + 1) * (REACH + 2))(self._make_offer)
    self._plan = functools.lru_cache(4)(self._make_plan)
    logging.info(
        'packed: %.2f examples in a row of %d on average, at most %d; %.1f%% of the places are '
        'real tokens', self.examples_per_row, settings.seq_length, max_examples,
        100 * self.real_tokens)

  def row_examples(self, row: int) -> list[int]:
    """The numbers of the examples in a row of the run, in their order in the row."""
    block, place = divmod(row, self.rows_per_block)
    return self._plan(block)[place]

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

  def _sample(self) -> tuple[list[list[int]], float]:
    """Of sampled windows, the first one first, the rows that blocks need; tokens of a block."""
    epoch = self.examples.num_examples
    # An epoch of a single window has the same documents in the window of every epoch.
    count = _SAMPLE_WINDOWS if epoch > _WINDOW_EXAMPLES else 1
    needs, tokens = [], []
    # The first comes last: its walks are then at hand when the run begins.
    for window in reversed(range(count)):
      # Each from another place of another epoch: a short epoch has few windows, and others next.
      start = (window * epoch + window * epoch // count) // BLOCK_EXAMPLES
      blocks = _WINDOW_BLOCKS if window else _SAMPLE_BLOCKS
      packed = [self._pack_block(start + block) for block in range(blocks)]
      needs.insert(0, [len(rows) for rows, _ in packed])
      tokens.append(np.mean([lengths.sum() for _, lengths in packed]))
    return needs, float(np.mean(tokens))

  def _pack_block(self, block: int) -> tuple[list[list[int]], Int[np.ndarray, 'N']]:
    """The rows that a block needs by itself, and the lengths of its examples."""
    lengths = self.examples.lengths(block * BLOCK_EXAMPLES + np.arange(BLOCK_EXAMPLES))
    return pack(lengths, self.examples.settings.seq_length, self.max_examples), lengths

  def _own(self, block: int) -> Plan:
    """A block by itself; the emptiest of more than R rows are left over."""
    if block < 0:
      return Plan([], [])
    rows, _ = self._pack_block(block)
    first = block * BLOCK_EXAMPLES
    numbers = [[first + item for item in row] for row in rows]
    surplus = [number for row in numbers[self.rows_per_block:] for number in row]
    numbers += [[] for _ in range(self.rows_per_block - len(rows))]
    return Plan(numbers[:self.rows_per_block], sorted(surplus))

  def _make_offer(self, block: int, steps: int) -> Plan:
    """What `block` left over is offered to the block so many steps behind it.

    Returns:
      The rows of that block, which has been offered what all between the two left over before; and
      what of `block` has found no room up to there.
    """
    if not steps:
      return self._own(block)
    carried, rows = self._offer(block, steps - 1).left_over, self._offer(block + 1, steps - 1).rows
    return self._place(rows, carried) if carried else Plan(rows, [])

  def _make_plan(self, block: int) -> list[list[int]]:
    """A block's rows with what those before it left over, in shuffled order."""
    rows, left_out = self._offer(block - REACH, REACH)
    if left_out:
      logging.warning(
          'packing: none of the %d blocks behind block %d has room for %d of its %d examples; they '
          'are left out of this epoch', REACH, block - REACH, len(left_out), BLOCK_EXAMPLES)
    keys = hashing.fold(hashing.fold_int(self.examples.settings.seed, block), np.arange(len(rows)))
    order = np.argsort(hashing.bits(keys, _TURN), kind='stable')
    return [rows[place] for place in order]

  def _place(self, rows: list[list[int]], carried: list[int]) -> Plan:
    """Puts each carried example into the row with the most room."""
    capacity = self.examples.settings.seq_length
    rows, left_over = [list(row) for row in rows], []
    lengths = self.examples.lengths(np.array([number for row in rows for number in row], np.int64))
    ends = np.cumsum([0, *map(len, rows)])
    sizes = np.diff(np.append(0, np.cumsum(lengths))[ends]).tolist()
    for number, length in zip(carried, self.examples.lengths(np.array(carried)), strict=True):
      open_rows = [i for i, row in enumerate(rows) if len(row) < self.max_examples]
      row = min(open_rows, key=sizes.__getitem__, default=None)
      if row is None or sizes[row] + length > capacity:
        left_over.append(number)
        continue
      rows[row].append(number)
      sizes[row] += int(length)
    return Plan(rows, left_over)


def _rows_for(needs: list[list[int]]) -> int:
  """The rows of a block, from those that sampled blocks of each window need, the first one first.

  Windows that are alike have the rows that the first one's blocks need.
  """
  means = np.array([np.mean(window) for window in needs])
  spread = float(means.std(ddof=1)) if len(means) > 1 else 0.0
  needed = max(needs[0])
  if spread > _ALIKE * means.mean():
    needed = max(*map(max, needs), round(means.mean() + _SPREADS * spread))
  return needed + max(1, round(_MARGIN * needed))


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
