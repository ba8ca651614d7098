"""Which sentences make an example: Google's pair sampling, run on sentence lengths only.

`traverse` walks through a range of documents as `create_pretraining_data.py` of
google-research/bert does: sentences are collected until the target length is reached, the chunk is
cut into A and B at a random sentence, B is replaced by sentences of another document in half of
the cases (always when the chunk is a single sentence), and sentences that were not used are put
back. The walk is vectorised over documents and reads no token. `resolve` then fixes the rest of
chosen examples: the random partner and the cut to the sequence length.

`next_sentence` chooses the task:
  'nsp'   label 0: B follows A, 1: B comes from another document (BERT).
  'sop'   A and B are consecutive parts of one document, label 1 when swapped (ALBERT). A chunk of
          a single sentence gives an example without the task (weight 0).
  'none'  no pairs: [CLS] A [SEP] where A is as much consecutive text of one document as fits.
          Nothing is lost: a sentence that does not fit is cut and goes on in the next example.

The one departure from Google's walk: a document of more than PASSAGE_SENTENCES sentences is walked
through in passages of that many, as if each ended there, so that one huge document is neither
planned in one piece nor sentence by sentence in a single lane. "Short" is drawn once per document
and traversal, as Google does.
"""

import dataclasses
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int, Int64, Shaped, UInt64

from bertjax.data import hashing
from bertjax.data import shards as shards_lib

PASSAGE_SENTENCES = 4096
TASKS = ('nsp', 'sop', 'none')

# What is drawn from a key; each purpose is an independent stream.
_SHORT, _TARGET, _SPLIT, _PARTNER, _PARTNER_START, _CUT_A, _CUT_B, _SWAP = range(8)

# One example of a traversal. `len_b` 0 means that B is drawn from elsewhere ('nsp') or that there
# is none ('sop', 'none'). `document` counts over the whole corpus.
EXAMPLE = np.dtype([
    ('key', np.uint64), ('begin', np.uint32), ('document', np.uint32), ('len_a', np.int32),
    ('len_b', np.int32), ('shard', np.int32), ('target', np.int32),
])


class SamplingError(ValueError):
  """A corpus on which the chosen task cannot be trained; the message says the mend."""


@dataclasses.dataclass(frozen=True)
class Rule:
  """What the sampling depends on; see the module's docstring.

  Attributes:
    next_sentence: 'nsp', 'sop' or 'none'.
    seq_length: tokens of an example including [CLS] and [SEP].
    short_seq_prob: share of documents walked through with a shorter target.
  """

  next_sentence: str
  seq_length: int
  short_seq_prob: float

  @property
  def max_tokens(self) -> int:
    """Tokens of an example without [CLS] and the [SEP]s."""
    return self.seq_length - (2 if self.next_sentence == 'none' else 3)


