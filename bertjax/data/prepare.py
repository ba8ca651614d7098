"""From the data section of a configuration to the splits that a run reads.

A run is given finished shards, or raw text. Raw text is turned into a tokenizer and shards in the
workdir first, by the same code as the commands `bertjax.data.tokenizer` and `bertjax.data.build`.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from absl import logging
from etils import epath

from bertjax.data import shards
from bertjax.data.encoding import Tokenizer, write_files

# Beside a trained tokenizer: what it was trained for. It shows that the files were made here.
_REQUEST = 'request.json'
_SHARDS_FROM = ('inputs', 'format', 'language', 'heldout')
_BUILT = 'bertjax shards are built'


class DataError(ValueError):
  """Data that cannot be trained on, or not together; the message names it and the mend."""


@dataclasses.dataclass(frozen=True)
class Corpora:
  """The data of a run, opened.

  Attributes:
    manifests: one for each folder of shards.
    train: training splits, in the same order.
    heldout: held-out splits of the folders that have one.
    tokenizer: the one that all folders share.
    tokenizer_folder: where its files lie.
    content_hash: identity of all the data together.
  """

  manifests: tuple[shards.Manifest, ...]
  train: tuple[shards.Split, ...]
  heldout: tuple[shards.Split, ...]
  tokenizer: Tokenizer
  tokenizer_folder: epath.Path
  content_hash: str

  @property
  def unigram_entropy(self) -> float:
    """Mean of the training splits' entropies in nats per token, weighted by their tokens.

    A model that knows each split's frequencies of ids reaches it on the splits joined in proportion
    to their tokens. The entropy of the joined frequencies is higher where the splits differ.
    """
    tokens = [split.num_tokens for split in self.train]
    pairs = zip(tokens, self.manifests, strict=True)
    return sum(n * manifest.unigram_entropy for n, manifest in pairs) / sum(tokens)


def open_corpora(paths: tuple[str, ...]) -> Corpora:
  """Opens one or several folders of shards.

  Raises:
    ShardError: a folder is not a finished data set.
    DataError: the folders were built with different tokenizers, or cannot be read.
  """
  try:
    return _open(paths)
  except OSError as error:
    raise DataError(f'cannot read the shards {", ".join(paths)}: {error}') from error


def _open(paths: tuple[str, ...]) -> Corpora:
  manifests = tuple(shards.load_manifest(path) for path in paths)
  for path, manifest in zip(paths[1:], manifests[1:], strict=True):
    if manifest.tokenizer['hash'] != manifests[0].tokenizer['hash']:
      raise DataError(f'{path} was built with another tokenizer than {paths[0]}; build both with '
                      'the same --tokenizer')
  hashes = [manifest.content_hash for manifest in manifests]
  joined = hashlib.sha256('\n'.join(hashes).encode()).hexdigest()
  return Corpora(
      manifests=manifests,
      train=tuple(shards.open_split(path, 'train') for path in paths),
      heldout=tuple(shards.open_split(path, 'heldout')
                    for path, manifest in zip(paths, manifests, strict=True)
                    if manifest.splits['heldout'].num_documents),
      tokenizer=shards.load_tokenizer(paths[0]),
      tokenizer_folder=epath.Path(paths[0]) / 'tokenizer',
      content_hash=hashes[0] if len(hashes) == 1 else joined)


def build_from_text(
    workdir: epath.Path, *, inputs: str, format: str, language: str, tokenizer_type: str,
    vocab_size: int, heldout: float, num_workers: int, process_index: int = 0,
    process_count: int = 1, barrier: Callable[[str], None] | None = None,
) -> str:
  """Trains a tokenizer on the text and builds shards from it; does nothing where that is done.

  Of several processes the first does it and the others wait.

  Args:
    workdir: receives `tokenizer/` and `shards/`; all processes see it.
    inputs: files, globs or names as `bertjax.data.build --input`, separated by commas.
    format: of the text.
    language: of the text.
    tokenizer_type: 'wordpiece' or 'sentencepiece'.
    vocab_size: of the tokenizer.
    heldout: share of the documents that is held out.
    num_workers: processes that this one starts to build.
    process_index: of this process in the run.
    process_count: of the run.
    barrier: returns when all processes have called it with the same name; needed for several.

  Returns:
    The folder of shards.

  Raises:
    DataError: the workdir holds data built for other settings than these; or this process waited
      for shards that are not there.
    BuildError, CorpusError, ShardError, TokenizerError: as `bertjax.data.build.build`.
  """
  asked = {
      'inputs': inputs.split(','), 'format': format, 'language': language,
      'tokenizer_type': tokenizer_type, 'vocab_size': vocab_size, 'heldout': heldout,
  }
  if process_count == 1:
    _build_once(workdir, asked, num_workers)
    return str(workdir / 'shards')
  if barrier is None:
    raise ValueError(f'{process_count} processes need a barrier to wait for the build')
  if process_index == 0:
    try:
      _build_once(workdir, asked, num_workers)
    except Exception:
      barrier(_BUILT)  # The others go on, and end as well for want of shards.
      raise
  else:
    logging.info('Waiting for process 0 to make the shards in %s', workdir)
  barrier(_BUILT)
  if not _is_built(workdir, asked):
    raise DataError(
        f'process {process_index} finds no shards in {workdir / "shards"}: either process 0 could '
        'not build them (its log says why), or the workdir is not a folder that all processes share'
    )
  return str(workdir / 'shards')


def _build_once(workdir: epath.Path, asked: dict[str, Any], num_workers: int) -> None:
  from bertjax.data import build, corpus  # here, since finished shards need neither

  folder, tokenizer_folder = workdir / 'shards', workdir / 'tokenizer'
  try:
    if _is_built(workdir, asked):
      logging.info('Shards are there already: %s', folder)
      return
    _train_tokenizer(tokenizer_folder, {k: v for k, v in asked.items() if k != 'heldout'})
    with _scratch(folder) as scratch:
      build.build(build.BuildSettings(
          inputs=tuple(asked['inputs']), tokenizer=str(tokenizer_folder), output=str(folder),
          read=corpus.ReadSettings(format=asked['format'], language=asked['language']),
          heldout=asked['heldout'], num_workers=num_workers, scratch=scratch))
  except OSError as error:
    raise build.BuildError(f'cannot make tokenizer and shards in {workdir}: {error}') from error


@contextlib.contextmanager
def _scratch(folder: epath.Path) -> Iterator[str]:
  """Where to work on shards: '' (beside them), or a local folder if theirs is a bucket."""
  if not shards.is_remote(folder):
    yield ''
    return
  with tempfile.TemporaryDirectory(prefix='bertjax-') as local:
    logging.info('%s is remote: the shards are made in %s and copied', folder, local)
    yield os.path.join(local, 'build')  # which the build itself removes


def _is_built(workdir: epath.Path, asked: dict[str, Any]) -> bool:
  """Whether the workdir holds finished shards.

  Raises:
    DataError: it does, but they were built for other settings.
  """
  folder = workdir / 'shards'
  if not (folder / shards.MANIFEST).exists():
    return False
  manifest = shards.load_manifest(folder)
  found = {name: manifest.corpus.get(name) for name in _SHARDS_FROM}
  found['tokenizer_type'] = manifest.tokenizer['type']
  # A small text fills less than it is asked to, so what was asked counts where it is known.
  trained_for = _read_request(workdir / 'tokenizer')
  found['vocab_size'] = trained_for.get('vocab_size', manifest.tokenizer['vocab_size'])
  wrong = [
      f'{name}: {found[name]!r} there, {wanted!r} asked for'
      for name, wanted in asked.items() if found[name] != wanted
  ]
  if wrong:
    lines = '\n  '.join(wrong)
    raise DataError(
        f'{folder} was built for other settings:\n  {lines}\nTake a new --workdir, set these back, '
        f'or remove {folder} to build anew.')
  return True


def _read_request(folder: epath.Path) -> dict[str, Any]:
  path = folder / _REQUEST
  return json.loads(path.read_text(encoding='utf-8')) if path.exists() else {}


def _train_tokenizer(folder: epath.Path, asked: dict[str, Any]) -> None:
  """Leaves the tokenizer that is asked for in the folder, whatever an earlier run has left there.

  The request is written first and tokenizer_config.json last, so a tokenizer counts if it has both.

  Raises:
    DataError: the folder holds a tokenizer that was not trained here.
  """
  from bertjax.data import corpus
  from bertjax.data import tokenizer as tokenizer_lib

  # The order in which they are removed: what is left of a tokenizer must not count.
  files = [folder / name for name in (tokenizer_lib.CONFIG, *tokenizer_lib.VOCABULARIES)]
  trained_for = _read_request(folder)
  if trained_for == asked and files[0].exists():
    logging.info('The tokenizer is there already: %s', folder)
    return
  if not trained_for and any(file.exists() for file in files):
    raise DataError(
        f'{folder} holds a tokenizer that was not trained here for data.input. To use it, build '
        'shards with it (python -m bertjax.data.build --tokenizer) and name them in data.path; '
        f'else remove {folder}')
  if trained_for:
    logging.info('%s is unfinished or was trained for other settings: trained anew', folder)
  logging.info('Training a %s vocabulary of %d on %s', asked['tokenizer_type'],
               asked['vocab_size'], ','.join(asked['inputs']))
  texts = corpus.iter_text(asked['inputs'], asked['format'], asked['language'])
  tokenizer = tokenizer_lib.train(texts, asked['tokenizer_type'], asked['vocab_size'])
  for file in files:
    file.unlink(missing_ok=True)
  write_files(folder, {_REQUEST: json.dumps(asked, indent=2).encode() + b'\n'})
  tokenizer.save(folder)
