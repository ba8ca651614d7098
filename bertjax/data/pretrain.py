"""Pre-training examples: shards in, masked rows out.

Example number i of a run is a pure function of (shards, settings, i): no iterator state, no shuffle
buffer. So a run resumes by seeking, any number of processes makes the same global batches, and an
example can be made again alone. Each epoch draws new pairs, new random partners and new masks.

The way of a batch: mixture.py says which corpus, epochs.py which walk and slot, sampling.py which
sentences; here their tokens are gathered and masking.py chooses what is predicted. pipeline.py
runs this ahead of the training step.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import logging
from jaxtyping import Int

from bertjax.data import epochs, hashing, masking, mixture, sampling, stream_statistics
from bertjax.data import shards as shards_lib

_MASK = 48  # purpose of the masking draws

Batch = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class PretrainSettings:
  """All that shapes an example, apart from the data.

  Attributes:
    seq_length: tokens per example, T.
    max_predictions_per_seq: most masked tokens per example, P; 0: as many as `masked_lm_prob` of
      the length makes (20 at 128, 77 at 512).
    masked_lm_prob: share of an example's tokens that is predicted.
    short_seq_prob: share of documents cut into shorter examples.
    next_sentence: 'nsp', 'sop' or 'none'; see sampling.py.
    whole_word_masking: mask words, not pieces.
    random_words: 'ordinary': a random replacement is never a special or unused entry;
      'vocabulary': any entry, as Google's code.
    seed: of every draw.
  """

  seq_length: int = 128
  max_predictions_per_seq: int = 0
  masked_lm_prob: float = 0.15
  short_seq_prob: float = 0.1
  next_sentence: str = 'nsp'
  whole_word_masking: bool = False
  random_words: str = 'ordinary'
  seed: int = 0

  def __post_init__(self):
    """Refuses impossible settings.

    Raises:
      ValueError: naming the setting and what it may be.
    """
    if self.next_sentence not in sampling.TASKS:
      raise ValueError(
          f"next_sentence is '{self.next_sentence}'; it must be one of {', '.join(sampling.TASKS)}"
      )
    if self.random_words not in ('ordinary', 'vocabulary'):
      raise ValueError(
          f"random_words is '{self.random_words}'; it must be 'ordinary' or 'vocabulary'"
      )
    shortest = 3 if self.next_sentence == 'none' else 5
    if not shortest <= self.seq_length <= 65536:
      raise ValueError(f'seq_length is {self.seq_length}; it must be {shortest} to 65536')
    if not 0 < self.masked_lm_prob <= 1:
      raise ValueError(f'masked_lm_prob is {self.masked_lm_prob}; it must be above 0, at most 1')
    if not 0 <= self.short_seq_prob <= 1:
      raise ValueError(f'short_seq_prob is {self.short_seq_prob}; it must be 0 to 1')
    if not 0 <= self.max_predictions_per_seq <= self.seq_length:
      raise ValueError(
          f'max_predictions_per_seq is {self.max_predictions_per_seq}; it must be 0 (derived) to '
          f'seq_length {self.seq_length}'
      )
    if self.seed < 0:
      raise ValueError(f'seed is {self.seed}; it must not be negative')

  @property
  def num_predictions(self) -> int:
    """P: `max_predictions_per_seq`, or derived from the length where that is 0."""
    return self.max_predictions_per_seq or max(1, _round_up(self.seq_length * self.masked_lm_prob))


def _round_up(x: float) -> int:
  return int(np.ceil(np.round(x, 9)))  # 0.15 * 20 is a little above 3


class ExampleStream:
  """Examples of one or several corpora, each a pure function of its number.

  Attributes:
    settings: the settings it was made with.
    tokenizer: the tokenizer it was made with.
    rule: the task and the length, as sampling.py takes them.
    samplers: of each corpus, the one that turns numbers into rows of sampling.EXAMPLE.
    with_borders: of each corpus, whether borders of words were given with its text.
    num_examples: examples per epoch. With several corpora the sum of theirs; each runs through its
      own epochs at the pace its weight gives. For held-out data: exactly all there are.
    statistics: mean length, padding and share of random pairs as they turn out, from a sample.
  """

  def __init__(
      self,
      sources: shards_lib.Split | Sequence[shards_lib.Split],
      tokenizer: Any,
      settings: PretrainSettings,
      *,
      weights: Sequence[float] | None = None,
      sampling_exponent: float = 1.0,
      heldout: bool = False,
      max_examples: int | None = None,
  ):
    """Checks the corpora against the task and works out the size of an epoch.

    Args:
      sources: a split, or one per corpus. A random partner comes from the same corpus.
      tokenizer: gives cls_id, sep_id, mask_id, pad_id, ordinary_ids, continuation and vocab_size
        (bertjax.data.tokenizer.Tokenizer).
      settings: see PretrainSettings.
      weights: share of each corpus in the stream; None: by size ** sampling_exponent.
      sampling_exponent: see mixture.sampling_weights.
      heldout: every example of one walk exactly once, in place of shuffled epochs.
      max_examples: with `heldout`, a fixed random choice of so many.

    Raises:
      sampling.SamplingError: if the task cannot be trained on one of the corpora.
      ValueError: if the weights do not fit the corpora.
    """
    splits = [sources] if isinstance(sources, shards_lib.Split) else list(sources)
    if weights is not None and len(weights) != len(splits):
      raise ValueError(f'{len(weights)} mixture weights for {len(splits)} corpora')
    self.settings, self.tokenizer = settings, tokenizer
    self.rule = sampling.Rule(settings.next_sentence, settings.seq_length, settings.short_seq_prob)
    self.with_borders = [all(s.words is not None for s in split.shards) for split in splits]
    self._corpora = [sampling.Corpus(split) for split in splits]
    self._masking = _masking_rule(tokenizer, settings)
    self._continuation = np.asarray(tokenizer.continuation, bool)
    self.samplers = _make_samplers(self._corpora, self.rule, settings.seed, heldout, max_examples)
    sizes = shares = [sampler.num_examples for sampler in self.samplers]
    self.num_examples, self._ends = sum(sizes), np.cumsum(sizes)
    self._mixture = None
    if not heldout:
      shares = weights or mixture.sampling_weights(sizes, sampling_exponent)
      self._mixture = mixture.Mixture(shares, settings.seed)
    self.statistics = stream_statistics.measure(
        self._corpora, self.rule, shares, settings.seed
    )
    for split in splits:
      shards_lib.release_pages(split)
    _log_choices(self, heldout)

  def batch(self, indices: Int[np.ndarray, 'b']) -> Batch:
    """The examples with the given numbers.

    Args:
      indices: B numbers, in any order; from 0 without bound, or for held-out data below
        `num_examples`.

    Returns:
      input_ids, token_type_ids, attention_mask int32 [B, T]; masked_lm_positions (ascending),
      masked_lm_ids int32 and masked_lm_weights float32 [B, P]; next_sentence_labels int32 [B];
      next_sentence_weights float32 [B].

    Raises:
      IndexError: for a number that does not exist.
    """
    rows, corpus = self._locate(indices.astype(np.int64))
    if len(self._corpora) == 1:
      parts = sampling.resolve(self._corpora[0], rows, self.rule)
      return self._assemble(parts, rows['key'], corpus)
    parts = [np.empty(0)] * len(sampling.Parts._fields)
    for c in np.unique(corpus).tolist():
      here = corpus == c
      some = sampling.resolve(self._corpora[c], rows[here], self.rule)
      for field, values in enumerate(some):
        if not parts[field].size:
          parts[field] = np.empty(len(rows), values.dtype)
        parts[field][here] = values
    return self._assemble(sampling.Parts(*parts), rows['key'], corpus)

  def batch_shapes(self, batch_size: int) -> dict[str, tuple[tuple[int, ...], type[np.generic]]]:
    """Shape and type of each field of a batch of `batch_size` examples."""
    return batch_shapes(self.settings, batch_size)

  def lengths(self, indices: Int[np.ndarray, 'b']) -> Int[np.ndarray, 'b']:
    """Tokens of each example, special ones included, without making it.

    Raises:
      IndexError: for a number that does not exist.
    """
    rows, corpus = self._locate(indices.astype(np.int64))
    lengths = np.empty(len(rows), np.int64)
    for c in np.unique(corpus).tolist():
      here = corpus == c
      parts = sampling.resolve(self._corpora[c], rows[here], self.rule)
      lengths[here] = parts.len_a.astype(np.int64) + parts.len_b + 2 + (parts.len_b > 0)
    return lengths

  def _locate(self, index):
    """Rows of sampling.EXAMPLE, and the corpus of each."""
    if index.size and (index.min() < 0 or not self._mixture and index.max() >= self.num_examples):
      raise IndexError(f'examples {index.min()} to {index.max()} of {self.num_examples}')
    if self._mixture:
      corpus, number = self._mixture.locate(index)
    else:
      corpus = np.searchsorted(self._ends, index, 'right')
      number = index - np.concatenate([[0], self._ends])[corpus]
    rows = np.empty(len(index), sampling.EXAMPLE)
    for c in np.unique(corpus).tolist():
      here = corpus == c
      rows[here] = self.samplers[c].examples(number[here])
    return rows, corpus

  def _assemble(self, parts, keys, corpus):
    """Gathers tokens, adds [CLS] and [SEP], masks."""
    settings, tokenizer = self.settings, self.tokenizer
    b, t = len(keys), settings.seq_length
    input_ids = np.full((b, t), tokenizer.pad_id, np.int32)
    word_starts = np.zeros((b, t), bool) if settings.whole_word_masking else None
    self._gather(parts, corpus, input_ids, word_starts)
    len_a, len_b = parts.len_a.astype(np.int32), parts.len_b.astype(np.int32)
    two = len_b > 0
    length = len_a + len_b + 2 + two
    row, column = np.arange(b), np.arange(t, dtype=np.int32)
    real = column < length[:, None]
    candidates = real.copy()
    input_ids[:, 0], candidates[:, 0] = tokenizer.cls_id, False
    for end in (len_a + 1, length - 1):
      input_ids[row, end], candidates[row, end] = tokenizer.sep_id, False
    in_b = real & (column > (len_a + 1)[:, None])
    positions, ids, weights = masking.mask_tokens(
        input_ids, candidates, length, hashing.bits(keys, _MASK), self._masking, word_starts
    )
    return {
        'input_ids': input_ids,
        'token_type_ids': in_b.astype(np.int32),
        'attention_mask': real.astype(np.int32),
        'masked_lm_positions': positions,
        'masked_lm_ids': ids,
        'masked_lm_weights': weights,
        'next_sentence_labels': parts.label.astype(np.int32),
        'next_sentence_weights': parts.labelled.astype(np.float32),
    }

  def _gather(self, parts, corpus, input_ids, word_starts):
    """Copies each part's tokens into its row; a slice at a time is the fastest in numpy."""
    t = input_ids.shape[1]
    flat = input_ids.ravel()
    fields = zip(
        corpus.tolist(), parts.shard_a.tolist(), parts.begin_a.tolist(), parts.len_a.tolist(),
        parts.shard_b.tolist(), parts.begin_b.tolist(), parts.len_b.tolist(), strict=True,
    )
    for row, (c, shard_a, begin_a, len_a, shard_b, begin_b, len_b) in enumerate(fields):
      tokens = self._corpora[c].tokens
      at = row * t + 1
      flat[at : at + len_a] = tokens[shard_a][begin_a : begin_a + len_a]
      at += len_a + 1
      flat[at : at + len_b] = tokens[shard_b][begin_b : begin_b + len_b]
      if word_starts is not None and self.with_borders[c]:
        shards = self._corpora[c].shards
        word_starts[row, 1 : 1 + len_a] = shards[shard_a].word_starts(
            np.arange(begin_a, begin_a + len_a)
        )
        word_starts[row, 2 + len_a : 2 + len_a + len_b] = shards[shard_b].word_starts(
            np.arange(begin_b, begin_b + len_b)
        )
    if word_starts is not None and not all(self.with_borders):
      rows = ~np.asarray(self.with_borders)[corpus]
      word_starts[rows] = ~self._continuation[input_ids[rows]]


