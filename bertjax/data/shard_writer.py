"""Writes token shards: a split as a row of files, and a folder of them as a data set.

The format is that of shards.py. A set counts as soon as its manifest is there, which comes last.
"""

import dataclasses
import errno
import json
import os
import pathlib
import shutil

import numpy as np
from etils import epath
from jaxtyping import Bool, Integer

from bertjax.data import shards

_COPY_BYTES = 2**20
_INCOMING = '.incoming'  # new files, until the old ones have made room


class _NpyFile:
  """A one-dimensional .npy file that grows by appending; memory use does not depend on length."""

  def __init__(self, path: pathlib.Path, dtype: np.dtype | type[np.generic]):
    self.path, self.dtype, self.length = path, np.dtype(dtype), 0
    self._file = path.open('wb')
    self._write_header()

  def _write_header(self) -> None:
    # NumPy pads the header so that a growing first axis never changes its size.
    header = {
        'descr': np.lib.format.dtype_to_descr(self.dtype),
        'fortran_order': False,
        'shape': (self.length,),
    }
    np.lib.format.write_array_header_1_0(self._file, header)

  def append(self, array: np.ndarray) -> None:
    self._file.write(np.ascontiguousarray(array, dtype=self.dtype).data)
    self.length += len(array)

  def close(self) -> None:
    self._file.seek(0)
    self._write_header()
    self._file.flush()
    os.fsync(self._file.fileno())  # The manifest that vouches for this file comes after it.
    self._file.close()


class ShardWriter:
  """Writes one split as a row of shards in a local folder, holding one call's arrays at a time.

  The cuts between shards depend on the documents alone, not on how they are spread over calls of
  `append`. The number of shards, part of their names, is known at the end: until `close` the
  files bear provisional names.
  """

  def __init__(
      self,
      folder: str | os.PathLike,
      split: str,
      vocab_size: int,
      *,
      word_borders: bool = False,
      shard_tokens: int = shards.SHARD_TOKENS,
  ):
    self._folder, self._split = pathlib.Path(folder), split
    self._dtype, self._word_borders = shards.token_dtype(vocab_size), word_borders
    self._shard_tokens = shard_tokens
    self._infos: list[shards.ShardInfo] = []
    self._files: dict[str, _NpyFile] | None = None

  def append(
      self,
      tokens: Integer[np.ndarray, 'tokens'],
      sentence_lengths: Integer[np.ndarray, 'sentences'],
      document_lengths: Integer[np.ndarray, 'documents'],
      words: Bool[np.ndarray, 'tokens'] | None = None,
  ) -> None:
    """Adds whole documents.

    Args:
      tokens: the ids of all their sentences, back to back.
      sentence_lengths: tokens in each sentence, none 0.
      document_lengths: sentences in each document, none 0.
      words: True where a token begins a word; required with word_borders and only then.

    Raises:
      ShardError: if the lengths do not add up, something is empty, or a shard outgrows uint32.
    """
    self._check(tokens, sentence_lengths, document_lengths, words)
    sentence_ends = np.concatenate([[0], np.cumsum(sentence_lengths, dtype=np.int64)])
    document_ends = np.concatenate([[0], np.cumsum(document_lengths, dtype=np.int64)])
    token_ends = sentence_ends[document_ends]  # [D + 1]: where each document starts in `tokens`
    first, count = 0, len(document_lengths)
    while first < count:
      if self._files is None:
        self._open()
      room = self._shard_tokens - self._files['tokens'].length
      # A shard takes documents up to the one that fills it.
      last = min(count, int(np.searchsorted(token_ends, token_ends[first] + room)))
      last = max(last, first + 1)
      low, high = token_ends[first], token_ends[last]
      self._extend(
          tokens[low:high],
          sentence_ends[document_ends[first] + 1 : document_ends[last] + 1] - low,
          document_ends[first + 1 : last + 1] - document_ends[first],
          None if words is None else words[low:high],
      )
      first = last
      if self._files['tokens'].length >= self._shard_tokens:
        self._finish()

  def _check(self, tokens, sentence_lengths, document_lengths, words) -> None:
    if sentence_lengths.sum() != len(tokens) or document_lengths.sum() != len(sentence_lengths):
      raise shards.ShardError('sentence and document lengths do not add up to the tokens given')
    if not (np.all(sentence_lengths > 0) and np.all(document_lengths > 0)):
      raise shards.ShardError('an empty sentence or document must not reach the shards')
    if self._word_borders != (words is not None):
      raise shards.ShardError('word borders must come with every document or with none')

  def _open(self) -> None:
    stem = self._folder / f'{self._split}-{len(self._infos):05d}'
    kinds = {'tokens': self._dtype, 'sentences': np.uint32, 'documents': np.uint32}
    if self._word_borders:
      kinds['words'] = np.uint8
    self._files = {
        name: _NpyFile(stem.with_name(f'{stem.name}.{name}.npy'), kind)
        for name, kind in kinds.items()
    }
    self._files['sentences'].append(np.zeros(1, np.uint32))
    self._files['documents'].append(np.zeros(1, np.uint32))
    self._spare_bits = np.zeros(0, bool)

  def _extend(self, tokens, sentence_ends, document_ends, words) -> None:
    """Appends to the open shard; the ends count from the first of these tokens or sentences."""
    files = self._files
    if files['tokens'].length + len(tokens) >= 2**32:
      raise shards.ShardError(
          f'a shard of {self._split} would exceed 2**32 tokens: split its documents')
    files['sentences'].append(sentence_ends + files['tokens'].length)
    files['documents'].append(document_ends + files['sentences'].length - 1 - len(sentence_ends))
    files['tokens'].append(tokens)
    if words is not None:
      bits = np.concatenate([self._spare_bits, words])
      whole = len(bits) // 8 * 8
      files['words'].append(np.packbits(bits[:whole], bitorder='little'))
      self._spare_bits = bits[whole:]

  def _finish(self) -> None:
    if self._word_borders:
      self._files['words'].append(np.packbits(self._spare_bits, bitorder='little'))
    for file in self._files.values():
      file.close()
    self._infos.append(
        shards.ShardInfo(
            name=f'{self._split}-{len(self._infos):05d}',
            sha256={name: shards.file_sha256(file.path) for name, file in self._files.items()},
            num_documents=self._files['documents'].length - 1,
            num_sentences=self._files['sentences'].length - 1,
            num_tokens=self._files['tokens'].length,
        )
    )
    self._files = None

  def close(self) -> shards.SplitInfo:
    """Ends the last shard, gives all files their final names and says what was written."""
    if self._files is not None:
      self._finish()
    named = []
    for info in self._infos:
      name = f'{info.name}-of-{len(self._infos):05d}'
      for array in info.sha256:
        (self._folder / f'{info.name}.{array}.npy').rename(self._folder / f'{name}.{array}.npy')
      named.append(dataclasses.replace(info, name=name))
    return shards.SplitInfo(
        num_documents=sum(info.num_documents for info in named),
        num_sentences=sum(info.num_sentences for info in named),
        num_tokens=sum(info.num_tokens for info in named),
        files=tuple(named),
    )


