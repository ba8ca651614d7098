"""From the number of an example to the example: epochs without planning an epoch.

A training corpus is cut into *blocks* of consecutive documents. The examples of a block in an
epoch come from one walk through its documents (`sampling.traverse`), made when the first of them
is asked for and kept in a small cache. How many examples a walk gives is random, so that nobody
could say where example i lies without walking through everything before it. Therefore each block
has a fixed number of *slots*, its expected number of examples, estimated once at the start from
document lengths (a pure function of corpus and settings). If a walk gives more examples than there
are slots, a random subset of them is used in this epoch; if it gives fewer, the rest comes from a
second walk with its own key. So i -> (epoch, block, slot) is arithmetic.

What follows from that: an epoch is Google's pass over the data up to the spread of the walk. A walk
varies by a few per cent around its expectation (more where a block is a few long documents, since
one document in ten is cut to a shorter target), so in any one epoch a few per cent of a block's
examples are left out or come from a second walk, others in every epoch.

Shuffling: the order of blocks is permuted per epoch. WINDOW blocks next to each other in that order
form a window, within which examples are permuted by a bijection that needs no memory. So a batch is
drawn from about WINDOW * BLOCK_EXAMPLES examples of documents from WINDOW places of the corpus.
"""

import functools
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int64, Shaped

from bertjax.data import hashing, sampling

BLOCK_EXAMPLES = 16384
WINDOW = 8

# Draws per epoch or per block.
_ORDER, _WINDOW_ORDER, _WALK, _CALIBRATION, _SAMPLE = range(16, 21)

# The sample from which a block's number of examples is estimated: all documents of a small block,
# otherwise runs of neighbours (a run costs about as many page reads as one document).
_SAMPLE_RUNS = 4
_RUN_DOCUMENTS = 64
# Calibration walks, per class of document length (half an octave).
_CLASS_TOKENS = 30_000
_CLASS_DOCUMENTS = 64
_CALIBRATION_SENTENCES = 1024
_SHORT_TARGETS = 8


class Order(NamedTuple):
  """One epoch: its blocks in order, and the number of examples up to the end of each."""

  blocks: Int64[np.ndarray, 'blocks']
  ends: Int64[np.ndarray, 'blocks']


class _Documents(NamedTuple):
  """Some documents (or the parts of them that lie in a block)."""

  shard: Int64[np.ndarray, 'n']
  first: Int64[np.ndarray, 'n']  # sentence within the shard
  end: Int64[np.ndarray, 'n']
  tokens: Int64[np.ndarray, 'n']


class _Expected(NamedTuple):
  """Expected number of examples of a document as a function of its length in tokens."""

  tokens: Float[np.ndarray, 'classes']
  examples: Float[np.ndarray, 'classes']

  @property
  def per_token(self) -> float:
    """Examples per token of a long document."""
    return float(self.examples[-1] / self.tokens[-1])

  def __call__(self, tokens: Int64[np.ndarray, 'n']) -> Float[np.ndarray, 'n']:
    beyond = np.maximum(tokens - self.tokens[-1], 0)
    return np.interp(tokens, self.tokens, self.examples) + self.per_token * beyond


# --- Blocks and their slots ------------------------------------------------------------------


