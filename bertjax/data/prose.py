"""Running prose: lines to paragraphs, paragraphs to sentences, and where documents end."""

import re
from collections.abc import Iterable

import numpy as np
import sentencex
from jaxtyping import Int64

HEADING = re.compile(
    r'\s*(?:'
    r'#{1,2}\s+(?P<markdown>\S.*)'
    r'|=\s(?P<wikitext>[^=\s][^=]*)\s=\s*$'
    r'|(?P<english>(?:CHAPTER|Chapter)\s+[IVXLC\d]+\b.{0,80}$)'
    r'|(?P<chinese>第[〇零一二三四五六七八九十百千\d]{1,9}[章回卷].{0,60}$))'
)
MAX_DOCUMENT = 100_000  # characters

# Beyond this length a paragraph is split window by window: sentencex takes time quadratic in the
# number of unclosed quotation marks before a sentence end (90 kB of '“你。' took 6.5 s).
_WINDOW = 8192


def is_wrapped(lines: list[str]) -> bool:
  """Whether the lines look hard-wrapped: narrow, and those inside a paragraph about equally long.

  One sentence a line is narrow too, but its lines end in punctuation and vary in length.
  """
  lines = [line.strip() for line in lines]
  inner = [
      line
      for line, after in zip(lines, lines[1:], strict=False)
      if after and _has_word(line) and not HEADING.match(line)
  ]
  if len(inner) < max(3, 0.3 * sum(map(bool, lines))):
    return False
  lengths = np.sort([len(line.encode()) for line in inner])
  widest = lengths[int(0.98 * (len(lengths) - 1))]
  closed = sum(line[-1] in '.!?。！？…"”’」』' for line in inner)
  return bool(widest <= 120 and np.median(lengths) >= 0.75 * widest and closed < 0.5 * len(inner))


def split_sentences(paragraph: str, language: str) -> list[str]:
  """Sentences of one paragraph, stripped; those without a letter or digit (rules) are left out."""
  parts: list[str] = []
  start, window = 0, _WINDOW
  while len(paragraph) - start > window:
    found = sentencex.segment(language, paragraph[start : start + window])
    if len(found) > 1:
      parts += found[:-1]
      start += window - len(found[-1])  # The last one may go on behind the window.
      window = _WINDOW
    else:
      window *= 2
  parts += sentencex.segment(language, paragraph[start:])
  stripped = (part.strip() for part in parts)
  return [part for part in stripped if part and (part[0].isalnum() or _has_word(part))]


def _has_word(text: str) -> bool:
  return any(map(str.isalnum, text))


def sentences_of(lines: Iterable[str], language: str, wrapped: bool) -> list[str]:
  """Sentences of all paragraphs of one text."""
  parser = Parser(language, wrapped, headings=False)
  for line in lines:
    parser.feed(line)
  parser.end_paragraph()
  return parser.take()[0]


class Parser:
  """Lines of prose in, sentences and document ends out."""

  def __init__(self, language: str, wrapped: bool, headings: bool = True):
    self._language, self._wrapped, self._headings = language, wrapped, headings
    self._paragraph: list[str] = []
    self._sentences: list[str] = []
    self._ends: list[int] = []
    self._length = 0  # Characters of the document's body; headings do not count.

  def feed(self, line: str) -> None:
    line = line.strip()
    heading = self._headings and HEADING.match(line)
    if heading or not line:
      self.end_paragraph()
    if heading:
      if self._length:
        self._end_document()
      title = heading[heading.lastgroup].strip()
      if _has_word(title):
        self._sentences.append(title)
    elif line:
      self._paragraph.append(line)
      if not self._wrapped:
        self.end_paragraph()

  def end_paragraph(self) -> None:
    if not self._paragraph:
      return
    text = _join_lines(self._paragraph)
    self._paragraph = []
    self._sentences += split_sentences(text, self._language)
    self._length += len(text)
    if self._headings and self._length > MAX_DOCUMENT:
      self._end_document()

  def _end_document(self) -> None:
    self._ends.append(len(self._sentences))
    self._length = 0

  def take(self) -> tuple[list[str], Int64[np.ndarray, 'ends']]:
    """The sentences since the last call, and after how many of them documents end."""
    taken = self._sentences, np.array(self._ends, np.int64)
    self._sentences, self._ends = [], []
    return taken


def _join_lines(lines: list[str]) -> str:
  """One paragraph of wrapped lines; a line break between ideographs stands for no space."""
  parts = [lines[0]]
  for before, after in zip(lines, lines[1:], strict=False):
    if not (_is_ideograph(before[-1]) and _is_ideograph(after[0])):
      parts.append(' ')
    parts.append(after)
  return ''.join(parts)


def _is_ideograph(char: str) -> bool:
  """CJK ideographs, kana and their punctuation; Korean is written with spaces."""
  return '\u3000' <= char <= '\u9fff' or '\uff00' <= char <= '\uffef' or char >= '\U00020000'
