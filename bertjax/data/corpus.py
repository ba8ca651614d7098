"""Readers: from files of text to documents of sentences, streamed in blocks.

Four formats, all also gzipped (.gz) and, through etils.epath, from gs://:

  sentences  one sentence a line; a line that is empty after stripping white space ends a document
             (the format of google-research/bert create_pretraining_data.py)
  prose      running text, split into sentences by the package sentencex. A document ends at the end
             of a file, before a heading (Markdown '# ' and '## ', WikiText ' = Title = ',
             'CHAPTER IV' or '第十回' at the head of a line) and, once it is longer than
             100,000 characters, at the end of a paragraph. Headings that follow one
             another open one document. A paragraph is a line, or in hard-wrapped text everything up
             to an empty line.
  jsonl      one JSON object a line; its text field is one document of prose
  tfds       `tfds:NAME[:split][:field]`, a tensorflow-datasets data set; each example is one
             document of prose

and `builtin:docs`, the embedded default corpus (bertjax.data.default_corpus).

Text is read in pieces: byte ranges that begin and end where documents do, so that large files can
be read by several processes and the pieces' results put together in order give the same whatever
the number of processes. Nothing here holds more than a block of a piece in memory.
"""

import codecs
import contextlib
import dataclasses
import glob
import gzip
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath
from jaxtyping import Int64

from bertjax.data import prose

FORMATS = ('auto', 'sentences', 'prose', 'jsonl')
ENCODING_ERRORS = ('strict', 'replace', 'ignore')
BUILTIN = 'builtin:docs'

UNIT_BYTES = 4 * 2**20
_BLOCK_BYTES = 2**18
_SAMPLE_BYTES = 2**16
_SURROGATE = re.compile('[\ud800-\udfff]')
_TFDS = re.compile(
    r'tfds:(?P<name>[^:\[]+(?::[\d.*]+)?)(?::(?P<split>[^:\[]+(?:\[[^\]]*\])?))?(?::(?P<field>\w+))?$'
)


class CorpusError(ValueError):
  """An input that cannot be read; the message names the file, where possible the line, and how
  to mend it."""


@dataclasses.dataclass(frozen=True)
class ReadSettings:
  """How text is read.

  Attributes:
    format: 'auto' (by name and content, file by file), 'sentences', 'prose' or 'jsonl'.
    language: code of the language for splitting prose into sentences, e.g. 'en', 'zh'.
    text_field: key of the text in JSON lines and in tensorflow-datasets examples.
    encoding_errors: bytes that are not UTF-8, and the halves of surrogate pairs that JSON can
      hold: 'strict' stops and says where; 'replace' puts U+FFFD and 'ignore' nothing in their
      place, and their lines are counted.
  """

  format: str = 'auto'
  language: str = 'en'
  text_field: str = 'text'
  encoding_errors: str = 'strict'

  def __post_init__(self):
    if self.format not in FORMATS:
      raise CorpusError(f'format {self.format!r} is none of {", ".join(FORMATS)}')
    if self.encoding_errors not in ENCODING_ERRORS:
      raise CorpusError(
          f'encoding_errors {self.encoding_errors!r} is none of {", ".join(ENCODING_ERRORS)}'
      )
    # sentencex falls back to English without a word, and does not say which codes it knows.
    if not re.fullmatch(r'[a-z]{2,3}(-[a-z]+)*', self.language):
      raise CorpusError(
          f'language {self.language!r} is not a code in small letters, such as en, de or zh'
      )


@dataclasses.dataclass
class ReadStats:
  """What reading has met so far."""

  bad_lines: int = 0


class Source(NamedTuple):
  """One input with its format decided.

  `wrapped` says that paragraphs of prose run over several lines, up to an empty one. `size` is in
  bytes as stored.
  """

  name: str
  format: str
  wrapped: bool
  size: int


class Piece(NamedTuple):
  """A part of one source that begins and ends where documents do.

  `start` and `end` are byte offsets; for tfds the number of this part and of all parts; a source
  that cannot be cut has 0 and its size.
  """

  source: Source
  start: int
  end: int


class Block(NamedTuple):
  """Some consecutive sentences of a piece.

  `document_ends` counts sentences of the block: a document ends after the first document_ends[i]
  of them. Two equal ends, or an end at 0, close nothing more and are harmless.
  """

  sentences: list[str]
  document_ends: Int64[np.ndarray, 'ends']


