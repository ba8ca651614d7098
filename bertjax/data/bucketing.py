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

import dataclasses
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
  """A batch: the length of its rows, the numbers of its examples, and the tokens of them all."""

  seq_length: int
  numbers: Int[np.ndarray, 'B']
  tokens: int


def check(seq_lengths: Sequence[int], longest: int) -> None:
  """Refuses lengths of rows that do not fit examples of at most `longest` tokens.

  Raises:
    ValueError: they do not ascend from 8 or more to `longest`.
  """
  if (list(seq_lengths) != sorted(set(seq_lengths)) or seq_lengths[0] < 8
      or seq_lengths[-1] != longest):
    raise ValueError(f'seq_lengths is {tuple(seq_lengths)}; give ascending lengths of at least 8, '
                     f'the last of them the seq_length, {longest}')


def num_predictions(settings: PretrainSettings, seq_length: int) -> int:
  """The slots for predictions of rows of a length, not above the settings' own."""
  if seq_length == settings.seq_length:
    return settings.num_predictions
  shorter = dataclasses.replace(settings, seq_length=seq_length, max_predictions_per_seq=0)
  return min(settings.num_predictions, shorter.num_predictions)


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
      ValueError: see `check`.
    """
    check(seq_lengths, examples.settings.seq_length)
    self.examples, self.seq_lengths, self.batch_size = examples, tuple(seq_lengths), batch_size
    self._block_batches = int(np.clip(_BLOCK_EXAMPLES // batch_size, *_BLOCK_BATCHES))
    self._plan = functools.lru_cache(2)(self._make_plan)
    # The first block comes last: its plan is then at hand when the run begins.
    sample = [group for block in reversed(range(_SAMPLE_BLOCKS)) for group in self._plan(block)]
    found = np.array([group.seq_length for group in sample])
    self.shares = {length: float((found == length).mean()) for length in seq_lengths}
    self.mean_length = float(found.mean())
    self.real_tokens = float(sum(group.tokens for group in sample) / (found.sum() * batch_size))
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
    length, numbers, _ = self.group(step)
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
    sizes = lengths[order]
    rows = np.array(self.seq_lengths)[np.searchsorted(self.seq_lengths, sizes.max(1))]
    keys = hashing.fold(
        hashing.fold_int(self.examples.settings.seed, block), np.arange(self._block_batches))
    turns = np.argsort(hashing.bits(keys, _ORDER), kind='stable')
    return [Group(int(rows[turn]), numbers[order[turn]], int(sizes[turn].sum())) for turn in turns]
