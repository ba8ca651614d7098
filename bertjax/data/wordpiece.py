"""WordPiece with Google's rules, fast by remembering what each chunk of text gave; training."""

import array
import collections
import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import SupportsIndex

import numpy as np
from absl import logging
from etils import epath
from jaxtyping import Bool, Int

from bertjax.data.encoding import Encoding, TokenizerError, split_rows, write_files
from bertjax.data.text_rules import TextRules
from bertjax.data.word_table import BlockEncoder

SPECIAL_TOKENS = ('[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]')
_SPECIAL_TEXT = re.compile(r'(\[(?:PAD|UNK|CLS|SEP|MASK)\])')
_UNUSED = re.compile(r'\[unused\d+\]')
# Chunks remembered at most, twice over (see _Memo): about 50 MB with their ids.
_MEMO_SIZE = 1 << 17
# Longer chunks are rare and rarely seen again; leaving them out bounds the memo in bytes as well.
_MEMO_CHUNK = 64
_TRAINING_WORDS = 100_000_000


class _Memo(dict[str, bytes]):
  """Chunk of text -> its ids as bytes; old entries go when it is full, recent ones stay.

  Two generations: a full memo becomes the old one, and what is found there moves back.
  """

  def __init__(self, compute: Callable[[str], bytes]):
    super().__init__()
    self._compute = compute
    self._old: dict[str, bytes] = {}

  def __missing__(self, chunk: str) -> bytes:
    value = self._old.get(chunk)
    if value is None:
      value = self._compute(chunk)
      if len(chunk) > _MEMO_CHUNK:
        return value
    if len(self) >= _MEMO_SIZE:
      self._old = dict(self)
      self.clear()
    self[chunk] = value
    return value


def read_vocabulary(content: bytes, name: str) -> list[str]:
  """The entries of a vocab.txt: one a line, id = line number.

  Only LF, with an optional CR before it, ends a line: U+2028 and U+0085 are entries in some
  vocabularies (str.splitlines would move every later id).

  Raises:
    TokenizerError: not UTF-8, an entry twice, or a special token missing.
  """
  try:
    lines = content.decode('utf-8-sig').split('\n')
  except UnicodeDecodeError as error:
    raise TokenizerError(f'{name}: not UTF-8 at byte {error.start}: save it as UTF-8') from error
  if lines[-1] == '':
    lines.pop()
  entries = [line.removesuffix('\r') for line in lines]
  seen: dict[str, int] = {}
  for index, entry in enumerate(entries):
    if entry in seen:
      raise TokenizerError(
        f'{name}: {entry!r} stands in line {seen[entry] + 1} and again in line {index + 1};'
        ' every entry must be there once, or ids and embeddings no longer match'
      )
    seen[entry] = index
  missing = [token for token in SPECIAL_TOKENS if token not in seen]
  if missing:
    raise TokenizerError(
      f'{name}: {", ".join(missing)} missing; BERT needs {" ".join(SPECIAL_TOKENS)}, one a line'
    )
  return entries


