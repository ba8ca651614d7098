"""From the data section of a configuration to the splits that a run reads.

A run is given finished shards, or raw text. Raw text is turned into a tokenizer and shards in the
workdir first, by the same code as the commands `bertjax.data.tokenizer` and `bertjax.data.build`.
"""

import dataclasses
import hashlib

from absl import logging
from etils import epath

from bertjax.data import shards
from bertjax.data.encoding import Tokenizer


class DataError(ValueError):
  """Shards that cannot be trained together; the message names them and the mend."""


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
    """Nats per token of the training splits taken together, weighted by their tokens."""
    tokens = [split.num_tokens for split in self.train]
    pairs = zip(tokens, self.manifests, strict=True)
    return sum(n * manifest.unigram_entropy for n, manifest in pairs) / sum(tokens)


def open_corpora(paths: tuple[str, ...]) -> Corpora:
  """Opens one or several folders of shards.

  Raises:
    ShardError: a folder is not a finished data set.
    DataError: the folders were built with different tokenizers.
  """
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
    vocab_size: int, heldout: float, num_workers: int,
) -> str:
  """Trains a tokenizer on the text and builds shards from it; does nothing where that is done.

  Args:
    workdir: receives `tokenizer/` and `shards/`.
    inputs: files, globs or names as `bertjax.data.build --input`, separated by commas.
    format: of the text.
    language: of the text.
    tokenizer_type: 'wordpiece' or 'sentencepiece'.
    vocab_size: of the tokenizer.
    heldout: share of the documents that is held out.
    num_workers: processes.

  Returns:
    The folder of shards.
  """
  from bertjax.data import build, corpus
  from bertjax.data import tokenizer as tokenizer_lib

  folder, tokenizer_folder = workdir / 'shards', workdir / 'tokenizer'
  if (folder / shards.MANIFEST).exists():
    logging.info('Shards are there already: %s', folder)
    return str(folder)
  patterns = tuple(inputs.split(','))
  if not tokenizer_folder.exists():
    logging.info('Training a %s vocabulary of %d on %s', tokenizer_type, vocab_size, inputs)
    texts = corpus.iter_text(patterns, format, language)
    tokenizer_lib.train(texts, tokenizer_type, vocab_size).save(tokenizer_folder)
  build.build(build.BuildSettings(
      inputs=patterns, tokenizer=str(tokenizer_folder), output=str(folder),
      read=corpus.ReadSettings(format=format, language=language), heldout=heldout,
      num_workers=num_workers))
  return str(folder)