# --- Finding inputs and their formats --------------------------------------------------------


def expand(patterns: Sequence[str]) -> list[str]:
  """Names of all inputs, in the order of the patterns and sorted within each.

  Args:
    patterns: file names, globs (`**` crosses folders), folders (every file below them), gs://
      forms of these, `tfds:NAME[:split][:field]` or `builtin:docs`.

  Raises:
    CorpusError: if a pattern matches nothing.
  """
  names: list[str] = []
  for pattern in patterns:
    found = [pattern] if _is_named_corpus(pattern) else _expand_files(pattern)
    if not found:
      raise CorpusError(f'no file matches --input {pattern!r}; check the path, quote the pattern')
    names += found
  return list(dict.fromkeys(names))


def _is_named_corpus(name: str) -> bool:
  return name == BUILTIN or name.startswith('tfds:')


def _expand_files(pattern: str) -> list[str]:
  path = epath.Path(pattern)
  if path.is_file():
    return [pattern]
  if path.is_dir():
    return _visible_files(_walk(path))
  if '://' not in pattern:
    return sorted(name for name in glob.glob(pattern, recursive=True) if os.path.isfile(name))
  parts = re.split(r'/(?=[^/]*[*?\[])', pattern, maxsplit=1)
  return _visible_files(epath.Path(parts[0]).glob(parts[1])) if len(parts) == 2 else []


def _walk(folder: epath.Path) -> Iterator[epath.Path]:
  for path in folder.iterdir():
    if path.is_dir():
      yield from _walk(path)
    else:
      yield path


def _visible_files(paths: Iterable[epath.Path]) -> list[str]:
  return sorted(os.fspath(p) for p in paths if p.is_file() and not p.name.startswith('.'))


def inspect(name: str, settings: ReadSettings) -> Source:
  """Decides an input's format, from its name and its first 64 kB where settings say 'auto'."""
  if name == BUILTIN:
    return Source(name, 'builtin', False, 1)
  if name.startswith('tfds:'):
    if not _TFDS.match(name):
      raise CorpusError(f'{name!r} is not of the form tfds:NAME[:split][:field]')
    return Source(name, 'tfds', False, 1)
  size = epath.Path(name).stat().length
  if settings.format == 'sentences' or settings.format == 'jsonl':
    return Source(name, settings.format, False, size)
  with _open(name) as file:
    sample = _read(file, _SAMPLE_BYTES, name)
  lines = sample.removeprefix(codecs.BOM_UTF8).decode('utf-8', 'replace').split('\n')
  lines = lines[:-1] if len(lines) > 1 and len(sample) == _SAMPLE_BYTES else lines
  wrapped = prose.is_wrapped(lines)
  form = settings.format
  if form == 'auto':
    form = _guess_format(name, lines, wrapped, settings.language)
  return Source(name, form, wrapped and form == 'prose', size)


def _guess_format(name: str, lines: list[str], wrapped: bool, language: str) -> str:
  filled = [line.strip() for line in lines if line.strip()]
  if re.search(r'\.(jsonl|ndjson|json)(\.gz)?$', name) or (filled and _is_object(filled[0])):
    return 'jsonl'
  # A line 'CHAPTER I' may stand among sentences; Markdown is prose.
  if wrapped or any(re.match(r'#{1,2} +\S', line) for line in filled):
    return 'prose'
  # Lines of several sentences each are paragraphs.
  sentences = sum(len(prose.split_sentences(line, language)) for line in filled)
  return 'prose' if sentences > 1.5 * len(filled) else 'sentences'


def _is_object(line: str) -> bool:
  try:
    return line.startswith('{') and isinstance(json.loads(line), dict)
  except ValueError:
    return False


# --- Cutting inputs into pieces --------------------------------------------------------------


def plan_pieces(
    sources: Sequence[Source], settings: ReadSettings, unit_bytes: int = UNIT_BYTES
) -> list[list[Piece]]:
  """Cuts the sources into units of work of about `unit_bytes`, each a list of pieces, in order.

  The cuts depend on the inputs and on unit_bytes alone. A piece ends where a document ends, so a
  unit can be longer than asked; small files share a unit.
  """
  units: list[list[Piece]] = []
  filled = 0
  for source in sources:
    for piece, size in _cut(source, settings, unit_bytes):
      if not units or filled + size > unit_bytes:
        units.append([])
        filled = 0
      units[-1].append(piece)
      filled += size
  return units