class WordPieceTokenizer:
  """See encoding.Tokenizer. Ids are those of google-research/bert's FullTokenizer."""

  type = 'wordpiece'

  def __init__(self, vocabulary: bytes, rules: TextRules, name: str = 'vocab.txt'):
    """vocabulary: the bytes of a vocab.txt; name: what errors call it."""
    self._vocabulary = vocabulary
    self.rules = rules
    self._tokens = read_vocabulary(vocabulary, name)
    self._ids = {token: index for index, token in enumerate(self._tokens)}
    self.vocab_size = len(self._tokens)
    self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id = (
      self._ids[token] for token in SPECIAL_TOKENS
    )
    self.special_ids = (self.pad_id, self.cls_id, self.sep_id, self.mask_id)
    # Continuations without their '##', so that looking one up needs no new string.
    tails = {
      token[2:]: index
      for token, index in self._ids.items()
      if token.startswith('##') and len(token) > 2
    }
    self._heads, self._tails = (self._ids, _reach(self._ids)), (tails, _reach(tails))
    self._packed = [array.array('i', [index]).tobytes() for index in range(self.vocab_size)]
    self._chunks = _Memo(self._pack_chunk)
    self._blocks = BlockEncoder(rules.lowercase, self._pack_word, self._pack_text)

  @functools.cached_property
  def ordinary_ids(self) -> Int[np.ndarray, 'N']:
    excluded = {*self.special_ids, self.unk_id}
    return np.array(
      [
        index
        for index, token in enumerate(self._tokens)
        if index not in excluded and not _UNUSED.fullmatch(token)
      ],
      np.int32,
    )

  @functools.cached_property
  def continuation(self) -> Bool[np.ndarray, 'V']:
    return np.array([token.startswith('##') for token in self._tokens])

  @property
  def switches(self) -> dict[str, bool | int]:
    rules = self.rules
    return {
      'lowercase': rules.lowercase,
      'strip_accents': rules.strip_accents,
      'split_cjk': rules.split_cjk,
      'clean_text': rules.clean_text,
      'max_chars_per_word': rules.max_chars_per_word,
    }

  def _word_ids(self, word: str) -> list[int]:
    """Greedy longest match from the left (WordpieceTokenizer); [UNK] where it gets stuck."""
    if len(word) > self.rules.max_chars_per_word:
      return [self.unk_id]
    ids: list[int] = []
    start, length = 0, len(word)
    table, reach = self._heads
    while start < length:
      end = min(length, start + reach.get(word[start : start + 3], 2))
      while (index := table.get(word[start:end])) is None:
        end -= 1
        if end == start:
          return [self.unk_id]
      ids.append(index)
      start = end
      table, reach = self._tails
    return ids

  def _pack_word(self, word: str) -> bytes:
    index = self._ids.get(word)
    if index is not None and len(word) <= self.rules.max_chars_per_word:
      return self._packed[index]
    return b''.join([self._packed[index] for index in self._word_ids(word)])

  def _pack_chunk(self, chunk: str) -> bytes:
    pieces = self.rules.pieces(chunk)
    if len(pieces) > 1:
      return b''.join(map(self._chunks.__getitem__, pieces))
    return b''.join(map(self._pack_word, self.rules.piece_words(pieces[0])))

  def _pack_text(self, text: str) -> bytes:
    return b''.join(map(self._chunks.__getitem__, self.rules.chunks(text)))

  def encode_lines(
    self, texts: Sequence[str]
  ) -> tuple[Int[np.ndarray, 'N'], Int[np.ndarray, 'L']]:
    """The ids of many texts back to back and the number of ids of each, both int32.

    Cleaned text goes through word_table.BlockEncoder, twice as fast as a dictionary of chunks.
    """
    if self.rules.clean_text:
      return self._blocks.encode(texts)
    rows = [self._pack_text(text) for text in texts]
    counts = np.fromiter(map(len, rows), np.int32, len(rows)) // 4
    return np.frombuffer(b''.join(rows), np.int32).copy(), counts

  def encode_batch(self, texts: Sequence[str]) -> list[Int[np.ndarray, '_']]:
    return split_rows(*self.encode_lines(texts))

  def encode(self, text: str, special_text: bool = False) -> Encoding:
    """See Tokenizer.encode.

    With special_text a literal '[MASK]' (or another special token) becomes the special id. Only
    for text typed by a user who asks for it: in a corpus '[SEP]' is text like any other.
    """
    encoding = Encoding([], [], [], [])
    position = 0
    for part in _SPECIAL_TEXT.split(text) if special_text else [text]:
      if special_text and part in SPECIAL_TOKENS:
        _append(encoding, self._ids[part], part, (position, position + len(part)))
      else:
        self._encode_part(part, position, encoding)
      position += len(part)
    return encoding

  def _encode_part(self, text: str, position: int, encoding: Encoding) -> None:
    for word, origins in self.rules.aligned_words(text):
      ids = self._word_ids(word)
      start = 0
      for number, index in enumerate(ids):
        token = self._tokens[index]
        length = len(token) - 2 * (number > 0)
        if index == self.unk_id:
          length = len(word)
        span = (position + origins[start], position + origins[start + length - 1] + 1)
        _append(encoding, index, token, span, number == 0)
        start += length

  def decode(self, ids: Iterable[SupportsIndex]) -> str:
    return ' '.join(map(self.token, ids)).replace(' ##', '')

  def token(self, index: SupportsIndex) -> str:
    return self._tokens[index]

  def token_id(self, token: str) -> int | None:
    return self._ids.get(token)

  def hash(self) -> str:
    switches = json.dumps({'type': self.type, **self.switches}, sort_keys=True)
    return hashlib.sha256(switches.encode() + b'\0' + self._vocabulary).hexdigest()

  def save(self, folder: epath.PathLike) -> None:
    """Writes vocab.txt, then tokenizer_config.json: names that Transformers knows as well."""
    rules = self.rules
    config = {
      'type': self.type,
      'tokenizer_class': 'BertTokenizer',
      'do_lower_case': rules.lowercase,
      'strip_accents': rules.strip_accents,
      'tokenize_chinese_chars': rules.split_cjk,
      'clean_text': rules.clean_text,
      'max_input_chars_per_word': rules.max_chars_per_word,
    }
    settings = json.dumps(config, indent=2).encode() + b'\n'
    write_files(folder, {'vocab.txt': self._vocabulary, 'tokenizer_config.json': settings})


def _reach(table: dict[str, int]) -> dict[str, int]:
  """The length of the longest piece that begins with these three characters."""
  reach: dict[str, int] = {}
  for piece in table:
    reach[piece[:3]] = max(reach.get(piece[:3], 0), len(piece))
  return reach


