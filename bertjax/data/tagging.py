"""Tagging words (named entities and the like): CoNLL columns in, windows of word pieces, tags out.

    EU      B-ORG          a token a line, its tag in the last column; columns divided by TAB or
    rejects O              spaces; an empty line ends a sentence, -DOCSTART- lines are passed over
    German  B-MISC

A word's tag is read from and predicted at its first word piece (BERT paper, section 5.3). Sentences
longer than the model's length are split into windows that overlap, and every word counts in exactly
one of them: the one that shows most of its surroundings.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence

import numpy as np
from absl import logging
from etils import epath
from jaxtyping import Float32, Int, Int32

from bertjax.data import encoding, examples, text_file

SCHEMES = ('auto', 'bio', 'iob1', 'plain')
_TAG = re.compile(r'O|[BI](-.+)?')
_UNKNOWN = -1
_SPACES = re.compile(r'[ \t]+')


class TaggingError(ValueError):
  """A file or setting that cannot be used; the message names file and line and how to mend it."""


@dataclasses.dataclass(frozen=True)
class Sentences:
  """The sentences of one file, in its order.

  Attributes:
    name: the file, for messages.
    tokens: the words of each sentence, at least one.
    tags: a tag a word, BIO unless the scheme is 'plain'; None where the file has none.
    lines: the line of each word, from 1.
    scheme: of the tags in the file: 'bio', 'iob1' (turned into BIO here) or 'plain'; as it was
      asked for where there are no tags.
    wrong_transitions: BIO tags I-X that follow neither B-X nor I-X. They are left as they are, and
      begin an entity in the scores, as in seqeval.
  """

  name: str
  tokens: list[list[str]]
  tags: list[list[str]] | None
  lines: list[list[int]]
  scheme: str
  wrong_transitions: int = 0

  def __len__(self) -> int:
    return len(self.tokens)


def read(
    path: epath.PathLike, *, scheme: str = 'auto', token_column: int = 0,
    tag_column: int | None = -1,
) -> Sentences:
  """Reads a file of CoNLL columns.

  Args:
    path: the file.
    scheme: 'bio' (every entity begins with B-), 'iob1' (B- only right after an entity of the same
      type), 'auto' (told from the tags, and logged), or 'plain' (tags that are no entities, such as
      parts of speech, taken as they are).
    token_column: where the words are, from 0; negative from the end.
    tag_column: where the tags are; the last column by default, None for a file without tags. A file
      of one column, or with an empty tag in every line, has none.

  Raises:
    TaggingError: no text, no sentences, lines of different numbers of columns, a missing token or
      tag, or a tag that is none of O, B-TYPE and I-TYPE (unless 'plain').
  """
  if scheme not in SCHEMES:
    raise TaggingError(f'scheme {scheme!r} is none of {", ".join(SCHEMES)}')
  name = str(path)
  groups = _groups(text_file.read(path, TaggingError), name)
  if not groups:
    raise TaggingError(f'{name}: no sentences; a file of CoNLL columns has a token a line')
  lines = [[number for number, _ in group] for group in groups]
  tokens = _column(groups, token_column, 'token', name)
  for numbers, words in zip(lines, tokens, strict=True):
    if not all(words):
      raise TaggingError(f'{name}: line {numbers[words.index("")]}: no token; delete the line or'
                         ' write one')
  tags = _tags(groups, tag_column, name)
  if tags is None:
    logging.info('%s: %d sentences, %d tokens, no tags', name, len(groups), sum(map(len, groups)))
    return Sentences(name, tokens, None, lines, scheme)
  return _with_scheme(Sentences(name, tokens, tags, lines, scheme))


def _groups(text: str, name: str) -> list[list[tuple[int, list[str]]]]:
  """The lines of each sentence as (line number, columns)."""
  lines = [line.removesuffix('\r') for line in text.split('\n')]
  split, comment = _divider(lines)
  groups: list[list[tuple[int, list[str]]]] = [[]]
  width, first, comments = 0, 0, 0
  for number, line in enumerate(lines, 1):
    if not line.strip() or line.startswith('-DOCSTART-'):
      groups += [[]] if groups[-1] else []
      continue
    if not groups[-1] and comment(line):
      comments += 1
      continue
    fields = split(line)
    width, first = width or len(fields), first or number
    if len(fields) != width:
      raise TaggingError(f'{name}: line {number}: {len(fields)} columns ({line[:40]!r}), but line'
                         f' {first} has {width}; give every line the same columns, divided by TAB'
                         ' in the whole file or by spaces in the whole file')
    groups[-1].append((number, fields))
  if comments:
    logging.info('%s: %d comment lines passed over', name, comments)
  return groups if groups[-1] else groups[:-1]


def _divider(lines: list[str]) -> tuple[Callable[[str], list[str]], Callable[[str], bool]]:
  """How lines are split, and what is a comment: TAB decides if the first line of data has one.

  Where TABs divide, a line '# ...' without one is a comment. Where spaces do, '# O' is a token, so
  there are none.
  """
  data = next((line for line in lines if line.strip() and not line.startswith('-DOCSTART-')
               and ('\t' in line or not line.startswith('#'))), '')
  if '\t' in data:
    return (lambda line: [field.strip(' ') for field in line.split('\t')],
            lambda line: line.startswith('#') and '\t' not in line)
  return lambda line: _SPACES.split(line.strip(' \t')), lambda line: False


def _column(
    groups: list[list[tuple[int, list[str]]]], column: int, what: str, name: str
) -> list[list[str]]:
  number, fields = groups[0][0]
  if not -len(fields) <= column < len(fields):
    untagged = ', or, to predict a file without tags, set data.test_has_tags=False'
    raise TaggingError(f'{name}: line {number}: no column {column} for the {what}; the file has'
                       f' {len(fields)}, counted from 0: set data.{what}_column'
                       f'{untagged if what == "tag" else ""}')
  return [[fields[column] for _, fields in group] for group in groups]


def _tags(
    groups: list[list[tuple[int, list[str]]]], column: int | None, name: str
) -> list[list[str]] | None:
  if column is None or (column == -1 and len(groups[0][0][1]) == 1):
    return None
  tags = _column(groups, column, 'tag', name)
  if not any(map(any, tags)):
    return None
  for group, row in zip(groups, tags, strict=True):
    if not all(row):
      raise TaggingError(f'{name}: line {group[row.index("")][0]}: no tag; write O where there is'
                         ' no entity')
  return tags


def _with_scheme(raw: Sentences) -> Sentences:
  """Finds the scheme where it is to be found, and turns IOB1 into BIO."""
  tags, scheme = raw.tags or [], raw.scheme
  begun, inside = 0, 0
  if scheme != 'plain':
    for row, numbers in zip(tags, raw.lines, strict=True):
      for tag, line in zip(row, numbers, strict=True):
        if not _TAG.fullmatch(tag):
          raise TaggingError(f'{raw.name}: line {line}: tag {tag[:40]!r} is none of O, B-TYPE and'
                             " I-TYPE; mend it, take scheme 'plain' for tags that are not entities,"
                             ' or, to predict a file whose columns hold no tags, set'
                             ' data.test_has_tags=False')
      starts = [tag[0] for tag, start in zip(row, _starts(row), strict=True) if start]
      begun, inside = begun + starts.count('B'), inside + starts.count('I')
  if scheme == 'auto':
    # Where an entity follows no other of its type BIO writes B-, and IOB1 I-.
    scheme = 'iob1' if inside and not begun else 'bio'
  if scheme == 'iob1':
    tags = [['B' + tag[1:] if start else tag for tag, start in zip(row, _starts(row), strict=True)]
            for row in tags]
  wrong = inside if scheme == 'bio' else 0
  logging.info('%s: %d sentences, %d tokens, scheme %s%s%s', raw.name, len(raw),
               sum(map(len, tags)), scheme, '' if raw.scheme == scheme else ' (by its tags)',
               f', {wrong} I- tags that follow no entity of their type' if wrong else '')
  return dataclasses.replace(raw, tags=tags, scheme=scheme, wrong_transitions=wrong)


def _starts(tags: Sequence[str]) -> list[bool]:
  """Where an entity begins that follows no other of its type; of BIO and IOB1 tags."""
  return [tag != 'O' and (before == 'O' or tag[1:] != before[1:])
          for before, tag in zip(['O', *tags], tags, strict=False)]


def label_list(sentences: Sentences) -> list[str]:
  """The tags of a training file: 'O' first if it is there, the others sorted.

  Raises:
    TaggingError: the file has no tags.
  """
  if sentences.tags is None:
    raise TaggingError(f'{sentences.name}: no tags to learn from; name a file with a tag column')
  return sorted({tag for row in sentences.tags for tag in row}, key=lambda tag: (tag != 'O', tag))


# --- Windows -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Windows:
  """Sentences as examples, and where in them each word is.

  Attributes:
    examples: one of each window. Where the sentences have tags also `labels` int32 [L] and
      `label_weights` float32 [L]: 1 at the first piece of each word that counts here, else 0.
    labels: names of the outputs.
    lengths: words of each sentence.
    sentences: the sentence of each window.
    words: of each window the numbers (within the sentence) of the words that count in it.
    positions: of each of these words the position of its first piece in the window.
  """

  examples: examples.Examples
  labels: list[str]
  lengths: list[int]
  sentences: Int32[np.ndarray, 'W']
  words: list[Int[np.ndarray, '_']]
  positions: list[Int[np.ndarray, '_']]

  def __len__(self) -> int:
    return len(self.words)


def encode(
    sentences: Sentences, tokenizer: encoding.Tokenizer, labels: Sequence[str], max_length: int,
    stride: int | None = None, training: bool = False,
) -> Windows:
  """[CLS] words [SEP], one window a sentence where it fits, else several.

  Each word is tokenized by itself. One that gives no pieces (only control characters) stands as
  [UNK], and one longer than a window is cut to it, so that every word has its prediction.

  Args:
    sentences: of one file.
    tokenizer: text to ids.
    labels: names of the outputs, from `label_list` of the training file.
    max_length: tokens of a window at most, specials included.
    stride: a window begins about so many pieces after the one before; half a window if None.
    training: whether the model is to learn these tags.

  Raises:
    TaggingError: a max_length or stride that cannot be; with `training` also a tag that is not
      among the labels. Elsewhere such a word has no part in the loss, and a warning names the line.
  """
  room = max_length - 2
  stride = max(1, room // 2) if stride is None else stride
  if not 1 <= stride <= room:
    raise TaggingError(f'max_length {max_length} and stride {stride}: a window must hold [CLS],'
                       ' [SEP] and a piece, and the stride be from 1 to max_length - 2')
  label_ids = _label_ids(sentences, labels, training)
  numbers, pieces = _pieces(sentences, tokenizer, room)
  tokens: dict[str, list[np.ndarray]] = {}
  found: list[tuple[int, np.ndarray, np.ndarray]] = []
  for index, row in enumerate(numbers):
    words = [pieces[number] for number in row]
    starts = np.cumsum([0, *map(len, words)])
    spans = _spans(starts, room, stride)
    owner = _owners(spans, starts)
    for number, (first, last) in enumerate(spans):
      example = examples.join(tokenizer, np.concatenate(words[first:last]), None, max_length)
      counting = np.flatnonzero(owner == number)
      positions = 1 + starts[counting] - starts[first]
      if label_ids is not None:
        example |= _targets(len(example['input_ids']), positions, label_ids[index][counting])
      for field, array in example.items():
        tokens.setdefault(field, []).append(array)
      found.append((index, counting, positions))
  split = len(found) - len(numbers)
  logging.info('%s: %d sentences in windows of up to %d tokens; %d windows more than sentences',
               sentences.name, len(numbers), max_length, split)
  indices, words_counted, positions_counted = zip(*found, strict=True)
  return Windows(
      examples=examples.Examples(tokens, {}, tokenizer.pad_id), labels=list(labels),
      lengths=[len(row) for row in numbers], sentences=np.array(indices, np.int32),
      words=list(words_counted), positions=list(positions_counted))


def _label_ids(
    sentences: Sentences, labels: Sequence[str], training: bool
) -> list[Int32[np.ndarray, '_']] | None:
  """The number of each word's tag, _UNKNOWN where the model has none for it."""
  if sentences.tags is None:
    return None
  number = {label: index for index, label in enumerate(labels)}
  unknown = [(line, tag) for row, lines in zip(sentences.tags, sentences.lines, strict=True)
             for tag, line in zip(row, lines, strict=True) if tag not in number]
  if unknown:
    line, tag = unknown[0]
    said = (f'{sentences.name}: line {line}: tag {tag!r} is not among the labels of the model'
            f' ({", ".join(labels)})')
    if training:
      raise TaggingError(f'{said}; mend it, or train on a file that has it')
    logging.warning('%s; it and %d more such words count as missed', said, len(unknown) - 1)
  return [np.array([number.get(tag, _UNKNOWN) for tag in row], np.int32) for row in sentences.tags]


