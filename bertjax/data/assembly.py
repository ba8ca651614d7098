"""From units to shards: which documents stay, which are held out, and the shards themselves.

Nothing here grows with the corpus: hashes are sorted in buckets on disk, units are copied one by
one.
"""

import dataclasses
import json
import pathlib
import shutil
from collections.abc import Iterator

import numpy as np
from jaxtyping import Bool, Int, UInt8, UInt64

from bertjax.data import shard_writer, shards
from bertjax.data.units import HASH_BYTES, unit_folder

TRAIN, HELDOUT, DUPLICATE = 1, 2, 3
# Below this many documents none is held out: the few there are would hardly be a training set.
MIN_DOCUMENTS_TO_HOLD_OUT = 10
_BUCKET_DOCUMENTS = 2**15
_MAX_BUCKETS_LOG2 = 10
_COUNT_TOKENS = 2**17


def decide_documents(
    folder: pathlib.Path, num_units: int, heldout: float, seed: int
) -> UInt8[np.ndarray, 'documents']:
  """Decides TRAIN, HELDOUT or DUPLICATE for every document, in order; a file-backed array.

  Of documents with the same ids the first stays. Whether one is held out depends on its ids and
  the seed alone, so a document stays where it is when others are added. Hashes are sorted in
  buckets on disk: memory does not grow with the corpus.
  """
  total = sum((unit_folder(folder, n) / 'hashes').stat().st_size for n in range(num_units))
  total //= HASH_BYTES
  path = folder / 'decisions'
  path.write_bytes(bytes(1))
  if not total:
    return np.zeros(0, np.uint8)
  decisions = np.memmap(path, np.uint8, 'w+', shape=(total,))
  lowest, kept, held = (2**64, 0), 0, 0
  for bucket in _bucket_hashes(folder, num_units, total):
    records = np.fromfile(bucket, np.uint64).reshape(-1, 3)
    bucket.unlink()
    first, index = _first_of_each(records)
    decisions[records[:, 2]] = DUPLICATE
    ranks = _mix(records[first, 1], seed)
    chosen = ranks < np.uint64(int(heldout * 2**64))
    decisions[index] = np.where(chosen, HELDOUT, TRAIN)
    kept, held = kept + len(index), held + int(chosen.sum())
    place = int(np.argmin(ranks))
    lowest = min(lowest, (int(ranks[place]), int(index[place])))
  if heldout and kept >= MIN_DOCUMENTS_TO_HOLD_OUT and not held:
    decisions[lowest[1]] = HELDOUT
  if kept < MIN_DOCUMENTS_TO_HOLD_OUT:
    decisions[decisions == HELDOUT] = TRAIN
  return decisions


def _bucket_hashes(folder: pathlib.Path, num_units: int, total: int) -> Iterator[pathlib.Path]:
  """Spreads (hash, hash, document number) records over files by the first bits of the hash."""
  bits = min((total // _BUCKET_DOCUMENTS).bit_length(), _MAX_BUCKETS_LOG2)
  paths = [folder / f'bucket-{number:05d}' for number in range(2**bits)]
  for path in paths:
    path.unlink(missing_ok=True)
  start = 0
  for number in range(num_units):
    hashes = np.fromfile(unit_folder(folder, number) / 'hashes', np.uint64).reshape(-1, 2)
    numbers = np.arange(start, start + len(hashes), dtype=np.uint64)
    records = np.concatenate([hashes, numbers[:, None]], axis=1)
    start += len(hashes)
    places = (hashes[:, 0] >> np.uint64(64 - bits)) if bits else np.zeros(len(hashes), np.uint64)
    for place in np.unique(places).tolist():
      with paths[place].open('ab') as file:
        file.write(records[places == place].data)
  yield from (path for path in paths if path.exists())


def _first_of_each(
    records: UInt64[np.ndarray, 'N 3'],
) -> tuple[Int[np.ndarray, 'kept'], UInt64[np.ndarray, 'kept']]:
  """Rows and document numbers of the first document of each hash."""
  order = np.lexsort((records[:, 2], records[:, 1], records[:, 0]))
  hashes = records[order, :2]
  new = np.ones(len(order), bool)
  new[1:] = (hashes[1:] != hashes[:-1]).any(axis=1)
  first = order[new]
  return first, records[first, 2]


def _mix(values: UInt64[np.ndarray, 'N'], seed: int) -> UInt64[np.ndarray, 'N']:
  """Uniform 64-bit numbers from uniform hashes and a seed (the finaliser of splitmix64)."""
  with np.errstate(over='ignore'):
    mixed = values ^ (np.uint64(seed % 2**64) * np.uint64(0x9E3779B97F4A7C15))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
      mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))