def _cut(source: Source, settings: ReadSettings, unit_bytes: int) -> Iterator[tuple[Piece, int]]:
  """The pieces of one source with their sizes in bytes."""
  if not source.size:
    return
  if source.format == 'tfds':
    size = _tfds_bytes(source.name)
    count = max(1, round(size / unit_bytes))
    for number in range(count):
      yield Piece(source, number, count), unit_bytes
  elif source.format == 'builtin' or source.name.endswith('.gz') or source.size <= unit_bytes:
    # A gzip stream can only be read from its beginning.
    yield Piece(source, 0, source.size), source.size
  else:
    with epath.Path(source.name).open('rb') as file:
      start = 0
      while start < source.size:
        end = source.size
        if start + 1.5 * unit_bytes < source.size:
          end = _next_border(file, start + unit_bytes, source)
        yield Piece(source, start, end), end - start
        start = end


def _next_border(file, offset: int, source: Source) -> int:
  """The first byte offset after `offset` at which a document can begin."""
  file.seek(offset)
  position = offset + len(file.readline())  # `offset` may lie within a line.
  paragraph = 0
  while line := file.readline():
    blank = not line.strip()
    if source.format == 'jsonl':
      return position
    if source.format == 'sentences':
      # Python's strip of text knows more white space than that of bytes: U+3000 and the like.
      if blank or not line.decode('utf-8', 'replace').strip():
        return position + len(line)
    else:
      if prose.HEADING.match(line.decode('utf-8', 'replace')):
        return position
      if blank or not source.wrapped:
        paragraph = position + len(line)
      if paragraph and position - offset > prose.MAX_DOCUMENT:
        return paragraph  # As reading does with a document that has grown too long.
    position += len(line)
  return source.size


# --- Reading ---------------------------------------------------------------------------------


def read_piece(
    piece: Piece, settings: ReadSettings, stats: ReadStats | None = None
) -> Iterator[Block]:
  """Reads a piece in blocks of about 256 kB; the end of the last block ends a document.

  Raises:
    CorpusError: bytes that are not UTF-8 (or in JSON a lone surrogate) under the strict policy, a
      line that is not JSON or has no text, a damaged gzip file, a tfds data set that cannot be
      read.
  """
  stats = stats or ReadStats()
  readers = {
      'sentences': _read_sentences,
      'prose': _read_prose,
      'jsonl': _read_jsonl,
      'tfds': _read_tfds,
      'builtin': _read_builtin,
  }
  yield from readers[piece.source.format](piece, settings, stats)


def iter_text(
    patterns: Sequence[str],
    format: str = 'auto',
    language: str = 'en',
    text_field: str = 'text',
    encoding_errors: str = 'strict',
) -> Iterator[str]:
  """All sentences of the inputs in order, for training a tokenizer; see `expand` for `patterns`.

  Raises:
    CorpusError: as `expand` and `read_piece`; also if there is not one sentence.
  """
  settings = ReadSettings(format, language, text_field, encoding_errors)
  empty = True
  for source in [inspect(name, settings) for name in expand(patterns)]:
    for piece, _ in _cut(source, settings, UNIT_BYTES):
      for block in read_piece(piece, settings):
        empty = empty and not block.sentences
        yield from block.sentences
  if empty:
    raise CorpusError(f'there is no text in {", ".join(patterns)}')


def _read_sentences(piece: Piece, settings: ReadSettings, stats: ReadStats) -> Iterator[Block]:
  for text, _ in _text_blocks(piece, settings, stats):
    lines = [line.strip() for line in text.split('\n')]
    filled = np.fromiter(map(bool, lines), bool, len(lines))
    # The text's last line end makes one more, empty line that separates nothing.
    blank = np.flatnonzero(~filled[:-1]) if text.endswith('\n') else np.flatnonzero(~filled)
    yield Block([line for line in lines if line], np.cumsum(filled, dtype=np.int64)[blank])


def _read_prose(piece: Piece, settings: ReadSettings, stats: ReadStats) -> Iterator[Block]:
  parser = prose.Parser(settings.language, piece.source.wrapped)
  for text, _ in _text_blocks(piece, settings, stats):
    # Without the line end of the last line, which would count as an empty line.
    for line in text.removesuffix('\n').split('\n'):
      parser.feed(line)
    yield Block(*parser.take())
  parser.end_paragraph()
  yield Block(*parser.take())