def _masking_rule(tokenizer: Any, settings: PretrainSettings) -> masking.MaskingRule:
  words = np.arange(tokenizer.vocab_size, dtype=np.int32)
  if settings.random_words == 'ordinary':
    words = np.asarray(tokenizer.ordinary_ids, np.int32)
  return masking.MaskingRule(
      mask_id=tokenizer.mask_id, random_words=words, max_predictions=settings.num_predictions,
      masked_lm_prob=settings.masked_lm_prob, whole_words=settings.whole_word_masking,
  )


def _make_samplers(
    corpora: list[sampling.Corpus], rule: sampling.Rule, seed: int, heldout: bool,
    max_examples: int | None,
) -> list[epochs.Epochs] | list[epochs.Enumeration]:
  """Of each corpus: its epochs, or (held out) one walk of at most its share of `max_examples`."""
  seeds = [hashing.fold_int(seed, c) for c in range(len(corpora))]
  if not heldout:
    return [epochs.Epochs(c, rule, s) for c, s in zip(corpora, seeds, strict=True)]
  limits = _shares([corpus.num_tokens for corpus in corpora], max_examples)
  return [
      epochs.Enumeration(corpus, rule, s, limit)
      for corpus, s, limit in zip(corpora, seeds, limits, strict=True)
  ]