def write_manifest(folder: str | os.PathLike, manifest: shards.Manifest) -> None:
  """Makes the folder a data set: the manifest appears whole, by one rename, or not at all."""
  folder = epath.Path(folder)
  text = json.dumps(dataclasses.asdict(manifest), indent=2, ensure_ascii=False, sort_keys=True)
  if shards.is_remote(folder):
    # Buckets write all or nothing.
    (folder / shards.MANIFEST).write_text(text + '\n', encoding='utf-8')
    return
  partial = pathlib.Path(folder) / f'{shards.MANIFEST}.partial'
  with partial.open('w', encoding='utf-8', newline='\n') as file:
    file.write(text + '\n')
    file.flush()
    os.fsync(file.fileno())
  partial.replace(pathlib.Path(folder) / shards.MANIFEST)


def replace_data_set(
    source: str | os.PathLike, folder: str | os.PathLike, manifest: shards.Manifest
) -> None:
  """Makes finished files the data set of a folder, in place of the one that it may hold.

  The old set is touched when all new files are complete on the folder's own file system, and the
  manifest comes last: no moment shows half a set as whole.

  Args:
    source: local folder with the shards and the tokenizer; it may be on another disk.
    folder: the data set's folder, local or gs://.
    manifest: of the new files.

  Raises:
    OSError: e.g. a full disk; the old set is then as it was.
  """
  source, folder = pathlib.Path(source), epath.Path(folder)
  names = _file_names(source)
  incoming = folder / _INCOMING
  _bring(source, incoming)
  _remove_data_set(folder)
  for name in names:
    target = folder / name
    target.parent.mkdir(parents=True, exist_ok=True)
    (incoming / name).replace(target)
  incoming.rmtree()
  write_manifest(folder, manifest)


def _file_names(folder: pathlib.Path) -> list[str]:
  return sorted(p.relative_to(folder).as_posix() for p in folder.rglob('*') if p.is_file())


def _bring(source: pathlib.Path, incoming: epath.Path) -> None:
  """Moves a local folder, by rename where that is possible, else (another disk) by copying."""
  if incoming.exists():  # of a build that was killed
    incoming.rmtree()
  incoming.parent.mkdir(parents=True, exist_ok=True)
  if not shards.is_remote(incoming):
    try:
      source.rename(incoming)
      return
    except OSError as error:
      if error.errno != errno.EXDEV:
        raise
  for name in _file_names(source):
    target = incoming / name
    target.parent.mkdir(parents=True, exist_ok=True)
    with (source / name).open('rb') as reader, target.open('wb') as writer:
      shutil.copyfileobj(reader, writer, _COPY_BYTES)
      if not shards.is_remote(incoming):
        writer.flush()
        os.fsync(writer.fileno())  # The manifest vouches for these bytes.


def _remove_data_set(folder: epath.Path) -> None:
  """Removes a data set's files, the manifest first so that no moment shows half a set as whole."""
  (folder / shards.MANIFEST).unlink(missing_ok=True)
  for split in shards.SPLITS:
    for path in folder.glob(f'{split}-*-of-*.npy'):
      path.unlink()
  if (folder / 'tokenizer').exists():
    (folder / 'tokenizer').rmtree()
