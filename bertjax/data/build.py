"""Raw text to token shards: `python -m bertjax.data.build --input A --tokenizer B --output C`.

  inputs ── corpus.plan_pieces ──> units of about 4 MB that begin and end where documents do
         ── units.UnitBuilder, in parallel ──> output/.partial/unit-000000/: ids, lengths, hashes
         ── assembly.decide_documents ──> for each document: training, held out, or a duplicate
         ── assembly.assemble, in the order of the units ──> shards, then manifest.json

Each step holds one block, one unit or one bucket of hashes in memory, whatever the corpus' size.
A unit's folder appears whole, by rename, so a build that was killed goes on with the units that
are missing. The units do not depend on the number of workers, so neither do the shards.
"""

import argparse
import collections
import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import pathlib
import shutil
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from absl import logging
from etils import epath

import bertjax
from bertjax.data import assembly, console, corpus, shard_writer, shards, units
from bertjax.data import tokenizer as tokenizer_lib
from bertjax.data.encoding import Tokenizer, TokenizerError
from bertjax.data.units import BuildError

# What a user can mend: the command prints these without a traceback.
_REPORTED = (BuildError, corpus.CorpusError, shards.ShardError, TokenizerError)


@dataclasses.dataclass(frozen=True)
class BuildSettings:
  """All that decides what a build makes.

  Attributes:
    inputs: file names, globs, folders, `tfds:` names or `builtin:docs`.
    tokenizer: a tokenizer's folder, or its vocab.txt or spiece.model.
    output: the data set's folder, local or gs://.
    lowercase: whether text is lower-cased; needed with a bare vocabulary file that has capitals.
    strip_accents: likewise, whether accents are stripped; None is Google's default.
    word_borders: 'none', or 'whitespace': white space in the text separates words for whole-word
      masking (text that was segmented into words beforehand, e.g. Chinese).
    heldout: share of the documents that is held out for evaluation, by a hash of their ids.
    scratch: folder for unfinished work; '' is output/.partial.
    unit_bytes: size of the units in which work is done and kept.
  """

  inputs: tuple[str, ...]
  tokenizer: str
  output: str
  lowercase: bool | None = None
  strip_accents: bool | None = None
  read: corpus.ReadSettings = corpus.ReadSettings()
  word_borders: str = 'none'
  heldout: float = 0.01
  seed: int = 0
  num_workers: int = 1
  overwrite: bool = False
  scratch: str = ''
  unit_bytes: int = corpus.UNIT_BYTES

  def __post_init__(self):
    if not 0 <= self.heldout <= 0.2:
      raise BuildError(f'--heldout {self.heldout} is not a share between 0 and 0.2')
    if self.num_workers < 1:
      raise BuildError(f'--num_workers {self.num_workers}: at least one process must do the work')
    if shards.is_remote(self.output) and not self.scratch:
      raise BuildError('--output is remote: name a local folder for unfinished work by --scratch')


def build(settings: BuildSettings) -> shards.Manifest:
  """Builds a data set and returns its manifest.

  Raises:
    BuildError: settings that cannot be, a worker that died, a disk that is full or not to be
      written to.
    CorpusError, ShardError, TokenizerError: from reading the text or the tokenizer.
  """
  try:
    return _build(settings, epath.Path(settings.output))
  except OSError as error:
    raise BuildError(f'the build of {settings.output} cannot go on: {error}') from error


def _scratch(settings: BuildSettings) -> pathlib.Path:
  return pathlib.Path(settings.scratch or os.path.join(settings.output, '.partial'))