def _pieces(
    sentences: Sentences, tokenizer: encoding.Tokenizer, room: int
) -> tuple[list[list[int]], list[Int[np.ndarray, '_']]]:
  """Each sentence as numbers of different words, and the pieces of these, from 1 to `room`."""
  different: dict[str, int] = {}
  numbers = [[different.setdefault(word, len(different)) for word in words]
             for words in sentences.tokens]
  pieces = tokenizer.encode_batch(list(different))
  long = sum(len(row) > room for row in pieces)
  if long:
    logging.warning('%s: %d different words are longer than a window and are cut to %d pieces',
                    sentences.name, long, room)
  unknown = np.array([tokenizer.unk_id], np.int32)
  return numbers, [row[:room] if len(row) else unknown for row in pieces]


def _spans(starts: Int[np.ndarray, 'S'], room: int, stride: int) -> list[tuple[int, int]]:
  """Windows as (first word, word after the last), together all words, each of up to `room` pieces.

  Args:
    starts: pieces before each word, and last of all words together.
    room: pieces of a window.
    stride: pieces from window to window, if word borders allow.
  """
  first, num_words, spans = 0, len(starts) - 1, []
  while True:
    last = int(np.searchsorted(starts, starts[first] + room, side='right')) - 1
    spans.append((first, last))
    if last == num_words:
      return spans
    # The next word border after the stride, but never leaving out a word, and always going on.
    following = int(np.searchsorted(starts, starts[first] + stride))
    first = max(first + 1, min(following, last))


