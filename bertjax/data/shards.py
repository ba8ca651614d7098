"""Token shards on disk: what `bertjax.data.build` writes and the input pipeline reads.

A data set is a folder:

  manifest.json                          written last, by rename: without it nothing else counts
  tokenizer/                             the tokenizer that made the ids
  train-00000-of-00003.tokens.npy        uint16 (vocabulary <= 65,536) or uint32: the ids of all
                                         sentences of all documents back to back, no special ids
  train-00000-of-00003.sentences.npy     uint32 [S + 1]: token offset at which each sentence starts
  train-00000-of-00003.documents.npy     uint32 [D + 1]: index of each document's first sentence
  train-00000-of-00003.words.npy         only with given word borders: bits, 1 = begins a word
  heldout-00000-of-00001.*               the held-out documents, the same way

Offsets count within their shard. No sentence and no document is empty. Flat arrays and offsets
make every sentence reachable in constant time, so example i of a run can be a pure function of i.
"""

import dataclasses
import hashlib
import json
import mmap
import os
import pathlib
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from absl import logging
from etils import epath
from jaxtyping import Bool, Integer, UInt, UInt8, UInt32

VERSION = 1
MANIFEST = 'manifest.json'
SPLITS = ('train', 'heldout')
# Half a gigabyte of uint16 per shard; far below the 2**32 tokens that a uint32 offset can reach.
SHARD_TOKENS = 2**28
_COPY_BYTES = 2**20


class ShardError(ValueError):
  """A folder that is not a usable data set; the message names the file and the mend."""


@dataclasses.dataclass(frozen=True)
class ShardInfo:
  """One shard as the manifest records it.

  Attributes:
    name: file name up to the array's name, e.g. 'train-00000-of-00003'.
    sha256: hex digest of each file by array name ('tokens', 'sentences', 'documents', 'words').
  """

  name: str
  sha256: dict[str, str]
  num_documents: int
  num_sentences: int
  num_tokens: int


@dataclasses.dataclass(frozen=True)
class SplitInfo:
  """One split as the manifest records it."""

  num_documents: int
  num_sentences: int
  num_tokens: int
  files: tuple[ShardInfo, ...]


@dataclasses.dataclass(frozen=True)
class Manifest:
  """What a data set is: its source, its tokenizer, its counts and its identity.

  Attributes:
    corpus: what the text was: inputs and format as the user named them, formats as found,
      language, bytes, the share that is held out.
    tokenizer: type, hash, vocab_size and the switches of the tokenizer.
    splits: 'train' and 'heldout'.
    duplicates_dropped: documents left out because an earlier one has the same ids.
    encoding: the policy for bytes that are not UTF-8, and how many lines it met.
    unknown_token_share: share of [UNK] among all ids of both splits.
    unigram_entropy: nats per token of the training split's id frequencies: the masked-LM loss of
      a model that has learnt nothing but how frequent each id is.
    word_borders: whether `words` holds borders that were given with the text.
    content_hash: SHA-256 over the files' hashes and the tokenizer's: the data's identity.
  """

  corpus: dict[str, Any]
  tokenizer: dict[str, Any]
  splits: dict[str, SplitInfo]
  duplicates_dropped: int
  encoding: dict[str, Any]
  unknown_token_share: float
  unigram_entropy: float
  word_borders: bool
  content_hash: str
  bertjax_version: str
  version: int = VERSION


@dataclasses.dataclass(frozen=True)
class Shard:
  """The arrays of one shard, read-only; see the module's docstring for what they hold."""

  tokens: UInt[np.ndarray, 'tokens']
  sentences: UInt32[np.ndarray, 'sentences_and_one']
  documents: UInt32[np.ndarray, 'documents_and_one']
  words: UInt8[np.ndarray, 'bytes'] | None = None

  def word_starts(self, positions: Integer[np.ndarray, '*shape']) -> Bool[np.ndarray, '*shape']:
    """Whether the tokens at `positions` begin a word, by the borders given with the text.

    Raises:
      ShardError: if the data set was built without word borders.
    """
    if self.words is None:
      raise ShardError(
          'these shards hold no word borders; build them with --word_borders whitespace'
      )
    return (self.words[positions >> 3] >> (positions & 7).astype(np.uint8) & 1).astype(bool)