def _build(settings: BuildSettings, output: epath.Path) -> shards.Manifest:
  if output.exists() and not output.is_dir():
    raise BuildError(f'--output {output} is a file; name a folder')
  if (output / shards.MANIFEST).exists() and not settings.overwrite:
    raise BuildError(f'{output} already holds a finished data set; --overwrite replaces it')
  tokenizer = tokenizer_lib.load(
      epath.Path(settings.tokenizer),
      lowercase=settings.lowercase,
      strip_accents=settings.strip_accents,
  )
  sources = [corpus.inspect(name, settings.read) for name in corpus.expand(settings.inputs)]
  _log_formats(sources, settings)
  plan = corpus.plan_pieces(sources, settings.read, settings.unit_bytes)
  folder = _scratch(settings)
  folder.mkdir(parents=True, exist_ok=True)
  with _lock(folder), _kept_or_cleared(folder, output):
    _prepare(folder, _plan_key(plan, tokenizer, settings))
    tokenizer.save(folder / 'tokenizer')
    borders_given = settings.word_borders == 'whitespace'
    units.build_units(plan, tokenizer, settings.read, borders_given, folder, settings.num_workers)
    decisions = assembly.decide_documents(folder, len(plan), settings.heldout, settings.seed)
    if not len(decisions):
      shutil.rmtree(folder)  # There is nothing in it to go on with.
      raise BuildError(f'there is not one sentence in {", ".join(settings.inputs)}')
    splits, tally = assembly.assemble(
        folder, len(plan), decisions, tokenizer.vocab_size, borders_given
    )
    manifest = _manifest(settings, sources, tokenizer, splits, tally)
    _warn(manifest, tally)
    (folder / 'tokenizer').rename(folder / 'assembled' / 'tokenizer')
    shard_writer.replace_data_set(folder / 'assembled', output, manifest)
    shutil.rmtree(folder)
  return manifest


@contextlib.contextmanager
def _lock(folder: pathlib.Path) -> Iterator[None]:
  """Keeps a second build out; the system lets go of the lock however this process ends."""
  with (folder / 'lock').open('w', encoding='utf-8') as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
      raise BuildError(f'another build is at work in {folder}; wait for it or end it') from error
    yield


@contextlib.contextmanager
def _kept_or_cleared(folder: pathlib.Path, output: epath.Path) -> Iterator[None]:
  """After a failure, says what the next run can use of the folder, or removes it."""
  try:
    yield
  except BaseException:
    done = sum('.' not in path.name for path in folder.glob('unit-*'))
    if done:
      logging.info(
          '%d finished unit%s kept in %s: the same command goes on with %s.', done,
          *((' is', folder, 'it') if done == 1 else ('s are', folder, 'them'))
      )
    else:
      shutil.rmtree(folder, ignore_errors=True)
      if output.exists() and not any(output.iterdir()):
        output.rmdir()
    raise


def _plan_key(plan, tokenizer: Tokenizer, settings: BuildSettings) -> str:
  """A hash of all that decides what the units hold: inputs as they are now, and settings."""
  stamps = {}
  for unit in plan:
    for piece in unit:
      if piece.source.name not in stamps:
        stamps[piece.source.name] = _stamp(piece.source)
  decisive = {
      'version': bertjax.__version__,
      'units': [[(*piece.source, piece.start, piece.end) for piece in unit] for unit in plan],
      'stamps': stamps,
      'read': dataclasses.asdict(settings.read),
      'word_borders': settings.word_borders,
      'tokenizer': tokenizer.hash(),
  }
  return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()


def _stamp(source: corpus.Source) -> Any:
  if source.format == 'builtin':
    from bertjax.data import default_corpus

    return default_corpus.fingerprint()
  if source.format == 'tfds':
    return None  # A prepared tfds version does not change; its size shows in the pieces.
  if shards.is_remote(source.name):
    return epath.Path(source.name).stat().mtime
  return os.stat(source.name).st_mtime_ns


