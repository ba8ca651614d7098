"""What Google does to text before it is cut into pieces: TextRules before WordPiece
(google-research/bert, tokenization.py, BasicTokenizer) and AlbertRules before SentencePiece
(google-research/albert, tokenization.py), with Python's unicodedata for the character classes.

TextRules has the same rules in two forms: `chunks`, `pieces` and `piece_words` for speed,
`aligned_words` with the place of every character in the original text. Nothing in the rules looks
across white space, so what a white-space-separated chunk gives can be remembered.
"""

import dataclasses
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

# CJK ideographs, each a word of its own; Kana and Hangul are not among them (_is_chinese_char).
_CJK_RANGES = (
  (0x4E00, 0x9FFF),
  (0x3400, 0x4DBF),
  (0x20000, 0x2A6DF),
  (0x2A700, 0x2B73F),
  (0x2B740, 0x2B81F),
  (0x2B820, 0x2CEAF),
  (0xF900, 0xFAFF),
  (0x2F800, 0x2FA1F),
)
_ASCII_WORDS = re.compile(r'[!-/:-@\[-`{-~]|[^!-/:-@\[-`{-~]+')
# White space but for U+001C to U+001F, which str.split takes for white space: cleaning removes
# them, and where cleaning is off they are ordinary characters, as they are to `tokenizers`.
_CHUNKS = re.compile('(?:\\S|[\x1c-\x1f])+')
_SURROGATES = re.compile('[\ud800-\udfff]')


class _Table(dict[int, int | str | None]):
  """A table for str.translate that classifies a character when it first meets it."""

  def __init__(self, rule: Callable[[str], int | str | None]):
    super().__init__()
    self._rule = rule

  def __missing__(self, code_point: int) -> int | str | None:
    value = self[code_point] = self._rule(chr(code_point))
    return value


def _keep(character: str) -> int | None:
  """Drops what cleaning removes. Tab, LF and CR are white space although their class is Cc."""
  if character in '\t\n\r':
    return ord(character)
  dropped = character == '\ufffd' or unicodedata.category(character) in ('Cc', 'Cf')
  return None if dropped else ord(character)


def _isolate_cjk(character: str) -> int | str:
  code_point = ord(character)
  isolated = any(first <= code_point <= last for first, last in _CJK_RANGES)
  return f' {character} ' if isolated else code_point


def _isolate_punctuation(character: str) -> int | str:
  """Class P*, and every printable ASCII character that is no letter, digit or space ($, ^, ...)."""
  ascii_punctuation = '!' <= character <= '~' and not character.isalnum()
  isolated = ascii_punctuation or unicodedata.category(character)[0] == 'P'
  return f' {character} ' if isolated else ord(character)


def _drop_mark(character: str) -> int | None:
  return None if unicodedata.category(character) == 'Mn' else ord(character)


_kept = _Table(_keep)
_cjk = _Table(_isolate_cjk)
_punctuation = _Table(_isolate_punctuation)
_marks = _Table(_drop_mark)


class AlignedWord(NamedTuple):
  """A normalised word and, for each of its characters, the index of the one it came from."""

  text: str
  origins: Sequence[int]