class Corpus:
  """A split as one row of sentences and documents, whatever shards they lie in."""

  def __init__(self, split: shards_lib.Split):
    self.shards = split.shards
    # Plain views: slicing a np.memmap costs several times as much as slicing an ndarray.
    self.tokens = [shard.tokens.view(np.ndarray) for shard in split.shards]
    self.sentences = [shard.sentences.view(np.ndarray) for shard in split.shards]
    self.documents = [shard.documents.view(np.ndarray) for shard in split.shards]
    self.first_document = np.cumsum([0] + [len(a) - 1 for a in self.documents])
    self.first_sentence = np.cumsum([0] + [len(a) - 1 for a in self.sentences])
    self.num_documents = int(self.first_document[-1])
    self.num_sentences = int(self.first_sentence[-1])
    self.num_tokens = sum(len(a) for a in self.tokens)

  def pieces(self, lo: int, hi: int) -> list[tuple[int, int, int]]:
    """Sentences [lo, hi) of the corpus as (shard, lo, hi) within shards."""
    out = []
    while lo < hi:
      shard = int(np.searchsorted(self.first_sentence, lo, 'right')) - 1
      start, stop = self.first_sentence[shard : shard + 2].tolist()
      out.append((shard, lo - start, min(hi, stop) - start))
      lo = stop
    return out

  def border(self, sentence: int) -> int:
    """The last sentence up to this one at which a document or a passage of one begins."""
    ((shard, local, _),) = self.pieces(sentence, sentence + 1)
    documents = self.documents[shard]
    # A needle of the array's own type, or numpy would convert the whole array first.
    start = int(documents[np.searchsorted(documents, np.uint32(local), 'right') - 1])
    return sentence - (local - start) % PASSAGE_SENTENCES  # of the only passage: the start

  def documents_between(
      self, shard: int, lo: int, hi: int
  ) -> tuple[int, Int64[np.ndarray, 'd'], Int64[np.ndarray, 'd']]:
    """The documents of a shard that touch its sentences [lo, hi).

    Returns:
      Index of the first one within the shard, and the first and the end sentence of each,
      clipped to [lo, hi).
    """
    documents = self.documents[shard]
    first = int(np.searchsorted(documents, np.uint32(lo), 'right')) - 1
    last = int(np.searchsorted(documents, np.uint32(hi), 'left'))
    bounds = documents[first : last + 1].astype(np.int64)
    return first, np.maximum(bounds[:-1], lo), np.minimum(bounds[1:], hi)

  def check(self, rule: Rule) -> None:
    """Refuses a corpus on which the task cannot be trained.

    Raises:
      SamplingError: naming the counts and the mend.
    """
    if not self.num_documents:
      raise SamplingError('the corpus has no documents')
    if rule.next_sentence == 'none':
      return
    counts = (
        f'{self.num_documents} document{"s"[: self.num_documents != 1]} with '
        f'{self.num_sentences} sentences'
    )
    mend = (
        "Separate documents (not sentences) by one blank line, or use next_sentence='none', which "
        'needs no pairs.'
    )
    if self.num_sentences == self.num_documents:
      raise SamplingError(
          f"next_sentence='{rule.next_sentence}' needs documents of two or more sentences: this "
          f'corpus has {counts}, so 0 of {self.num_documents} documents have a true next sentence '
          f'and every label would be the same. {mend}'
      )
    if rule.next_sentence == 'nsp' and self.num_documents < 2:
      raise SamplingError(
          "next_sentence='nsp' takes the random second part from another document: this corpus has "
          f'{counts}, so there is no other document. {mend}'
      )


# --- Walking through documents ---------------------------------------------------------------


class _Lanes(NamedTuple):
  """Passages walked through side by side; sentence indices into one array of offsets."""

  first: Int64[np.ndarray, 'lanes']
  end: Int64[np.ndarray, 'lanes']
  target: Int64[np.ndarray, 'lanes']
  key: UInt64[np.ndarray, 'lanes']
  position: Int64[np.ndarray, 'lanes']  # of `first` in its document: draws do not depend on blocks


class Chunks(NamedTuple):
  """The examples of a walk, in the order of its steps."""

  lane: Int64[np.ndarray, 'n']
  begin: Int64[np.ndarray, 'n']  # token offset
  len_a: Int64[np.ndarray, 'n']
  len_b: Int64[np.ndarray, 'n']
  key: UInt64[np.ndarray, 'n']


def _walk(offsets: Int64[np.ndarray, 's'], lanes: _Lanes, rule: Rule) -> Chunks:
  """All examples of the lanes; `offsets[i]` is the token at which sentence i starts."""
  step = _text_step if rule.next_sentence == 'none' else _pair_step
  at = offsets[lanes.first] if rule.next_sentence == 'none' else lanes.first.copy()
  stop = offsets[lanes.end] if rule.next_sentence == 'none' else lanes.end
  origin = at - lanes.position
  alive, out = np.arange(len(at)), []
  while alive.size:
    here = at[alive]
    key = hashing.fold(lanes.key[alive], here - origin[alive])
    begin, len_a, len_b, then = step(
        offsets, here, stop[alive], lanes.target[alive], key, rule
    )
    out.append((alive, begin, len_a, len_b, key))
    at[alive] = then
    alive = alive[then < stop[alive]]
  return Chunks(*(np.concatenate(field) for field in zip(*out, strict=True)))


def _pair_step(offsets, first, stop, target, key, rule):
  """One chunk of whole sentences per lane, cut into A and B; `stop` is a sentence."""
  begin = offsets[first]
  end = np.minimum(np.searchsorted(offsets, begin + target), stop)
  sentences = end - first
  single = sentences == 1
  random = hashing.bits(key, _SPLIT)
  cut = first + 1 + hashing.below(random, np.maximum(sentences - 1, 1))
  cut = np.where(single, end, cut)
  if rule.next_sentence == 'nsp':
    # The lowest bit: `below` uses the upper half only.
    end = np.where(random & np.uint64(1) > 0, cut, end)
  middle = offsets[cut]
  return begin, middle - begin, offsets[end] - middle, end