def _prepare(folder: pathlib.Path, key: str) -> None:
  """Keeps the work of an interrupted build with the same plan and removes that of any other."""
  path = folder / 'plan.json'
  if path.exists():
    try:
      same = json.loads(path.read_text(encoding='utf-8'))['key'] == key
    except (ValueError, KeyError):
      same = False
    if not same:
      logging.warning(
          'The inputs, the tokenizer or the settings have changed since the interrupted build in '
          '%s: its work is thrown away and the build starts anew.', folder
      )
  else:
    same = False
  for child in folder.iterdir():
    if child.name == 'lock' or (same and child.name.startswith('unit-') and '.' not in child.name):
      continue
    if child.is_dir():
      shutil.rmtree(child)
    else:
      child.unlink()
  path.write_text(json.dumps({'key': key}), encoding='utf-8')


def _log_formats(sources: Sequence[corpus.Source], settings: BuildSettings) -> None:
  counts = collections.Counter(source.format for source in sources)
  found = ', '.join(f'{form} ({count})' for form, count in sorted(counts.items()))
  how = 'detected from names and content' if settings.read.format == 'auto' else 'as asked'
  size = sum(source.size for source in sources) / 1e6
  logging.info('%d inputs, %.1f MB; formats %s: %s.', len(sources), size, how, found)


def _manifest(settings, sources, tokenizer, splits, tally: assembly.Tally) -> shards.Manifest:
  counts = sum(tally.token_counts.values())
  described = {
      'type': tokenizer.type,
      'hash': tokenizer.hash(),
      'vocab_size': tokenizer.vocab_size,
      **tokenizer.switches,
  }
  return shards.Manifest(
      corpus={
          'inputs': list(settings.inputs),
          'num_inputs': len(sources),
          'num_bytes': sum(source.size for source in sources),
          'format': settings.read.format,
          'formats': sorted({source.format for source in sources}),
          'language': settings.read.language,
          'text_field': settings.read.text_field,
          'heldout': settings.heldout,
          'seed': settings.seed,
      },
      tokenizer=described,
      splits=splits,
      duplicates_dropped=tally.duplicates,
      encoding={'policy': settings.read.encoding_errors, 'bad_lines': tally.bad_lines},
      unknown_token_share=float(counts[tokenizer.unk_id] / max(counts.sum(), 1)),
      unigram_entropy=assembly.unigram_entropy(tally.token_counts['train']),
      word_borders=settings.word_borders == 'whitespace',
      content_hash=shards.content_hash(splits, tokenizer.hash()),
      bertjax_version=bertjax.__version__,
  )


def _warn(manifest: shards.Manifest, tally: assembly.Tally) -> None:
  """Says in words what will hurt in training; the shards themselves are sound."""
  documents = sum(split.num_documents for split in manifest.splits.values())
  pairs = documents - tally.one_sentence_documents
  if not pairs:
    logging.warning(
        'None of the %d documents has two sentences: next-sentence prediction would have one '
        'class only (labels IsNext / random: 0 / %d) and teach nothing. If the text has an empty '
        'line after every sentence, remove those; or train with next_sentence="none".',
        documents, documents
    )
  elif tally.one_sentence_documents > documents / 2:
    logging.warning(
        '%d of %d documents have one sentence only: they can give no true next sentence.',
        tally.one_sentence_documents, documents
    )
  if manifest.splits['train'].num_documents < 2:
    logging.warning(
        'The training split has %d document: next-sentence prediction needs a second one to draw '
        'random sentences from. Put an empty line (format "sentences") or a heading (format '
        '"prose") between documents, or train with next_sentence="none".',
        manifest.splits['train'].num_documents
    )
  if not manifest.splits['heldout'].num_documents:
    logging.warning(
        'No document is held out (%d documents, at least %d are needed, and --heldout above 0): '
        'the model can only be evaluated on other data.',
        documents, assembly.MIN_DOCUMENTS_TO_HOLD_OUT
    )
  if manifest.unknown_token_share > 0.05:
    logging.warning(
        '%.1f %% of all tokens are unknown ([UNK]): the tokenizer does not fit this text (another '
        'language or case, or symbols such as emoji glued to words).',
        100 * manifest.unknown_token_share
    )
  if tally.bad_lines:
    logging.warning('%d lines held bytes that are not UTF-8 or halves of surrogate pairs.',
                    tally.bad_lines)