def cut_blocks(
    corpus: sampling.Corpus, rule: sampling.Rule, block_examples: int
) -> Int64[np.ndarray, 'cuts']:
  """The sentences at which blocks begin, and the end of the corpus as the last one.

  Cuts lie at equal numbers of sentences, moved back to the start of a document or, in a very long
  one, of a passage. So a few values per block are read, not every document's length.
  """
  # Put-back sentences add about a third to the examples, padding about a tenth.
  expected = 1.4 * corpus.num_tokens / rule.max_tokens
  blocks = int(np.clip(np.rint(expected / block_examples), 1, corpus.num_sentences))
  cuts = {0, corpus.num_sentences}
  cuts.update(corpus.border(corpus.num_sentences * b // blocks) for b in range(1, blocks))
  return np.array(sorted(cuts))


def count_slots(
    corpus: sampling.Corpus, rule: sampling.Rule, cuts: Int64[np.ndarray, 'cuts'], key: int
) -> Int64[np.ndarray, 'blocks']:
  """The expected number of examples of each block, at least 1."""
  pieces = [
      (block, shard, begin, end)
      for block, (lo, hi) in enumerate(zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True))
      for shard, begin, end in corpus.pieces(lo, hi)
  ]
  sampled = [_sample(corpus, *piece, key) for piece in pieces]
  pool = _Documents(*(np.concatenate(field) for field in zip(*sampled, strict=True)))
  expected = _calibrate(corpus, rule, pool, key)
  total = np.zeros(len(cuts) - 1)
  for (block, shard, begin, end), some in zip(pieces, sampled, strict=True):
    _, first, _ = corpus.documents_between(shard, begin, end)
    tokens = int(corpus.sentences[shard][end]) - int(corpus.sentences[shard][begin])
    # Regression estimate: the sample's mean, moved to the block's own mean length.
    shift = tokens - len(first) * some.tokens.mean()
    total[block] += len(first) * expected(some.tokens).mean() + expected.per_token * shift
  return np.maximum(np.rint(total), 1).astype(np.int64)


def _sample(corpus, block, shard, begin, end, key) -> _Documents:
  """All documents of a small piece of a shard, or evenly spread runs of neighbours."""
  _, first, stop = corpus.documents_between(shard, begin, end)
  if len(first) > _SAMPLE_RUNS * _RUN_DOCUMENTS:
    stride = len(first) // _SAMPLE_RUNS
    offset = hashing.fold_int(key, _SAMPLE, block) % (stride - _RUN_DOCUMENTS + 1)
    rows = offset + np.add.outer(np.arange(_SAMPLE_RUNS) * stride, np.arange(_RUN_DOCUMENTS))
    first, stop = first[rows.ravel()], stop[rows.ravel()]
  sentences = corpus.sentences[shard]
  tokens = sentences[stop].astype(np.int64) - sentences[first]
  return _Documents(np.full(len(first), shard), first, stop, tokens)


def _calibrate(corpus, rule, pool, key) -> _Expected:
  """Walks through a bounded sample of documents of every length, with all kinds of targets."""
  length_class = np.floor(2 * np.log2(pool.tokens)).astype(np.int64)
  shuffled = np.argsort(hashing.fold(key, _CALIBRATION, np.arange(len(length_class))))
  chosen = []
  for c in np.unique(length_class):
    members = shuffled[length_class[shuffled] == c][:_CLASS_DOCUMENTS]
    enough = np.searchsorted(np.cumsum(pool.tokens[members]), _CLASS_TOKENS) + 1
    chosen.append(members[:enough])
  owner = np.repeat(np.arange(len(chosen)), [len(members) for members in chosen])
  rows = np.concatenate(chosen)
  first, end, offsets = _gather_offsets(corpus, pool, rows)
  tokens = offsets[end] - offsets[first]

  # Short targets are uniform; one from each of equal strata has far less variance than as many
  # free draws.
  jitter = hashing.uniform(hashing.fold(key, _CALIBRATION, rows))
  strata = (np.arange(_SHORT_TARGETS)[:, None] + jitter) / _SHORT_TARGETS
  short = 2 + (strata * (rule.max_tokens - 1)).astype(np.int64)
  targets = np.concatenate([np.full((1, len(rows)), rule.max_tokens), short]).ravel()
  copies = 1 + _SHORT_TARGETS
  counts = sampling.count_examples(
      offsets, np.tile(first, copies), np.tile(end, copies), targets, rule,
      hashing.fold_int(key, _CALIBRATION),
  ).reshape(copies, -1)
  share = rule.short_seq_prob
  examples = (1 - share) * counts[0] + share * counts[1:].mean(0)
  size = np.bincount(owner)
  return _Expected(np.bincount(owner, tokens) / size, np.bincount(owner, examples) / size)


def _gather_offsets(corpus, pool, rows):
  """Sentence offsets of documents end to end: first and end index of each, and the offsets."""
  out, at, token = [], 0, 0
  first, end = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
  for i, row in enumerate(rows.tolist()):
    begin = int(pool.first[row])
    stop = min(int(pool.end[row]), begin + _CALIBRATION_SENTENCES)
    offsets = corpus.sentences[int(pool.shard[row])][begin : stop + 1].astype(np.int64)
    out.append(offsets - offsets[0] + token)
    first[i], end[i] = at, at + stop - begin
    at, token = at + len(offsets), int(out[-1][-1])
  return first, end, np.concatenate(out)


# --- Samplers --------------------------------------------------------------------------------


class Epochs:
  """The examples of a corpus for training: epoch after epoch, shuffled, without end.

  Attributes:
    num_examples: examples per epoch.
  """

  def __init__(
      self, corpus: sampling.Corpus, rule: sampling.Rule, seed: int,
      block_examples: int = BLOCK_EXAMPLES, window: int = WINDOW,
  ):
    """Estimates the number of slots per block.

    Raises:
      sampling.SamplingError: if the task cannot be trained on the corpus.
    """
    corpus.check(rule)
    self._corpus, self._rule, self._seed, self._window = corpus, rule, seed, window
    self._cuts = cut_blocks(corpus, rule, block_examples)
    self._slots = count_slots(corpus, rule, self._cuts, seed)
    self.num_examples = int(self._slots.sum())
    # This window's plans, the next one's, and a little for a batch that lies across both.
    self._plan = functools.lru_cache(2 * window + 2)(self._make_plan)
    self._order = functools.lru_cache(4)(self._make_order)

  def examples(self, index: Int64[np.ndarray, 'n']) -> Shaped[np.ndarray, 'n']:
    """Examples by number, counted from the start of the run; rows of sampling.EXAMPLE."""
    out = np.empty(len(index), sampling.EXAMPLE)
    epoch, rest = np.divmod(index, self.num_examples)
    for e in np.unique(epoch).tolist():
      rows = np.flatnonzero(epoch == e)
      ends = self._order(e).ends
      which = np.searchsorted(ends, rest[rows], 'right') // self._window
      for window in np.unique(which).tolist():
        members = rows[which == window]
        self._fill(out, members, rest[members], e, window)
    return out

  def _fill(self, out, rows, rest, epoch, window):
    """Fills the rows of `out` that lie in one window; `rest` counts within the epoch."""
    order = self._order(epoch)
    last = min((window + 1) * self._window, len(order.ends)) - 1
    begin = int(order.ends[window * self._window - 1]) if window else 0
    size = int(order.ends[last]) - begin
    key = hashing.fold_int(self._seed, _WINDOW_ORDER, epoch, window)
    position = begin + hashing.permute(rest - begin, size, key)
    which = np.searchsorted(order.ends, position, 'right')
    slot = position - order.ends[which] + self._slots[order.blocks[which]]
    for w in np.unique(which).tolist():
      here = which == w
      out[rows[here]] = self._plan(epoch, int(order.blocks[w]))[slot[here]]
    self._plan_ahead(epoch, last + 1, (int(rest.max()) - begin) / size)

  def _plan_ahead(self, epoch, following, done):
    """Plans the next window bit by bit while this one is used, so that no batch waits for it."""
    if following == len(self._slots):
      epoch, following = epoch + 1, 0
    for block in self._order(epoch).blocks[following:][: int(done * (self._window + 1))].tolist():
      self._plan(epoch, block)

  def _make_order(self, epoch: int) -> Order:
    keys = hashing.fold(self._seed, _ORDER, epoch, np.arange(len(self._slots)))
    blocks = np.argsort(keys, kind='stable')
    return Order(blocks, np.cumsum(self._slots[blocks]))

  def _make_plan(self, epoch: int, block: int) -> Shaped[np.ndarray, 'slots']:
    """The examples of a block in an epoch, one per slot."""
    lo, hi = self._cuts[block : block + 2].tolist()
    missing, plan, walk = int(self._slots[block]), [], 0
    while missing:
      key = hashing.fold_int(self._seed, _WALK, epoch, walk)
      rows = sampling.traverse(self._corpus, lo, hi, self._rule, key)
      # In the order of their keys, which are random: any cut is a random subset, and the order
      # does not depend on how the documents lie in shards.
      rows = rows[np.argsort(rows['key'])][:missing]
      plan.append(rows)
      missing, walk = missing - len(rows), walk + 1
    return np.concatenate(plan)


class Enumeration:
  """The examples of one walk through a corpus, each exactly once: held-out evaluation.

  Attributes:
    num_examples: how many there are.
  """

  def __init__(
      self, corpus: sampling.Corpus, rule: sampling.Rule, seed: int,
      max_examples: int | None = None,
  ):
    """Walks through the corpus, or through as many random blocks of it as are needed.

    Args:
      max_examples: if there are more, a fixed random choice of this many.

    Raises:
      sampling.SamplingError: if the task cannot be trained on the corpus.
    """
    corpus.check(rule)
    limit = max_examples or corpus.num_tokens  # an example has at least one token of its own
    # Blocks so small that a choice comes from many places of the corpus.
    cuts = cut_blocks(corpus, rule, int(np.clip(limit // 32, 64, BLOCK_EXAMPLES)))
    blocks = np.argsort(hashing.fold(seed, _ORDER, np.arange(len(cuts) - 1)), kind='stable')
    key, found = hashing.fold_int(seed, _WALK, 0, 0), []
    while sum(map(len, found)) < limit and len(found) < len(blocks):
      lo, hi = cuts[blocks[len(found)] :][:2].tolist()
      found.append(sampling.traverse(corpus, lo, hi, rule, key))
    rows = np.concatenate(found)
    self._rows = rows[np.argsort(rows['key'])]
    self.num_examples = min(len(self._rows), limit)

  def examples(self, index: Int64[np.ndarray, 'n']) -> Shaped[np.ndarray, 'n']:
    """Examples by number in [0, num_examples); rows of sampling.EXAMPLE."""
    return self._rows[index]