def _append(
  encoding: Encoding, index: int, token: str, span: tuple[int, int], word_start: bool = True
) -> None:
  encoding.ids.append(index)
  encoding.tokens.append(token)
  encoding.offsets.append(span)
  encoding.word_starts.append(word_start)


def train_wordpiece(
  texts: Iterable[str], vocab_size: int, rules: TextRules, min_frequency: int = 2
) -> WordPieceTokenizer:
  """Learns a vocabulary with the trainer of `tokenizers` from words cut by our own rules.

  The same text gives the same vocabulary. A small text may give fewer entries than asked for.

  Args:
    texts: lines or sentences; their order does not matter.
    vocab_size: entries at most, special tokens included.
    rules: the switches, saved with the vocabulary.
    min_frequency: how often a pair of pieces must be seen to become one.

  Raises:
    TokenizerError: no text, or a vocab_size with no room for pieces.
  """
  # Here, so that encoding does not wait for the import.
  import tokenizers
  from tokenizers import models, pre_tokenizers, trainers

  counts = count_words(texts, rules)
  if not counts:
    raise TokenizerError('there is no text to train on: every line is empty')
  alphabet, seen = _alphabet(counts, vocab_size)
  letters = set(alphabet)
  words = [word for word in sorted(counts) if letters.issuperset(_letters(word))]
  if not words:
    raise TokenizerError(
      f'vocab_size {vocab_size} is too small: the text has {seen} one-letter pieces'
    )
  left_out = sum(counts.values()) - sum(counts[word] for word in words)
  trainer = trainers.WordPieceTrainer(
    vocab_size=vocab_size,
    min_frequency=min_frequency,
    # The trainer numbers letters in the order of a hash map with a random seed and breaks ties by
    # number. As special tokens they are numbered first and in this order.
    special_tokens=[*SPECIAL_TOKENS, *alphabet],
    show_progress=False,
  )
  model = tokenizers.Tokenizer(models.WordPiece(unk_token='[UNK]'))
  model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
  model.train_from_iterator(_repeated(words, counts), trainer)
  learned = model.get_vocab()
  vocabulary = ''.join(f'{token}\n' for token in sorted(learned, key=learned.__getitem__))
  logging.info(
    'WordPiece: %d entries (asked for %d), %d of them letters, from %d words; %.4f%% of the words'
    ' hold letters too rare for the vocabulary; 0 lines left out',
    len(learned),
    vocab_size,
    len(alphabet),
    sum(counts.values()),
    100 * left_out / sum(counts.values()),
  )
  return WordPieceTokenizer(vocabulary.encode(), rules)


def count_words(texts: Iterable[str], rules: TextRules) -> collections.Counter[str]:
  """How often each normalised word occurs; words above the length limit are not counted."""
  words: collections.Counter[str] = collections.Counter()
  chunks: collections.Counter[str] = collections.Counter()

  def fold() -> None:
    for chunk, count in chunks.items():
      for piece in rules.pieces(chunk):
        for word in rules.piece_words(piece):
          if len(word) <= rules.max_chars_per_word:
            words[word] += count
    chunks.clear()

  for text in texts:
    chunks.update(rules.chunks(text))
    if len(chunks) > _MEMO_SIZE:
      fold()
  fold()
  return words


def _letters(word: str) -> list[str]:
  return [word[0], *[f'##{letter}' for letter in word[1:]]]


def _alphabet(counts: collections.Counter[str], vocab_size: int) -> tuple[list[str], int]:
  """The one-letter pieces, the most frequent where they leave no room for others; of how many."""
  letters: collections.Counter[str] = collections.Counter()
  for word, count in counts.items():
    for letter in _letters(word):
      letters[letter] += count
  room = (vocab_size - len(SPECIAL_TOKENS)) * 3 // 4
  if room < 1:
    raise TokenizerError(f'vocab_size {vocab_size} has no room beside the special tokens')
  by_count = sorted(letters, key=lambda letter: (-letters[letter], letter))
  chosen = sorted(by_count[:room], key=lambda letter: (letter.startswith('##'), letter))
  return chosen, len(letters)


def _repeated(words: list[str], counts: collections.Counter[str]) -> Iterator[str]:
  """The words as often as they count, in strings of bounded size.

  The trainer takes text, not counts. Above _TRAINING_WORDS in all the counts are scaled down, with
  rare words (1 or 2) left as they are; only ratios matter to it otherwise.
  """
  scale = min(1.0, _TRAINING_WORDS / sum(counts.values()))
  for word in words:
    times = max(min(2, counts[word]), round(counts[word] * scale))
    for first in range(0, times, 10_000):
      yield f'{word} ' * min(10_000, times - first)