def _owners(
    spans: list[tuple[int, int]], starts: Int[np.ndarray, 'S']
) -> Int[np.ndarray, 'N']:
  """The window in which each word counts: that with most pieces on its shorter side.

  Of equal ones the first counts. Source: google-research/bert run_squad.py, _check_is_max_context.
  """
  owner = np.zeros(len(starts) - 1, np.int64)
  if len(spans) == 1:
    return owner
  best = np.full(len(starts) - 1, -1)
  for number, (first, last) in enumerate(spans):
    before = starts[first:last] - starts[first]
    after = starts[last] - starts[first + 1:last + 1]
    context = np.minimum(before, after)
    better = context > best[first:last]
    owner[first:last][better] = number
    best[first:last][better] = context[better]
  return owner


def _targets(
    length: int, positions: Int[np.ndarray, 'K'], label_ids: Int32[np.ndarray, 'K']
) -> dict[str, np.ndarray]:
  labels, weights = np.zeros(length, np.int32), np.zeros(length, np.float32)
  labels[positions], weights[positions] = np.maximum(label_ids, 0), label_ids != _UNKNOWN
  return {'labels': labels, 'label_weights': weights}


# --- Predictions -------------------------------------------------------------------------------


def predictions(windows: Windows, outputs: Float32[np.ndarray, 'W T C']) -> list[list[str]]:
  """The likeliest tag of every word.

  Args:
    windows: of `encode`.
    outputs: logits of each window, T at least the longest.

  Returns:
    Tags of each sentence, in the order of the file.
  """
  tags = [[''] * length for length in windows.lengths]
  for number, (words, positions) in enumerate(zip(windows.words, windows.positions, strict=True)):
    row = tags[windows.sentences[number]]
    for word, choice in zip(words, outputs[number, positions].argmax(axis=-1), strict=True):
      row[word] = windows.labels[choice]
  return tags


def write_predictions(
    sentences: Sentences, tags: Sequence[Sequence[str]], path: epath.PathLike
) -> None:
  """Writes token, gold tag (where there are any) and predicted tag a line, divided by TAB.

  An empty line ends each sentence. The file is there whole or not at all.
  """
  gold = sentences.tags or [None] * len(sentences)
  blocks = []
  for words, wanted, predicted in zip(sentences.tokens, gold, tags, strict=True):
    columns = [words, predicted] if wanted is None else [words, wanted, predicted]
    blocks.append(''.join('\t'.join(line) + '\n' for line in zip(*columns, strict=True)))
  path = epath.Path(path)
  encoding.write_files(path.parent, {path.name: ''.join(f'{b}\n' for b in blocks).encode()})