@dataclasses.dataclass(frozen=True)
class Split:
  """All shards of one split, and how much is in them."""

  shards: tuple[Shard, ...]
  num_documents: int
  num_sentences: int
  num_tokens: int


def token_dtype(vocab_size: int) -> np.dtype:
  """The narrowest unsigned type that holds every id of a vocabulary of this size."""
  return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def content_hash(splits: dict[str, SplitInfo], tokenizer_hash: str) -> str:
  """The data's identity: SHA-256 hex over every file's hash and the tokenizer's hash."""
  digest = hashlib.sha256(tokenizer_hash.encode())
  for split in sorted(splits):
    for shard in splits[split].files:
      for array in sorted(shard.sha256):
        digest.update(f'\n{shard.name}.{array} {shard.sha256[array]}'.encode())
  return digest.hexdigest()


# --- Reading ---------------------------------------------------------------------------------


def load_manifest(folder: str | os.PathLike) -> Manifest:
  """Reads the manifest of a finished data set.

  Args:
    folder: a local or gs:// folder that `python -m bertjax.data.build` has written.

  Raises:
    ShardError: if there is no finished data set, or one of another version.
  """
  folder = epath.Path(folder)
  path = folder / MANIFEST
  if not path.exists():
    if not folder.exists():
      why = 'the folder does not exist'
    elif (folder / '.partial').exists():
      why = 'a build was started there and is not finished; run the same build command again'
    else:
      why = f'it has no {MANIFEST}; make it with python -m bertjax.data.build'
    raise ShardError(f'{folder} is not a finished data set: {why}')
  try:
    fields = json.loads(path.read_text(encoding='utf-8'))
    version = fields['version']
  except OSError as error:
    raise ShardError(f'cannot read {path}: {error}') from error
  except (ValueError, KeyError, TypeError) as error:
    raise ShardError(f'{path} is not a manifest of bertjax ({error!r}); build again') from error
  if version != VERSION:
    raise ShardError(
        f'{path} has version {version} and this bertjax reads version {VERSION}; build again'
    )
  try:
    fields['splits'] = {name: _split_info(split) for name, split in fields['splits'].items()}
    return Manifest(**fields)
  except (KeyError, TypeError) as error:
    raise ShardError(f'{path} lacks or repeats a key ({error}); build again') from error


def _split_info(fields: dict[str, Any]) -> SplitInfo:
  files = tuple(ShardInfo(**shard) for shard in fields['files'])
  return SplitInfo(**{**fields, 'files': files})


def open_split(folder: str | os.PathLike, name: str = 'train') -> Split:
  """Opens one split for random reading.

  Local shards are memory-mapped. Random reads of a few hundred bytes over the network are
  hopeless, so shards on gs:// are first copied to a local cache, once per content hash
  ($BERTJAX_CACHE, else ~/.cache/bertjax).

  Args:
    folder: the data set's folder, local or gs://.
    name: 'train' or 'heldout'.

  Raises:
    ShardError: no finished data set, no such split, or files that contradict the manifest.
  """
  manifest = load_manifest(folder)
  if name not in manifest.splits:
    raise ShardError(f'{folder} has no split {name!r}; it has {sorted(manifest.splits)}')
  info = manifest.splits[name]
  local = _local_folder(epath.Path(folder), manifest, info)
  return Split(
      shards=tuple(_open_shard(local, shard) for shard in info.files),
      num_documents=info.num_documents,
      num_sentences=info.num_sentences,
      num_tokens=info.num_tokens,
  )


def _open_shard(folder: pathlib.Path, info: ShardInfo) -> Shard:
  arrays = {array: _map_array(folder / f'{info.name}.{array}.npy') for array in info.sha256}
  found = (len(arrays['documents']) - 1, len(arrays['sentences']) - 1, len(arrays['tokens']))
  recorded = (info.num_documents, info.num_sentences, info.num_tokens)
  if found != recorded:
    raise ShardError(
        f'{folder / info.name} holds {found} documents, sentences and tokens, but the manifest '
        f'records {recorded}; copy or build the data set again'
    )
  return Shard(**arrays)


def _map_array(path: pathlib.Path) -> np.ndarray:
  try:
    array = np.load(path, mmap_mode='r')
  except (OSError, ValueError) as error:
    raise ShardError(f'cannot read {path} ({error}); copy or build the data set again') from error
  # Sentences are read in random order: read-ahead would fetch 30 pages to use one.
  if array.nbytes and hasattr(mmap, 'MADV_RANDOM'):
    array._mmap.madvise(mmap.MADV_RANDOM)
  return array