@dataclasses.dataclass(frozen=True)
class TextRules:
  """The switches that shape words; they are saved with the vocabulary.

  Attributes:
    lowercase: lower-case the text (str.lower, word by word).
    strip_accents: decompose (NFD) and drop the non-spacing marks. Google does both or neither.
    split_cjk: make every CJK ideograph a word.
    clean_text: drop control and format characters (Cc, Cf) and U+FFFD.
    max_chars_per_word: longer words become one unknown token; Google 200, Transformers 100.
  """

  lowercase: bool = True
  strip_accents: bool = True
  split_cjk: bool = True
  clean_text: bool = True
  max_chars_per_word: int = 200

  def chunks(self, text: str) -> list[str]:
    """The white-space-separated chunks of the cleaned text."""
    if not self.clean_text:
      return _CHUNKS.findall(text)
    # isprintable is false for every removed character but U+FFFD, and true for nearly all lines.
    if not text.isprintable() or '\ufffd' in text:
      text = text.translate(_kept)
    return text.split()

  def pieces(self, chunk: str) -> list[str]:
    """A chunk cut at its CJK ideographs; nothing after this looks beyond a piece."""
    if chunk.isascii() or not self.split_cjk:
      return [chunk]
    return _spaced(chunk.translate(_cjk))

  def piece_words(self, piece: str) -> list[str]:
    """The normalised words of one piece: lower-cased, accents stripped, punctuation apart."""
    if self.lowercase:
      piece = piece.lower()
    if piece.isascii():
      return _ASCII_WORDS.findall(piece)
    if self.strip_accents:
      piece = unicodedata.normalize('NFD', piece).translate(_marks)
    return _spaced(piece.translate(_punctuation))

  def aligned_words(self, text: str) -> Iterator[AlignedWord]:
    """The words of any text in order, with the place of each character in it."""
    kept: Sequence[int] = range(len(text))
    cleaned = text.translate(_kept) if self.clean_text else text
    if len(cleaned) != len(text):
      kept = [index for index, character in enumerate(text) if _kept[ord(character)] is not None]
    for chunk in _CHUNKS.finditer(cleaned):
      for start, end in self._piece_spans(chunk[0]):
        origins = kept[chunk.start() + start : chunk.start() + end]
        piece, origins = self._normalise(chunk[0][start:end], origins)
        for first, last in _split(piece, _punctuation):
          yield AlignedWord(piece[first:last], origins[first:last])

  def _piece_spans(self, chunk: str) -> Iterator[tuple[int, int]]:
    return _split(chunk, _cjk) if self.split_cjk else iter([(0, len(chunk))])

  def _normalise(self, piece: str, origins: Sequence[int]) -> tuple[str, Sequence[int]]:
    if piece.isascii():
      return (piece.lower() if self.lowercase else piece), origins
    if self.lowercase:
      lower = piece.lower()
      if len(lower) != len(piece):
        origins = [
          place for letter, place in zip(piece, origins, strict=True) for _ in letter.lower()
        ]
      piece = lower
    if self.strip_accents and piece != unicodedata.normalize('NFD', piece).translate(_marks):
      parts = decompose(zip(piece, origins, strict=True), 'NFD')
      parts = [(part, place) for part, place in parts if _marks[ord(part)] is not None]
      piece = ''.join(part for part, _ in parts)
      origins = [place for _, place in parts]
    return piece, origins


def _spaced(text: str) -> list[str]:
  return [part for part in text.split(' ') if part]


def _split(text: str, table: _Table) -> Iterator[tuple[int, int]]:
  """Spans between and of the characters that the table isolates."""
  start = 0
  for index, character in enumerate(text):
    if isinstance(table[ord(character)], str):
      if start < index:
        yield start, index
      yield index, index + 1
      start = index + 1
  if start < len(text):
    yield start, len(text)


@dataclasses.dataclass(frozen=True)
class AlbertRules:
  """ALBERT's preprocess_text: single spaces, NFKD without combining marks, lower case."""

  lowercase: bool = True
  strip_accents: bool = True

  def normalise(self, text: str) -> str:
    text = ' '.join(text.split())
    if not text.isascii():
      # A lone surrogate cannot be given to SentencePiece, which takes UTF-8.
      text = _SURROGATES.sub('\ufffd', text)
      if self.strip_accents:
        decomposed = unicodedata.normalize('NFKD', text)
        text = ''.join([part for part in decomposed if not unicodedata.combining(part)])
    return text.lower() if self.lowercase else text

  def align(self, text: str) -> tuple[str, list[int]]:
    """The normalised text, and for each of its characters the index of the one it came from."""
    pairs: list[tuple[str, int]] = []
    for match in re.finditer(r'\S+', text):
      if pairs:
        pairs.append((' ', match.start() - 1))
      pairs += zip(match[0], range(*match.span()), strict=True)
    if self.strip_accents and not text.isascii():
      decomposed = decompose(iter(pairs), 'NFKD')
      pairs = [pair for pair in decomposed if not unicodedata.combining(pair[0])]
    if self.lowercase:
      pairs = [(low, place) for character, place in pairs for low in character.lower()]
    return self.normalise(text), [place for _, place in pairs]


def decompose(characters: Iterator[tuple[str, int]], form: str) -> list[tuple[str, int]]:
  """Decomposes like unicodedata.normalize(form, ...), each character with its origin."""
  result: list[tuple[str, int]] = []
  marks: list[tuple[str, int]] = []
  for character, place in characters:
    for part in unicodedata.normalize(form, character):
      if unicodedata.combining(part):
        marks.append((part, place))
        continue
      # Canonical order: the marks after one base letter are sorted by class, stably.
      result += sorted(marks, key=lambda mark: unicodedata.combining(mark[0]))
      marks.clear()
      result.append((part, place))
  return result + sorted(marks, key=lambda mark: unicodedata.combining(mark[0]))
