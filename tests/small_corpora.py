"""Corpora and a tokenizer small enough to write down, for the tests of the input pipeline."""

import dataclasses
import pathlib

import numpy as np

from bertjax.data import shards, tokenizer


@dataclasses.dataclass
class TinyVocabulary:
  """What the input pipeline asks of a tokenizer; ids from 10 on are words, odd ones continue."""

  vocab_size: int = 100
  pad_id: int = 1  # not 0, so that nothing can rest on luck
  cls_id: int = 2
  sep_id: int = 3
  mask_id: int = 4

  def __post_init__(self):
    self.ordinary_ids = np.arange(10, self.vocab_size, dtype=np.int32)
    self.continuation = (np.arange(self.vocab_size) >= 10) & (np.arange(self.vocab_size) % 2 == 1)


def make_split(documents, num_shards=1, word_starts=None) -> shards.Split:
  """A split from documents of sentences of ids; `word_starts` of the same nesting."""
  out = []
  for part in np.array_split(np.arange(len(documents)), num_shards):
    sentences = [np.asarray(s) for d in part for s in documents[d]]
    tokens = np.concatenate([np.zeros(0, int), *sentences]).astype(np.uint16)
    words = None
    if word_starts is not None:
      flags = np.concatenate([np.asarray(s, bool) for d in part for s in word_starts[d]])
      words = np.packbits(flags, bitorder='little')
    out.append(shards.Shard(
        tokens,
        np.cumsum([0] + [len(s) for s in sentences]).astype(np.uint32),
        np.cumsum([0] + [len(documents[d]) for d in part]).astype(np.uint32),
        words,
    ))
  return shards.Split(
      tuple(out),
      len(documents),
      sum(len(s.sentences) - 1 for s in out),
      sum(len(s.tokens) for s in out),
  )


def random_documents(seed, count, sentences=6, words=12, first=10, last=100):
  """Documents of 1 to `sentences` sentences of 1 to `words` random ids."""
  rng = np.random.default_rng(seed)
  return [
      [
          rng.integers(first, last, rng.integers(1, words + 1))
          for _ in range(rng.integers(1, sentences + 1))
      ]
      for _ in range(count)
  ]


def read_documents(path: pathlib.Path, tok: tokenizer.Tokenizer) -> list[list[np.ndarray]]:
  """A text in Google's format (a sentence a line, blank line between documents) as ids."""
  documents = [[]]
  for line in path.read_text(encoding='utf-8').splitlines():
    if line.strip():
      documents[-1].append(tok.encode_batch([line])[0])
    elif documents[-1]:
      documents.append([])
  return [d for d in documents if d]


def numbered_documents(sizes, sentence_tokens=3, first=10):
  """Documents whose every token is different, so that an example shows where it came from."""
  at, out = first, []
  for size in sizes:
    document = []
    for _ in range(size):
      document.append(np.arange(at, at + sentence_tokens))
      at += sentence_tokens
    out.append(document)
  return out


def originals(batch) -> np.ndarray:
  """input_ids with the masked tokens put back."""
  ids = batch['input_ids'].copy()
  row, slot = np.nonzero(batch['masked_lm_weights'])
  ids[row, batch['masked_lm_positions'][row, slot]] = batch['masked_lm_ids'][row, slot]
  return ids


def parts(batch, row) -> tuple[list[int], list[int]]:
  """The original ids of A and B of one row, without special tokens."""
  ids = originals(batch)[row]
  kinds, real = batch['token_type_ids'][row], batch['attention_mask'][row].astype(bool)
  a, b = ids[real & (kinds == 0)], ids[real & (kinds == 1)]
  return a[1:-1].tolist(), b[:-1].tolist()