def release_pages(split: Split) -> None:
  """Takes what has been read so far out of this process's memory; it is read again when needed.

  To be called after reading much once. The pages belong to files: the system's cache may keep them.
  """
  for shard in split.shards:
    for array in (shard.tokens, shard.sentences, shard.documents, shard.words):
      mapped = getattr(array, '_mmap', None)  # None: an array in memory, not of a file
      if mapped is not None and hasattr(mmap, 'MADV_DONTNEED'):
        mapped.madvise(mmap.MADV_DONTNEED)


def _local_folder(folder: epath.Path, manifest: Manifest, info: SplitInfo) -> pathlib.Path:
  """The folder itself if it is local, else a cache that by now holds the split's files."""
  if not is_remote(folder):
    return pathlib.Path(folder)
  root = os.environ.get('BERTJAX_CACHE') or pathlib.Path.home() / '.cache' / 'bertjax'
  cache = pathlib.Path(root) / 'shards' / manifest.content_hash
  cache.mkdir(parents=True, exist_ok=True)
  wanted = [
      (f'{shard.name}.{array}.npy', digest)
      for shard in info.files
      for array, digest in shard.sha256.items()
  ]
  missing = [(name, digest) for name, digest in wanted if not (cache / name).exists()]
  if missing:
    logging.info('Copying %d shard files from %s to %s.', len(missing), folder, cache)
  start, copied = time.monotonic(), 0
  for number, (name, digest) in enumerate(missing, 1):
    copied += _copy_checked(folder / name, cache / name, digest)
    rate = copied / 1e6 / max(time.monotonic() - start, 1e-3)
    print(
        f'copied {number}/{len(missing)} files, {copied / 1e6:.0f} MB, {rate:.0f} MB/s',
        file=sys.stderr,
    )
  return cache


def is_remote(path: str | os.PathLike) -> bool:
  """Whether the path names a bucket and not a file of this machine."""
  return '://' in os.fspath(path)


def _copy_checked(source: epath.Path, target: pathlib.Path, digest: str) -> int:
  """Copies one file if its bytes have the recorded hash; appears under its name only when whole."""
  partial = target.with_name(f'{target.name}.{os.getpid()}.partial')
  found, size = hashlib.sha256(), 0
  with source.open('rb') as reader, partial.open('wb') as writer:
    while block := reader.read(_COPY_BYTES):
      found.update(block)
      writer.write(block)
      size += len(block)
  if found.hexdigest() != digest:
    partial.unlink()
    raise ShardError(f'{source} is damaged: its SHA-256 is not the one in the manifest')
  partial.replace(target)
  return size


def load_tokenizer(folder: str | os.PathLike):
  """The tokenizer (`bertjax.data.tokenizer.Tokenizer`) that made the data set's ids.

  Raises:
    ShardError: if the stored tokenizer is not the one that the manifest records.
  """
  from bertjax.data import tokenizer as tokenizer_lib  # The reader of shards needs no tokenizer.

  manifest = load_manifest(folder)
  tokenizer = tokenizer_lib.load(epath.Path(folder) / 'tokenizer')
  if tokenizer.hash() != manifest.tokenizer['hash']:
    raise ShardError(
        f'{epath.Path(folder) / "tokenizer"} has been changed since the shards were built (its '
        'hash is not the one in the manifest): the ids would mean other tokens; build again'
    )
  return tokenizer


def verify_files(folder: str | os.PathLike) -> Iterator[str]:
  """Compares every file with the manifest's SHA-256 and yields one message per mismatch."""
  folder = epath.Path(folder)
  for split in load_manifest(folder).splits.values():
    for shard in split.files:
      for array, digest in shard.sha256.items():
        path = folder / f'{shard.name}.{array}.npy'
        if not path.exists():
          yield f'{path} is missing'
        elif file_sha256(path) != digest:
          yield f'{path} is damaged: its SHA-256 is not the one in the manifest'


def file_sha256(path: epath.Path | pathlib.Path) -> str:
  """The hex digest of a file's bytes."""
  digest = hashlib.sha256()
  with path.open('rb') as file:
    while block := file.read(_COPY_BYTES):
      digest.update(block)
  return digest.hexdigest()