def _report(manifest: shards.Manifest, output: str) -> None:
  for name, split in manifest.splits.items():
    logging.info(
        '%s: %s documents, %s sentences, %s tokens in %d shards', name,
        f'{split.num_documents:,}', f'{split.num_sentences:,}', f'{split.num_tokens:,}',
        len(split.files)
    )
  logging.info(
      'Dropped %d duplicate documents; [UNK] share %.3f %%; unigram entropy %.3f nats/token.',
      manifest.duplicates_dropped, 100 * manifest.unknown_token_share, manifest.unigram_entropy
  )
  logging.info('Data set %s in %s', manifest.content_hash[:16], output)


def _parse(argv: Sequence[str] | None) -> BuildSettings:
  parser = argparse.ArgumentParser(
      prog='python -m bertjax.data.build',
      description='Build token shards and manifest.json from raw text.',
      epilog=corpus.__doc__,
      formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument(
      '--input', nargs='+', required=True,
      help='files, quoted globs, folders, gs:// forms, tfds:NAME[:split][:field], builtin:docs',
  )
  parser.add_argument('--tokenizer', required=True, help='its folder, vocab.txt or spiece.model')
  parser.add_argument('--output', required=True, help='folder of the data set, local or gs://')
  for name, negative in (('lowercase', 'no_lowercase'), ('strip_accents', 'keep_accents')):
    text = 'only for a vocabulary file without tokenizer_config.json'
    parser.add_argument(f'--{name}', action='store_true', default=None, help=text)
    parser.add_argument(f'--{negative}', dest=name, action='store_false', help=text)
  parser.add_argument('--num_workers', type=int, default=1, help='processes (default 1)')
  parser.add_argument('--format', choices=corpus.FORMATS, default='auto')
  parser.add_argument('--language', default='en', help='of prose, e.g. en, de, zh (default en)')
  parser.add_argument('--text_field', default='text', help='key of the text in jsonl and tfds')
  parser.add_argument(
      '--encoding_errors', choices=corpus.ENCODING_ERRORS, default='strict',
      help='bytes that are not UTF-8, surrogates in JSON: stop and say where (strict), or replace '
      'or ignore and count',
  )
  parser.add_argument(
      '--word_borders', choices=('none', 'whitespace'), default='none',
      help='whitespace: words for whole-word masking are what white space in the text separates',
  )
  parser.add_argument('--heldout', type=float, default=0.01, help='share held out (default 0.01)')
  parser.add_argument('--seed', type=int, default=0, help='of the choice of held-out documents')
  parser.add_argument('--overwrite', action='store_true', help='replace a finished data set')
  parser.add_argument('--scratch', default='', help='local folder for unfinished work')
  parser.add_argument('--unit_bytes', type=int, default=corpus.UNIT_BYTES, help=argparse.SUPPRESS)
  options = vars(parser.parse_args(argv))
  options['inputs'] = tuple(options.pop('input'))
  read = corpus.ReadSettings(
      **{field.name: options.pop(field.name) for field in dataclasses.fields(corpus.ReadSettings)}
  )
  return BuildSettings(read=read, **options)


def main(argv: Sequence[str] | None = None) -> int:
  """The command; returns its exit status: 0, 2 for input that must be mended, 130 interrupted."""
  console.log_plainly()
  try:
    settings = _parse(argv)
    _report(build(settings), settings.output)
  except _REPORTED as error:
    print(f'error: {error}', file=sys.stderr)
    return 2
  except KeyboardInterrupt:
    print('interrupted', file=sys.stderr)
    return 130
  return 0


if __name__ == '__main__':
  sys.exit(main())