# --- Assembly --------------------------------------------------------------------------------


@dataclasses.dataclass
class Tally:
  """What assembly counts; `token_counts` [vocab_size] by split."""

  token_counts: dict[str, np.ndarray]
  one_sentence_documents: int = 0
  duplicates: int = 0
  bad_lines: int = 0


def assemble(
    folder: pathlib.Path,
    num_units: int,
    decisions: UInt8[np.ndarray, 'documents'],
    vocab_size: int,
    word_borders: bool,
) -> tuple[dict[str, shards.SplitInfo], Tally]:
  """Writes the shards of both splits into folder/assembled, in the order of the corpus."""
  target = folder / 'assembled'
  shutil.rmtree(target, ignore_errors=True)
  target.mkdir()
  writers = {
      name: shard_writer.ShardWriter(target, name, vocab_size, word_borders=word_borders)
      for name in shards.SPLITS
  }
  tally = Tally({name: np.zeros(vocab_size, np.int64) for name in shards.SPLITS})
  start = 0
  for number in range(num_units):
    unit = unit_folder(folder, number)
    tally.bad_lines += json.loads((unit / 'info.json').read_text(encoding='utf-8'))['bad_lines']
    documents = np.fromfile(unit / 'documents', np.uint32)
    if not len(documents):
      continue
    decided = np.asarray(decisions[start : start + len(documents)])
    start += len(documents)
    tally.duplicates += int((decided == DUPLICATE).sum())
    tally.one_sentence_documents += int(((documents == 1) & (decided != DUPLICATE)).sum())
    arrays = [np.memmap(unit / 'tokens', shards.token_dtype(vocab_size), 'r')]
    arrays += [np.fromfile(unit / 'sentences', np.uint32), documents]
    arrays += [np.memmap(unit / 'words', bool, 'r')] if word_borders else [None]
    for name, code in (('train', TRAIN), ('heldout', HELDOUT)):
      chosen = _choose(decided == code, *arrays)
      if len(chosen[2]):
        writers[name].append(*chosen)
        _count_tokens(chosen[0], tally.token_counts[name])
  return {name: writer.close() for name, writer in writers.items()}, tally


def _choose(chosen: Bool[np.ndarray, 'documents'], tokens, sentences, documents, words):
  """The arrays of the chosen documents only."""
  if chosen.all():
    return tokens, sentences, documents, words  # Without a copy, however long the unit is.
  of_sentences = np.repeat(chosen, documents)
  of_tokens = np.repeat(of_sentences, sentences)
  words = None if words is None else words[of_tokens]
  return tokens[of_tokens], sentences[of_sentences], documents[chosen], words


def _count_tokens(tokens: np.ndarray, counts: np.ndarray) -> None:
  for low in range(0, len(tokens), _COUNT_TOKENS):
    counts += np.bincount(tokens[low : low + _COUNT_TOKENS], minlength=len(counts))


def unigram_entropy(counts: Int[np.ndarray, 'vocab']) -> float:
  """Entropy in nats per token of the ids' frequencies."""
  shares = counts[counts > 0] / max(counts.sum(), 1)
  return float((shares * np.log(1 / shares)).sum())
