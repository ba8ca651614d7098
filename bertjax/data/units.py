"""Units of work: pieces of text to arrays of ids, in parallel and one folder each.

A unit's folder appears whole, by rename, so that a build that was killed can go on with the units
that are missing. What a unit holds depends on its pieces, the tokenizer and the reading alone.
"""

import collections
import contextlib
import hashlib
import json
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent import futures
from typing import BinaryIO

import numpy as np
from absl import logging
from jaxtyping import Int, UInt

from bertjax.data import borders, corpus, shards
from bertjax.data import tokenizer as tokenizer_lib
from bertjax.data.encoding import Tokenizer

HASH_BYTES = 16


class BuildError(RuntimeError):
  """A build that cannot start or go on; the message says why and what to do."""


class WorkerError(BuildError):
  """A worker process died."""


class UnitBuilder:
  """Encodes units; one lives in each worker, so that the tokenizer's memo of words stays warm."""

  def __init__(
      self,
      tokenizer: Tokenizer,
      read: corpus.ReadSettings,
      word_borders: bool,
      folder: str | os.PathLike,
  ):
    self._tokenizer, self._read, self._word_borders = tokenizer, read, word_borders
    self._folder = pathlib.Path(folder)
    self._dtype = shards.token_dtype(tokenizer.vocab_size)

  def build(self, number: int, unit: Sequence[corpus.Piece]) -> None:
    """Writes folder/unit-NNNNN: raw arrays of ids, lengths and hashes, and info.json.

    Raises:
      CorpusError: from reading the text.
    """
    final = unit_folder(self._folder, number)
    partial = final.with_name(f'{final.name}.{os.getpid()}.partial')
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    stats = corpus.ReadStats()
    with contextlib.ExitStack() as stack:
      names = ['tokens', 'sentences', 'documents', 'hashes', *(['words'] * self._word_borders)]
      files = {name: stack.enter_context((partial / name).open('wb')) for name in names}
      documents = _DocumentEnds()
      for piece in unit:
        for block in corpus.read_piece(piece, self._read, stats):
          self._write_block(block, files, documents)
        documents.end(files)
      for file in files.values():
        file.flush()
        os.fsync(file.fileno())  # The rename below vouches for these bytes.
    sizes = {name: (partial / name).stat().st_size for name in names}
    info = {'bad_lines': stats.bad_lines, 'sizes': sizes}
    (partial / 'info.json').write_text(json.dumps(info), encoding='utf-8')
    partial.rename(final)

  def _write_block(self, block: corpus.Block, files, documents: '_DocumentEnds') -> None:
    if not block.sentences and not len(block.document_ends):
      return
    words = None
    if self._word_borders:
      ids, counts, words = borders.encode_words(self._tokenizer, block.sentences)
    else:
      ids, counts = self._tokenizer.encode_lines(block.sentences)
    tokens = ids.astype(self._dtype)
    # Sentences of nothing but control characters have no tokens: they are no sentences.
    kept = counts > 0
    ends = np.concatenate([[0], np.cumsum(kept)])[block.document_ends]
    lengths = counts[kept]
    documents.write(tokens, lengths, ends, files)
    files['tokens'].write(tokens.data)
    files['sentences'].write(lengths.astype(np.uint32).data)
    if words is not None:
      files['words'].write(words.data)


class _DocumentEnds:
  """Counts and hashes documents that may run over several blocks."""

  def __init__(self):
    self._hash = hashlib.blake2b(digest_size=HASH_BYTES)
    self._open = 0  # Sentences so far of the document that the last block left unfinished.

  def write(
      self,
      tokens: UInt[np.ndarray, 'tokens'],
      lengths: Int[np.ndarray, 'sentences'],
      ends: Int[np.ndarray, 'ends'],
      files: dict[str, BinaryIO],
  ) -> None:
    """Takes a block; `ends` counts its sentences up to the end of each document."""
    ends = np.unique(ends)
    ends = ends[ends > 0] if not self._open else ends
    token_ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])[ends].tolist()
    data, size = memoryview(tokens).cast('B') if len(tokens) else b'', tokens.itemsize
    first, digests = 0, []
    for end in token_ends:
      self._hash.update(data[first * size : end * size])
      digests.append(self._hash.digest())
      self._hash = hashlib.blake2b(digest_size=HASH_BYTES)
      first = end
    self._hash.update(data[first * size :])
    if len(ends):
      counts = np.diff(ends, prepend=-self._open)
      self._open = len(lengths) - int(ends[-1])
      files['documents'].write(counts.astype(np.uint32).data)
      files['hashes'].write(b''.join(digests))
    else:
      self._open += len(lengths)

  def end(self, files: dict[str, BinaryIO]) -> None:
    """A piece is at its end, and with it a document."""
    if self._open:
      files['documents'].write(np.uint32(self._open).tobytes())
      files['hashes'].write(self._hash.digest())
    self.__init__()


def unit_folder(folder: pathlib.Path, number: int) -> pathlib.Path:
  return folder / f'unit-{number:06d}'


# --- Running units ---------------------------------------------------------------------------


class _Progress:
  """A line on standard error with the share done, MB/s and the time left."""

  def __init__(self, total: int, done: int):
    self._total, self._done, self._resumed = max(total, 1), done, done
    self._start = self._shown = time.monotonic()

  def add(self, size: int) -> None:
    self._done += size
    now = time.monotonic()
    terminal = sys.stderr.isatty()
    if now - self._shown < (0.5 if terminal else 10) and self._done < self._total:
      return
    self._shown = now
    rate = max((self._done - self._resumed) / max(now - self._start, 1e-3), 1)
    left = int((self._total - self._done) / rate)
    text = (
        f'build: {self._done / 1e6:,.1f} of {self._total / 1e6:,.1f} MB '
        f'({self._done / self._total:.0%}), {rate / 1e6:.1f} MB/s, '
        f'ETA {left // 3600}:{left // 60 % 60:02d}:{left % 60:02d}'
    )
    last = self._done >= self._total
    print(f'\r{text}   ' if terminal else text, end='\n' if last or not terminal else '',
          file=sys.stderr, flush=True)