def _shares(sizes: Sequence[int], total: int | None) -> list[int | None]:
  """Divides a number of examples among corpora by size, at least one each."""
  if total is None:
    return [None] * len(sizes)
  return [max(1, round(total * size / sum(sizes))) for size in sizes]


def _log_choices(stream: ExampleStream, heldout: bool) -> None:
  """Says once what was chosen, how it turns out, and what a user might not expect."""
  settings = stream.settings
  logging.info(
      'next_sentence=%s: %d examples of length %d per %s, at most %d masked tokens each; %s',
      settings.next_sentence, stream.num_examples, settings.seq_length,
      'evaluation' if heldout else 'epoch', settings.num_predictions,
      stream_statistics.in_words(stream.statistics, settings.next_sentence),
  )
  if not heldout:
    stream_statistics.log_long_sentences(stream.statistics, stream.rule)
  if settings.whole_word_masking and not all(stream.with_borders):
    logging.info(
        'whole-word masking with no word borders in the data: words are what the vocabulary\'s '
        'continuation pieces make; without such pieces each token, as each ideograph, is a word'
    )
  wanted = settings.seq_length * settings.masked_lm_prob
  if settings.num_predictions < int(wanted):
    logging.warning(
        'max_predictions_per_seq=%d is less than masked_lm_prob * seq_length = %.1f: full examples '
        'have %.1f%% of their tokens predicted; max_predictions_per_seq=0 derives it from the '
        'length', settings.num_predictions, wanted,
        100 * settings.num_predictions / settings.seq_length,
    )


# --- Batches ---------------------------------------------------------------------------------


def batch_shapes(
    settings: PretrainSettings, batch_size: int
) -> dict[str, tuple[tuple[int, ...], type[np.generic]]]:
  """Shape and type of each field of a batch of `batch_size` examples."""
  b, t, p = batch_size, settings.seq_length, settings.num_predictions
  return {
      'input_ids': ((b, t), np.int32),
      'token_type_ids': ((b, t), np.int32),
      'attention_mask': ((b, t), np.int32),
      'masked_lm_positions': ((b, p), np.int32),
      'masked_lm_ids': ((b, p), np.int32),
      'masked_lm_weights': ((b, p), np.float32),
      'next_sentence_labels': ((b,), np.int32),
      'next_sentence_weights': ((b,), np.float32),
  }
