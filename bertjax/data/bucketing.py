"""Batches of rows of a few lengths: less padding than rows of one length, simpler than packing.

    numbers of a block ── ExampleStream.lengths ──> plan ──> (length, numbers) of a batch ──> cut

The examples of some batches next to each other make up a block. In it they are put into batches by
length, and each batch has rows of the shortest length that holds its longest example. Every example
of the block is in one of its batches, so there are as many batches as without this; which rows a
batch has is a pure function of (manifest, settings, its number): a resume is a seek, and any number
of processes makes the same batches.

What it changes: the examples of a batch are of about one length, and as a batch's loss is the mean
over its predictions, those of a batch of short examples weigh a little more. Packing changes
neither (packing.py).
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from absl import logging
from jaxtyping import Int

from bertjax.data import hashing, pretrain
from bertjax.data.pretrain import Batch, PretrainSettings

Shapes = dict[str, tuple[tuple[int | None, ...], type[np.generic]]]

_BLOCK_BATCHES = (4, 64)  # at least, at most
_BLOCK_EXAMPLES = 2**15  # about, in between
_SAMPLE_BLOCKS = 4
_ORDER = 89  # purpose of the draw: order of the batches of a block
_TOKENS = ('input_ids', 'token_type_ids', 'attention_mask')
_PREDICTIONS = ('masked_lm_positions', 'masked_lm_ids', 'masked_lm_weights')


class Group(NamedTuple):
  """A batch: the length of its rows and the numbers of its examples."""

  seq_length: int
  numbers: Int[np.ndarray, 'B']


def num_predictions(settings: PretrainSettings, seq_length: int) -> int:
  """The slots for predictions of rows of a length, not above the settings' own."""
  derived = PretrainSettings(seq_length=seq_length, masked_lm_prob=settings.masked_lm_prob)
  return min(settings.num_predictions, derived.num_predictions)


class BucketedStream:
  """The examples of a stream as batches of rows of a few lengths.

  Attributes:
    examples: the stream that the examples are from.
    seq_lengths: ascending; the last is the examples' own.
    batch_size: rows of a global batch, B.
    shares: of each length, how many of the batches have it, in the sampled blocks.
    mean_length: of the rows, in the sampled blocks.
    real_tokens: share of the places that are no padding, in the sampled blocks.
  """

  def __init__(
      self, examples: pretrain.ExampleStream, seq_lengths: Sequence[int], batch_size: int
  ):
    """Measures how many batches there are of each length.

    Args:
      examples: training examples, not a held-out stream.
      seq_lengths: of rows; the step is compiled once for each.
      batch_size: rows of a global batch.

    Raises:
      ValueError: lengths that do not ascend to the examples' own.
    """
    longest = examples.settings.seq_length
    if list(seq_lengths) != sorted(set(seq_lengths)) or seq_lengths[-1] != longest:
      raise ValueError(f'seq_lengths {tuple(seq_lengths)} must ascend and end in the seq_length, '
                       f'{longest}')
    self.examples, self.seq_lengths, self.batch_size = examples, tuple(seq_lengths), batch_size
    self._block_batches = int(np.clip(_BLOCK_EXAMPLES // batch_size, *_BLOCK_BATCHES))
    self._plan = functools.lru_cache(2)(self._make_plan)
    sample = [group for block in range(_SAMPLE_BLOCKS) for group in self._make_plan(block)]
    found = np.array([group.seq_length for group in sample])
    self.shares = {length: float((found == length).mean()) for length in seq_lengths}
    self.mean_length = float(found.mean())
    tokens = sum(int(examples.lengths(group.numbers).sum()) for group in sample)
    self.real_tokens = tokens / (found.sum() * batch_size)
    logging.info(
        'bucketed: %s of the batches; %.1f%% of the places are real tokens',
        ', '.join(f'rows of {length} in {share:.0%}' for length, share in self.shares.items()),
        100 * self.real_tokens)

  def group(self, step: int) -> Group:
    """What the batch of a step is made of."""
    block, place = divmod(step, self._block_batches)
    return self._plan(block)[place]

  def batch(self, indices: Int[np.ndarray, 'b']) -> Batch:
    """Rows of one batch.

    Args:
      indices: numbers sB to sB + B - 1 are the rows of batch s.

    Returns:
      As ExampleStream.batch, the rows and the predictions cut to the batch's length.
    """
    step = int(indices[0]) // self.batch_size
    length, numbers = self.group(step)
    batch = self.examples.batch(numbers[indices - step * self.batch_size])
    predictions = num_predictions(self.examples.settings, length)
    ends = dict.fromkeys(_TOKENS, length) | dict.fromkeys(_PREDICTIONS, predictions)
    return {name: array[:, :ends[name]] if name in ends else array
            for name, array in batch.items()}

  def batch_shapes(self, batch_size: int, seq_length: int | None = None) -> Shapes:
    """Shape and type of each field of `batch_size` rows; None is what differs between batches."""
    predictions = seq_length and num_predictions(self.examples.settings, seq_length)
    ends = dict.fromkeys(_TOKENS, seq_length) | dict.fromkeys(_PREDICTIONS, predictions)
    return {name: ((batch_size, ends[name]) if name in ends else shape, dtype)
            for name, (shape, dtype) in self.examples.batch_shapes(batch_size).items()}

  def _make_plan(self, block: int) -> list[Group]:
    """The batches of a block, in shuffled order."""
    size = self._block_batches * self.batch_size
    numbers = block * size + np.arange(size)
    lengths = self.examples.lengths(numbers)
    order = np.argsort(lengths, kind='stable').reshape(self._block_batches, self.batch_size)
    longest = lengths[order].max(1)
    rows = np.array(self.seq_lengths)[np.searchsorted(self.seq_lengths, longest)]
    keys = hashing.fold(
        hashing.fold_int(self.examples.settings.seed, block), np.arange(self._block_batches))
    turns = np.argsort(hashing.bits(keys, _ORDER), kind='stable')
    return [Group(int(rows[turn]), numbers[order[turn]]) for turn in turns]