_worker: UnitBuilder | None = None


def _start_worker(tokenizer: str, *args) -> None:
  """Runs once in each worker process."""
  global _worker
  # A parent that was killed can tell its workers nothing: they watch it.
  threading.Thread(target=_exit_with_parent, daemon=True).start()
  _worker = UnitBuilder(tokenizer_lib.load(tokenizer), *args)


def _exit_with_parent() -> None:
  multiprocessing.connection.wait([multiprocessing.parent_process().sentinel])
  os._exit(1)


def _run_unit(number: int, unit: Sequence[corpus.Piece]) -> None:
  _worker.build(number, unit)


def build_units(
    units: Sequence[Sequence[corpus.Piece]],
    tokenizer: Tokenizer,
    read: corpus.ReadSettings,
    word_borders: bool,
    folder: pathlib.Path,
    num_workers: int,
) -> None:
  """Makes all units that the folder does not hold yet; it holds the tokenizer's folder as well.

  Raises:
    CorpusError: text that cannot be read; the message says where.
    WorkerError: a worker process died.
  """
  sizes = [sum(_piece_bytes(piece) for piece in unit) for unit in units]
  missing = [number for number in range(len(units)) if not _is_whole(folder, number)]
  progress = _Progress(sum(sizes), sum(sizes) - sum(sizes[number] for number in missing))
  if len(missing) < len(units):
    done = len(units) - len(missing)
    logging.info('Going on with an interrupted build: %d of %d units are done.', done, len(units))
  arguments = (read, word_borders, folder)
  if num_workers == 1 or len(missing) < 2:
    builder = UnitBuilder(tokenizer, *arguments)
    for number in missing:
      builder.build(number, units[number])
      progress.add(sizes[number])
    return
  arguments = (os.fspath(folder / 'tokenizer'), *arguments)
  with contextlib.closing(_run_parallel(units, missing, num_workers, arguments)) as done_units:
    for number in done_units:
      progress.add(sizes[number])


def _run_parallel(units, missing: list[int], num_workers: int, arguments) -> Iterator[int]:
  """Yields the number of each unit as it is done."""
  # Spawned, not forked: threads of the parent (TensorFlow's, TensorStore's) do not survive a fork.
  pool = futures.ProcessPoolExecutor(
      min(num_workers, len(missing)),
      mp_context=multiprocessing.get_context('spawn'),
      initializer=_start_worker,
      initargs=arguments,
  )
  waiting = collections.deque(missing)
  running: dict[futures.Future, int] = {}
  try:
    while waiting or running:
      # Not all at once: a large corpus has tens of thousands of units.
      while waiting and len(running) < 2 * num_workers:
        number = waiting.popleft()
        running[_submit(pool, number, units[number])] = number
      for future in futures.wait(running, return_when=futures.FIRST_COMPLETED).done:
        number = running.pop(future)
        error = future.exception()
        if error and not isinstance(error, (corpus.CorpusError, OSError, futures.BrokenExecutor)):
          names = ', '.join(dict.fromkeys(piece.source.name for piece in units[number]))
          raise WorkerError(f'a worker failed on unit {number} ({names}): {error!r}') from error
        future.result()
        yield number
  except futures.BrokenExecutor as error:
    raise WorkerError(
        'a worker process died without a word (killed, out of memory?): run the same command '
        'again, with fewer --num_workers if memory is short'
    ) from error
  finally:
    if any(future.running() for future in running):
      logging.info('finishing the units at work ...')
    pool.shutdown(wait=True, cancel_futures=True)


def _submit(
    pool: futures.Executor, number: int, unit: Sequence[corpus.Piece]
) -> futures.Future:
  try:
    with _hold_interrupt():  # It starts workers, too.
      return pool.submit(_run_unit, number, unit)
  except (OSError, ValueError) as error:
    # A worker that dies while the next is started takes the pipes of that with it.
    raise futures.BrokenExecutor(f'no worker can be started: {error}') from error


@contextlib.contextmanager
def _hold_interrupt() -> Iterator[None]:
  """Holds Ctrl-C back until the end of the block, and from processes started in it for ever.

  Only the parent is to hear it, and ends the pool. A process that has just been started is too
  young to say so itself; it inherits the blocked signal.
  """
  heard: list[int] = []
  # Other threads have the signal open, and in Python the main one answers for them.
  main = threading.current_thread() is threading.main_thread()
  before = signal.signal(signal.SIGINT, lambda number, _: heard.append(number)) if main else None
  blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
  try:
    yield
  finally:
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    if main:
      signal.signal(signal.SIGINT, before)
  if heard:
    signal.raise_signal(signal.SIGINT)


def _piece_bytes(piece: corpus.Piece) -> int:
  if piece.source.format == 'tfds':
    return corpus.UNIT_BYTES
  return piece.end - piece.start


def _is_whole(folder: pathlib.Path, number: int) -> bool:
  """Whether a unit is there and of the recorded size; what else bears its name is removed."""
  path = unit_folder(folder, number)
  if not path.exists():
    return False
  try:
    sizes = json.loads((path / 'info.json').read_text(encoding='utf-8'))['sizes']
    if all((path / name).stat().st_size == size for name, size in sizes.items()):
      return True
  except (OSError, ValueError, KeyError):
    pass  # A power cut can leave the rename without the bytes: the unit is made again.
  shutil.rmtree(path)
  return False