def _read_jsonl(piece: Piece, settings: ReadSettings, stats: ReadStats) -> Iterator[Block]:
  for text, offset in _text_blocks(piece, settings, stats):
    documents = []
    for number, line in enumerate(text.split('\n')):
      if line.strip():
        try:
          documents.append(_valid(_json_text(line, settings.text_field), settings, stats))
        except CorpusError as error:
          row = number + 1 + _count_lines(piece.source.name, offset)
          raise CorpusError(f'{piece.source.name}, line {row}: {error}') from error
    yield _document_block(documents, settings.language)


def _json_text(line: str, field: str) -> str:
  try:
    value = json.loads(line)
  except ValueError as error:
    raise CorpusError(f'not JSON ({error}); each line must be one JSON object') from error
  if not isinstance(value, dict) or not isinstance(value.get(field), str):
    has = f'its keys are {sorted(value)}' if isinstance(value, dict) else 'it is no JSON object'
    raise CorpusError(f'no text under the key {field!r} ({has}); name the key with --text_field')
  return value[field]


def _valid(text: str, settings: ReadSettings, stats: ReadStats) -> str:
  r"""The text without lone surrogates, which JSON can write (\ud800) and UTF-8 cannot hold."""
  found = _SURROGATE.search(text)
  if not found:
    return text
  if settings.encoding_errors == 'strict':
    raise CorpusError(
        f'\\u{ord(found[0]):04x} is half of a surrogate pair, which is no character; mend the '
        'file, or choose --encoding_errors replace or ignore'
    )
  stats.bad_lines += 1
  return _SURROGATE.sub('\ufffd' if settings.encoding_errors == 'replace' else '', text)


def _read_builtin(piece: Piece, settings: ReadSettings, stats: ReadStats) -> Iterator[Block]:
  from bertjax.data import default_corpus  # It takes seconds: only for those who ask for it.

  sentences: list[str] = []
  ends: list[int] = []
  for document in default_corpus.documents():
    sentences += document
    ends.append(len(sentences))
    if len(sentences) > 10_000:
      yield Block(sentences, np.array(ends, np.int64))
      sentences, ends = [], []
  yield Block(sentences, np.array(ends, np.int64))


def _document_block(documents: Iterable[str], language: str) -> Block:
  """Texts of prose, each one document, as a block."""
  sentences: list[str] = []
  ends: list[int] = []
  for text in documents:
    lines = text.split('\n')
    sentences += prose.sentences_of(lines, language, prose.is_wrapped(lines))
    ends.append(len(sentences))
  return Block(sentences, np.array(ends, np.int64))


# --- Bytes -----------------------------------------------------------------------------------


@contextlib.contextmanager
def _open(name: str) -> Iterator[Any]:
  """The bytes of a file, unpacked if it is gzipped."""
  with epath.Path(name).open('rb') as file:
    if name.endswith('.gz'):
      with gzip.GzipFile(fileobj=file) as unpacked:
        yield unpacked
    else:
      yield file


def _read(file, size: int, name: str) -> bytes:
  try:
    return file.read(size)
  except (gzip.BadGzipFile, EOFError, zlib.error) as error:
    raise CorpusError(f'{name} is not a whole gzip file ({error}); copy it again') from error


def _text_blocks(
    piece: Piece, settings: ReadSettings, stats: ReadStats
) -> Iterator[tuple[str, int]]:
  """Decoded runs of whole lines of a piece, each with its byte offset in the (unpacked) file."""
  name = piece.source.name
  for data, offset in _line_blocks(piece):
    if offset == 0 and data.startswith(codecs.BOM_UTF8):
      data, offset = data[len(codecs.BOM_UTF8) :], len(codecs.BOM_UTF8)
    try:
      text = data.decode('utf-8')
    except UnicodeDecodeError as error:
      if settings.encoding_errors == 'strict':
        raise CorpusError(_bad_byte(name, offset + error.start, data[error.start])) from error
      stats.bad_lines += sum(not _is_utf8(line) for line in data.split(b'\n'))
      text = data.decode('utf-8', settings.encoding_errors)
    yield text, offset


