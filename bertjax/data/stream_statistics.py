"""What the examples of a stream turn out like, measured on a bounded sample before training.

How many random pairs Google's sampling gives depends on the text: a chunk of a single sentence
always gets a random partner, so the share is about a half on long documents and two thirds where
documents have two sentences. Padding follows from the lengths of documents, and a sentence longer
than an example is cut where sentences are paired. None of this is a setting, so it is measured.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from absl import logging
from jaxtyping import Int64

from bertjax.data import hashing, sampling

# Whole corpora of up to _RUNS * PASSAGE_SENTENCES sentences, of others so many evenly spread runs.
_RUNS = 16
# A walk cuts one document in ten into many short examples: a few documents need several walks.
_MAX_WALKS = 8
_EXAMPLES = 4096
_WALK = 64  # purpose of the key of the walk
# Any text has a few; many mean that lines are no sentences.
_FEW_LONG = 0.01


@dataclasses.dataclass(frozen=True)
class StreamStatistics:
  """The realised figures of a stream; several corpora are weighted as they are mixed.

  Attributes:
    mean_length: tokens of an example, [CLS] and [SEP] included.
    padding: share of the places of a batch that is padding.
    labelled: share of the examples that have a next-sentence label.
    label_1: share of label 1 among these: random pairs ('nsp') or swapped ones ('sop').
    num_examples: how many were measured.
    num_sentences: how many sentences were looked at for the next figure.
    long_sentences: how many of them are longer than an example and lose what does not fit; always
      0 without pairs, where such a sentence goes on in the next example.
    complete: whether these are all sentences there are.
  """

  mean_length: float
  padding: float
  labelled: float
  label_1: float
  num_examples: int
  num_sentences: int
  long_sentences: int
  complete: bool


def measure(
    corpora: Sequence[sampling.Corpus],
    rule: sampling.Rule,
    weights: Sequence[float | int],
    seed: int,
) -> StreamStatistics:
  """Walks through a sample of each corpus; the walk is none of those that are trained on.

  Args:
    corpora: each with documents on which the task can be trained.
    rule: the task and the length.
    weights: of the corpora in the stream, in any unit.
    seed: of the walk.
  """
  key = hashing.fold_int(seed, _WALK)
  sampled = [(corpus, _runs(corpus)) for corpus in corpora]
  parts = [_sample_examples(corpus, runs, rule, key) for corpus, runs in sampled]
  figures = [_figures(part) for part in parts]
  length, labelled, label_1 = np.average(figures, axis=0, weights=weights).tolist()
  sentences = np.concatenate([_sentence_lengths(corpus, runs) for corpus, runs in sampled])
  paired = rule.next_sentence != 'none'
  return StreamStatistics(
      mean_length=length,
      padding=1 - length / rule.seq_length,
      labelled=labelled,
      label_1=label_1 / labelled if labelled else 0.0,
      num_examples=sum(len(part.label) for part in parts),
      num_sentences=len(sentences),
      long_sentences=int((sentences > rule.max_tokens).sum()) if paired else 0,
      complete=len(sentences) == sum(corpus.num_sentences for corpus in corpora),
  )


def _runs(corpus: sampling.Corpus) -> list[tuple[int, int]]:
  """Ranges of sentences that begin and end where a document or a passage of one does."""
  passage = sampling.PASSAGE_SENTENCES
  if corpus.num_sentences <= _RUNS * passage:
    return [(0, corpus.num_sentences)]
  starts = [corpus.border(corpus.num_sentences * run // _RUNS) for run in range(_RUNS)]
  return [(start, corpus.border(start + passage)) for start in starts]


def _sample_examples(
    corpus: sampling.Corpus, runs: list[tuple[int, int]], rule: sampling.Rule, key: int
) -> sampling.Parts:
  sentences = sum(hi - lo for lo, hi in runs)
  walks = int(np.clip(_RUNS * sampling.PASSAGE_SENTENCES // sentences, 1, _MAX_WALKS))
  rows = np.concatenate([
      sampling.traverse(corpus, lo, hi, rule, hashing.fold_int(key, walk))
      for walk in range(walks) for lo, hi in runs
  ])
  # In the order of their keys, which are random. Each random partner costs reads from anywhere.
  rows = rows[np.argsort(rows['key'])][:_EXAMPLES]
  return sampling.resolve(corpus, rows, rule)


def _figures(parts: sampling.Parts) -> list[float]:
  """Mean length, and the shares of examples with a label and with label 1."""
  lengths = parts.len_a + parts.len_b + 2 + (parts.len_b > 0)
  return [float(lengths.mean()), float(parts.labelled.mean()), float(parts.label.mean())]


def _sentence_lengths(
    corpus: sampling.Corpus, runs: list[tuple[int, int]]
) -> Int64[np.ndarray, 'n']:
  return np.concatenate([
      np.diff(corpus.sentences[shard][begin : end + 1].astype(np.int64))
      for run in runs for shard, begin, end in corpus.pieces(*run)
  ])


def in_words(found: StreamStatistics, next_sentence: str) -> str:
  """The figures of the examples as part of a log line."""
  pairs = {
      'nsp': f', {found.label_1:.0%} random pairs',
      'sop': f', {found.labelled:.0%} pairs and {found.label_1:.0%} of them swapped',
      'none': '',
  }
  return (
      f'in a sample of {found.num_examples} their mean length is {found.mean_length:.0f} '
      f'({found.padding:.0%} padding){pairs[next_sentence]}'
  )


def log_long_sentences(found: StreamStatistics, rule: sampling.Rule) -> None:
  """Says how many sentences lose tokens because they are longer than an example (B012)."""
  if not found.long_sentences:
    return
  share = found.long_sentences / found.num_sentences
  logging.log(
      logging.WARNING if share > _FEW_LONG else logging.INFO,
      '%d of %s%d sentences (%.2g%%) are longer than an example (%d tokens besides [CLS] and '
      '[SEP]) and are cut. Is the text cut into sentences? A longer seq_length cuts less, '
      "next_sentence='none' nothing.",
      found.long_sentences, '' if found.complete else 'a sample of ', found.num_sentences,
      100 * share, rule.max_tokens,
  )
