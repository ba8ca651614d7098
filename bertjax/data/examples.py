"""Encoded examples of a fine-tuning task, and the batches of few static shapes they travel in.

    Examples ── choose_lengths ──> lengths of rows ── plan_epoch ──> groups of examples
             ── make_batch ──> arrays of few shapes

A batch of step s is a pure function of (examples, settings, seed, s): a resume is a seek, every
process makes the same plan and takes its own rows of it, and no example is left out: what a length
class has too little for a batch moves up to the next one, and only the last batch of an epoch is
filled up, with rows of weight 0.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from bertjax.data import hashing
from bertjax.data.encoding import Tokenizer

Batch = dict[str, np.ndarray]
_SHORTEST = 8  # of lengths that are chosen
_MOST_LENGTHS = 6
_LEAST_SAVED = 8  # steps of the run, by one more length: about what its compilation takes
_ORDER, _TURN = 80, 81  # purposes of the draws: order of the examples, turn of the batches


@dataclasses.dataclass(frozen=True)
class Examples:
  """N examples of a split.

  Attributes:
    tokens: fields whose last axis is tokens, an array for each example: `input_ids`,
      `token_type_ids` and `attention_mask`, all of one shape within an example ([L], or [C, L] for
      C choices), and for tagging `labels` and `label_weights`. Padded to the batch's length.
    values: fields of fixed size, [N, ...]: `labels`, `start_positions`, ...
    pad_id: what input_ids are padded with; every other field with 0.
  """

  tokens: Mapping[str, Sequence[np.ndarray]]
  values: Mapping[str, np.ndarray]
  pad_id: int = 0

  def __len__(self) -> int:
    return len(self.tokens['input_ids'])

  @property
  def has_pairs(self) -> bool:
    """Whether any has a second segment."""
    return any(row.any() for row in self.tokens['token_type_ids'])

  @functools.cached_property
  def lengths(self) -> Int[np.ndarray, 'N']:
    """Tokens of each example (of its longest choice)."""
    return np.array([row.shape[-1] for row in self.tokens['input_ids']], np.int32)


class Group(NamedTuple):
  """The examples of one batch.

  Attributes:
    length: tokens of its rows.
    indices: which examples; fewer than the batch size in the last batch only.
  """

  length: int
  indices: Int[np.ndarray, 'b']


def truncate_pair(
    first: Int[np.ndarray, 'A'], second: Int[np.ndarray, 'B'], room: int
) -> tuple[Int[np.ndarray, '_'], Int[np.ndarray, '_']]:
  """Cuts a pair to `room` tokens from the end of the longer side; a tie cuts the second.

  Source: google-research/bert run_classifier.py, _truncate_seq_pair.
  """
  over = len(first) + len(second) - room
  if over <= 0:
    return first, second
  # The longer one is cut until both are equally long, then both in turn, the second first.
  cut_first = min(over, max(0, len(first) - len(second)))
  cut_second = min(over, max(0, len(second) - len(first)))
  rest = over - cut_first - cut_second
  cut_first, cut_second = cut_first + rest // 2, cut_second + rest - rest // 2
  return first[:len(first) - cut_first], second[:len(second) - cut_second]


def join(
    tokenizer: Tokenizer, first: Int[np.ndarray, 'A'], second: Int[np.ndarray, 'B'] | None,
    max_length: int,
) -> dict[str, Int[np.ndarray, 'L']]:
  """[CLS] first [SEP], or [CLS] first [SEP] second [SEP], cut to max_length tokens.

  An empty second text is still a pair, as in Google's code (Transformers takes it for a single).

  Returns:
    input_ids, token_type_ids and attention_mask.
  """
  if second is None:
    first = first[:max_length - 2]
    ids = [[tokenizer.cls_id], first, [tokenizer.sep_id]]
    types = np.zeros(len(first) + 2, np.int32)
  else:
    first, second = truncate_pair(first, second, max_length - 3)
    ids = [[tokenizer.cls_id], first, [tokenizer.sep_id], second, [tokenizer.sep_id]]
    types = np.repeat(np.array([0, 1], np.int32), [len(first) + 2, len(second) + 1])
  ids = np.concatenate(ids).astype(np.int32)
  return {'input_ids': ids, 'token_type_ids': types, 'attention_mask': np.ones_like(ids)}


def choose_lengths(
    lengths: Int[np.ndarray, 'N'], longest: int, num_batches: int, multiple: int = 4
) -> tuple[int, ...]:
  """The few lengths of rows that leave the least padding.

  Each length is compiled: one more is taken only while it saves more than that.

  Args:
    lengths: tokens of each example, at most `longest`.
    longest: the last of the lengths, whether or not an example needs it: what is judged or
      predicted later is cut to it.
    num_batches: of the whole run.
    multiple: what divides all of them, but perhaps `longest`.

  Returns:
    Ascending lengths, the last of them `longest`.
  """
  if not len(lengths):
    return (longest,)
  rounded = np.clip(-(-lengths // multiple) * multiple, _SHORTEST, longest)
  ends, counts = np.unique(rounded, return_counts=True)
  until = np.cumsum(counts)
  # places[j]: of the examples up to ends[j], with the lengths so far; froms: the length before it.
  between = np.where(np.tri(len(ends), k=-1, dtype=bool), until[:, None] - until, np.inf)
  places, froms = until * ends, []
  for _ in range(_MOST_LENGTHS - 1):
    added = places + between * ends[:, None]
    fewer = np.minimum(added.min(1), places)
    if (1 - fewer[-1] / places[-1]) * num_batches < _LEAST_SAVED:
      break
    froms.append(added.argmin(1))
    places = fewer
  chosen = [len(ends) - 1]
  for last in reversed(froms):
    chosen.append(int(last[chosen[-1]]))
  return tuple(sorted({*(int(ends[number]) for number in chosen), longest}))


def plan_epoch(
    lengths: Int[np.ndarray, 'N'], buckets: Sequence[int], batch_size: int, seed: int = 0,
    epoch: int | None = 0,
) -> list[Group]:
  """Puts every example into one batch of rows of a few lengths.

  Args:
    lengths: tokens of each example, at most buckets[-1].
    buckets: the lengths of rows, ascending.
    batch_size: examples of a batch.
    seed: of the order.
    epoch: another order for each; None keeps the examples' order within a length (evaluation).

  Returns:
    ceil(N / batch_size) groups, all full but for one. How many there are of each length does not
    depend on seed and epoch, so that neither does what is compiled.

  Raises:
    ValueError: an example is longer than the longest bucket.
  """
  if len(lengths) and lengths.max() > buckets[-1]:
    raise ValueError(f'an example of {lengths.max()} tokens is longer than the longest rows, '
                     f'{buckets[-1]}; cut the examples, or raise seq_lengths')
  order = np.arange(len(lengths))
  if epoch is not None:
    keys = hashing.fold(hashing.fold_int(seed, epoch), order)
    order = np.argsort(hashing.bits(keys, _ORDER), kind='stable')
  bucket_of = np.searchsorted(buckets, lengths[order])
  groups, carried = [], np.empty(0, np.int64)
  used = [number for number in range(len(buckets)) if (bucket_of == number).any()]
  for number in used:
    here = np.concatenate([carried, order[bucket_of == number]])
    full = len(here) if number == used[-1] else len(here) // batch_size * batch_size
    groups += [Group(buckets[number], here[i:i + batch_size]) for i in range(0, full, batch_size)]
    carried = here[full:]
  if epoch is not None:
    keys = hashing.fold(hashing.fold_int(seed, epoch), np.arange(len(groups)))
    turns = np.argsort(hashing.bits(keys, _TURN), kind='stable')
    groups = [groups[turn] for turn in turns]
  return groups


def make_batch(
    examples: Examples, group: Group, batch_size: int,
    own_rows: Int[np.ndarray, 'b'] | None = None,
) -> Batch:
  """The arrays of a group.

  Args:
    examples: where they are from.
    group: at most `batch_size` of them.
    batch_size: rows of the global batch; those beyond the group are fillers, empty and of weight 0.
    own_rows: which of the rows are wanted (sharding.own_rows), ascending; None: all.

  Returns:
    The fields of `examples`, tokens padded to the group's length, and `weights` [b] float32.
  """
  wanted = np.arange(batch_size) if own_rows is None else own_rows
  indices = group.indices[wanted[wanted < len(group.indices)]]
  batch = {}
  for name, arrays in examples.tokens.items():
    like = arrays[0]
    padding = examples.pad_id if name == 'input_ids' else 0
    field = np.full((len(wanted), *like.shape[:-1], group.length), padding, like.dtype)
    for row, index in enumerate(indices):
      field[row, ..., :arrays[index].shape[-1]] = arrays[index]
    batch[name] = field
  for name, values in examples.values.items():
    field = np.zeros((len(wanted), *values.shape[1:]), values.dtype)
    field[:len(indices)] = values[indices]
    batch[name] = field
  batch['weights'] = (np.arange(len(wanted)) < len(indices)).astype(np.float32)
  return batch


def batch_shapes(
    examples: Examples, length: int, batch_size: int
) -> dict[str, tuple[tuple[int, ...], type[np.generic]]]:
  """Shape and type of each field of a global batch with rows of that length."""
  shapes = {name: ((batch_size, *arrays[0].shape[:-1], length), arrays[0].dtype.type)
            for name, arrays in examples.tokens.items()}
  shapes |= {name: ((batch_size, *values.shape[1:]), values.dtype.type)
             for name, values in examples.values.items()}
  return shapes | {'weights': ((batch_size,), np.float32)}


class EpochBatches:
  """Training batches, epoch after epoch; batch s is a pure function of s (a job.Stream).

  Attributes:
    shapes: of the lengths that occur.
    steps_per_epoch: batches of an epoch.
    examples_per_row: 1.
    mean_length: of the rows, padding included.
    statistics: number of examples, share of padding, and how many batches there are of each length.
  """

  examples_per_row = 1.0

  def __init__(
      self, examples: Examples, buckets: Sequence[int], batch_size: int, seed: int,
      own_rows: Int[np.ndarray, 'b'] | None = None,
  ):
    self._examples, self._buckets, self._batch_size = examples, tuple(buckets), batch_size
    self._seed, self._own_rows = seed, own_rows
    plan = self._plan(0)
    self.steps_per_epoch = len(plan)
    lengths = sorted({group.length for group in plan})
    self.shapes = tuple(batch_shapes(examples, length, batch_size) for length in lengths)
    self.mean_length = sum(group.length for group in plan) / len(plan)
    # Of every choice: the shorter ones of an example are padded as well.
    tokens = sum(int(mask.sum()) for mask in examples.tokens['attention_mask'])
    choices = int(np.prod(examples.tokens['input_ids'][0].shape[:-1]))
    places = self.mean_length * len(plan) * batch_size * choices
    self.statistics = {'examples': len(examples), 'padding': 1 - tokens / places} | {
        f'batches_of_length_{length}': sum(group.length == length for group in plan)
        for length in lengths}

  def batches(self, first: int, num_steps: int) -> Iterator[Batch]:
    """This process's rows of `num_steps` batches from step `first` on."""
    plan, planned = None, None
    for step in range(first, first + num_steps):
      epoch, number = divmod(step, self.steps_per_epoch)
      if epoch != planned:
        plan, planned = self._plan(epoch), epoch
      yield make_batch(self._examples, plan[number], self._batch_size, self._own_rows)

  def _plan(self, epoch: int) -> list[Group]:
    return plan_epoch(
        self._examples.lengths, self._buckets, self._batch_size, self._seed, epoch)