def _line_blocks(piece: Piece) -> Iterator[tuple[bytes, int]]:
  """Runs of whole lines of about 256 kB (longer where one line is), with their offsets."""
  packed = piece.source.name.endswith('.gz')
  with _open(piece.source.name) as file:
    if piece.start:
      file.seek(piece.start)
    offset, position = piece.start, piece.start
    parts: list[bytes] = []  # The beginning of a line that goes on.
    while True:
      size = _BLOCK_BYTES if packed else min(_BLOCK_BYTES, piece.end - position)
      data = _read(file, size, piece.source.name) if size else b''
      position += len(data)
      cut = data.rfind(b'\n') + 1
      if data and not cut:
        parts.append(data)
        continue
      block = b''.join([*parts, data[:cut]])
      if block:
        yield block, offset
      if not data:
        return
      offset += len(block)
      parts = [data[cut:]]


def _is_utf8(line: bytes) -> bool:
  try:
    line.decode('utf-8')
  except UnicodeDecodeError:
    return False
  return True


def _bad_byte(name: str, offset: int, byte: int) -> str:
  hint = ' (the file begins like UTF-16)' if offset == 0 and byte in b'\xff\xfe' else ''
  return (
      f'{name}, line {_count_lines(name, offset) + 1}, byte offset {offset}: byte {byte:#04x} is '
      f'not UTF-8{hint}; convert the file, or choose --encoding_errors replace or ignore'
  )


def _count_lines(name: str, offset: int) -> int:
  """Line ends before a byte offset of the (unpacked) file: only ever read to word an error."""
  count = 0
  with _open(name) as file:
    while offset > 0 and (data := _read(file, min(offset, _BLOCK_BYTES), name)):
      count += data.count(b'\n')
      offset -= len(data)
  return count


# --- tensorflow-datasets ---------------------------------------------------------------------


def _tfds_builder(name: str) -> tuple[Any, str, str | None]:
  """The prepared builder, the split and the field of a `tfds:` name."""
  import tensorflow_datasets as tfds  # Seconds and 300 MB: only for those who ask for it.

  match = _TFDS.match(name)
  try:
    builder = tfds.builder(match['name'])
    builder.download_and_prepare()
  except Exception as error:  # Whatever a builder does: network, disk, manual downloads.
    why = str(error).partition('\n')[0]  # More lines would list all data sets there are.
    raise CorpusError(f'{name}: tensorflow-datasets cannot give it: {why}') from error
  split = match['split'] or 'train'
  try:
    examples = builder.info.splits[split].num_examples
  except (KeyError, ValueError) as error:
    splits = ', '.join(builder.info.splits)
    raise CorpusError(f'{name}: no split {split!r}; there are: {splits}') from error
  if not examples:
    raise CorpusError(f'{name}: the split {split!r} is empty')
  return builder, split, match['field']


def _tfds_bytes(name: str) -> int:
  builder, split, _ = _tfds_builder(name)
  splits = builder.info.splits
  total = sum(info.num_examples for info in splits.values())
  return int(builder.info.dataset_size * splits[split].num_examples / total)


def _read_tfds(piece: Piece, settings: ReadSettings, stats: ReadStats) -> Iterator[Block]:
  import tensorflow_datasets as tfds

  name = piece.source.name
  builder, split, field = _tfds_builder(name)
  field = field or settings.text_field
  if field not in builder.info.features:
    keys = ', '.join(sorted(builder.info.features))
    raise CorpusError(f'{name}: no field {field!r}; there are: {keys}')
  part = tfds.even_splits(split, piece.end)[piece.start] if piece.end > 1 else split
  # One file after another: the order of the examples must not depend on the machine.
  order = tfds.ReadConfig(interleave_cycle_length=1, try_autocache=False)
  examples = builder.as_dataset(split=part, shuffle_files=False, read_config=order)
  texts: list[str] = []
  for number, example in enumerate(tfds.as_numpy(examples)):
    data = example[field]
    try:
      texts.append(data.decode('utf-8'))
    except UnicodeDecodeError as error:
      if settings.encoding_errors == 'strict':
        raise CorpusError(
            f'{name}, part {piece.start + 1} of {piece.end}, example {number}, byte offset '
            f'{error.start}: not UTF-8; choose --encoding_errors replace or ignore'
        ) from error
      stats.bad_lines += 1
      texts.append(data.decode('utf-8', settings.encoding_errors))
    if len(texts) == 1000:
      yield _document_block(texts, settings.language)
      texts = []
  yield _document_block(texts, settings.language)