def _text_step(offsets, begin, stop, target, key, rule):
  """As many whole sentences per lane as fit, or part of one that is too long; `stop` is a token."""
  del key
  limit = np.minimum(begin + rule.max_tokens, stop)
  # Whole sentences to the target; if the last one goes over the limit, without it.
  end = offsets[np.searchsorted(offsets, np.minimum(begin + target, stop))]
  before = offsets[np.searchsorted(offsets, limit, 'right') - 1]
  end = np.where(end <= limit, end, np.where(before > begin, before, limit))
  return begin, end - begin, np.zeros_like(begin), end


def _targets(key: UInt64[np.ndarray, 'n'], rule: Rule) -> Int64[np.ndarray, 'n']:
  """The length aimed at, once per document: the maximum, or for a few uniform in [2, maximum]."""
  short = hashing.chance(hashing.bits(key, _SHORT), rule.short_seq_prob)
  drawn = 2 + hashing.below(hashing.bits(key, _TARGET), rule.max_tokens - 1)
  return np.where(short, drawn, rule.max_tokens)


def traverse(
    corpus: Corpus, lo: int, hi: int, rule: Rule, key: int
) -> Shaped[np.ndarray, 'n']:
  """All examples of one walk through the sentences [lo, hi) of the corpus.

  Args:
    lo: a sentence at which a document or a passage of one begins.
    hi: the same, or the end of the corpus.
    key: names the walk: the same key gives the same examples, whatever the cuts [lo, hi).

  Returns:
    An array of dtype EXAMPLE. Each document gives at least one example.
  """
  out = []
  for shard, begin, end in corpus.pieces(lo, hi):
    document, first, stop = corpus.documents_between(shard, begin, end)
    passages = -(-(stop - first) // PASSAGE_SENTENCES)
    owner = np.repeat(np.arange(len(first)), passages)
    within = np.arange(len(owner)) - np.repeat(np.cumsum(passages) - passages, passages)
    start = first[owner] + within * PASSAGE_SENTENCES
    number = owner + (document + int(corpus.first_document[shard]))
    keys = hashing.fold(key, number)
    offsets = corpus.sentences[shard][begin : end + 1].astype(np.int64)
    whole = corpus.documents[shard][document : document + len(first)].astype(np.int64)
    position = start - whole[owner]
    if rule.next_sentence == 'none':
      position = offsets[start - begin] - corpus.sentences[shard][whole[owner]]
    lanes = _Lanes(
        start - begin, np.minimum(start + PASSAGE_SENTENCES, stop[owner]) - begin,
        _targets(keys, rule), keys, position,
    )
    chunks = _walk(offsets, lanes, rule)
    rows = np.empty(len(chunks.lane), EXAMPLE)
    rows['key'], rows['begin'], rows['shard'] = chunks.key, chunks.begin, shard
    rows['len_a'], rows['len_b'] = chunks.len_a, chunks.len_b
    rows['document'], rows['target'] = number[chunks.lane], lanes.target[chunks.lane]
    out.append(rows)
  return np.concatenate(out)


def count_examples(
    offsets: Int64[np.ndarray, 's'],
    first: Int64[np.ndarray, 'n'],
    end: Int64[np.ndarray, 'n'],
    target: Int64[np.ndarray, 'n'],
    rule: Rule,
    key: int,
) -> Int64[np.ndarray, 'n']:
  """How many examples passages give when walked through with the given targets."""
  keys = hashing.fold(key, np.arange(len(first)))
  chunks = _walk(offsets, _Lanes(first, end, target, keys, np.zeros_like(first)), rule)
  return np.bincount(chunks.lane, minlength=len(first))


# --- From a chunk to the two parts of an example ---------------------------------------------


class Parts(NamedTuple):
  """The token ranges of a batch of examples, cut to length.

  Attributes:
    shard_a, begin_a, len_a: where A lies; len_a >= 1.
    shard_b, begin_b, len_b: where B lies; len_b 0: the example has one part.
    label: the next-sentence label.
    labelled: whether the example has that label.
    document_b: the document that B comes from.
  """

  shard_a: Int[np.ndarray, 'n']
  begin_a: Int64[np.ndarray, 'n']
  len_a: Int64[np.ndarray, 'n']
  shard_b: Int[np.ndarray, 'n']
  begin_b: Int64[np.ndarray, 'n']
  len_b: Int64[np.ndarray, 'n']
  label: Bool[np.ndarray, 'n']
  labelled: Bool[np.ndarray, 'n']
  document_b: Int64[np.ndarray, 'n']


def resolve(corpus: Corpus, examples: Shaped[np.ndarray, 'n'], rule: Rule) -> Parts:
  """Draws the random partners, swaps, and cuts to the sequence length.

  Args:
    examples: rows of `traverse`, in any order.
  """
  key = np.ascontiguousarray(examples['key'])
  shard_a = examples['shard']
  begin_a, len_a = examples['begin'].astype(np.int64), examples['len_a'].astype(np.int64)
  shard_b, begin_b, len_b = shard_a, begin_a + len_a, examples['len_b'].astype(np.int64)
  document_b = examples['document'].astype(np.int64)
  one_part = len_b == 0
  if rule.next_sentence == 'nsp':
    label, labelled = one_part, np.ones(len(key), bool)
    shard_b = shard_b.copy()
    rows = np.flatnonzero(one_part)
    shard_b[rows], begin_b[rows], len_b[rows], document_b[rows] = _partners(
        corpus, key[rows], document_b[rows], examples['target'][rows] - len_a[rows]
    )
  else:
    label = ~one_part & hashing.chance(hashing.bits(key, _SWAP), 0.5)
    labelled = ~one_part
    begin_a, begin_b = np.where(label, begin_b, begin_a), np.where(label, begin_a, begin_b)
    len_a, len_b = np.where(label, len_b, len_a), np.where(label, len_a, len_b)
  begin_a, len_a, begin_b, len_b = truncate(key, begin_a, len_a, begin_b, len_b, rule)
  return Parts(
      shard_a, begin_a, len_a, shard_b, begin_b, len_b, label, labelled, document_b
  )


def _partners(corpus, key, document, wanted):
  """For each key a random start in a random other document: (shard, begin, length, document)."""
  other = hashing.below(hashing.bits(key, _PARTNER), corpus.num_documents - 1)
  other += other >= document
  shard = np.searchsorted(corpus.first_document, other, 'right') - 1
  local = (other - corpus.first_document[shard]).tolist()
  start = (hashing.bits(key, _PARTNER_START) >> np.uint64(32)).tolist()
  begin, length = [], []
  # Row by row: partners lie in any shard, and each needs a handful of scattered reads.
  rows = zip(shard.tolist(), local, start, np.maximum(wanted, 1).tolist(), strict=True)
  for s, d, random, want in rows:
    sentences = corpus.sentences[s]
    first, stop = corpus.documents[s][d : d + 2].tolist()
    at = first + (random * (stop - first) >> 32)
    # Whole sentences until there are enough. Each has a token, so `want` sentences always do, and
    # a file of 100 million offsets is touched at one place only.
    offsets = sentences[at : (at + want if at + want < stop else stop) + 1].astype(np.int64)
    origin = int(offsets[0])
    enough = int(offsets.searchsorted(origin + want))
    begin.append(origin)
    length.append(int(offsets[enough if enough < len(offsets) else -1]) - origin)
  return shard, begin, length, other


def truncate(
    key: UInt64[np.ndarray, 'n'],
    begin_a: Int64[np.ndarray, 'n'],
    len_a: Int64[np.ndarray, 'n'],
    begin_b: Int64[np.ndarray, 'n'],
    len_b: Int64[np.ndarray, 'n'],
    rule: Rule,
) -> tuple[
    Int64[np.ndarray, 'n'], Int64[np.ndarray, 'n'], Int64[np.ndarray, 'n'], Int64[np.ndarray, 'n']
]:
  """Google's `truncate_seq_pair`: tokens go from the longer part (B when equal), one by one.

  Each goes from the front or the back with equal probability, so what goes from the front is
  binomial.

  Returns:
    begin_a, len_a, begin_b, len_b with len_a + len_b <= rule.max_tokens and no part emptied.
  """
  excess = np.maximum(len_a + len_b - rule.max_tokens, 0)
  from_a = np.minimum(excess, np.maximum(len_a - len_b, 0))
  from_b = np.minimum(excess, np.maximum(len_b - len_a, 0))
  rest = excess - from_a - from_b  # the parts are equally long here: B, A, B, A, ...
  from_a, from_b = from_a + rest // 2, from_b + (rest + 1) // 2
  begin_a = begin_a + hashing.binomial_half(hashing.bits(key, _CUT_A), from_a)
  begin_b = begin_b + hashing.binomial_half(hashing.bits(key, _CUT_B), from_b)
  return begin_a, len_a - from_a, begin_b, len_b - from_b
