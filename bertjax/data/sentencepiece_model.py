"""SentencePiece as Google's ALBERT uses it: its normalisation, its splitting of 'digit,'; training.

Source: google-research/albert, tokenization.py (preprocess_text, encode_pieces).
"""

import functools
import hashlib
import io
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, SupportsIndex

import numpy as np
import sentencepiece
from absl import logging
from etils import epath
from jaxtyping import Bool, Int

from bertjax.data.encoding import Encoding, TokenizerError, split_rows, write_files
from bertjax.data.text_rules import AlbertRules

SPECIAL_TOKENS = ('<pad>', '<unk>', '[CLS]', '[SEP]', '[MASK]')
_SPECIAL_TEXT = re.compile(r'(<pad>|<unk>|\[CLS\]|\[SEP\]|\[MASK\])')
_WORD_START = '▁'
# The trainer leaves out longer lines (its default), so they are cut before it sees them.
_MAX_LINE_BYTES = 4192


class Piece(NamedTuple):
  """A piece as the model prints it, with its place in the text the model was given."""

  id: int
  text: str
  start: int
  end: int


def load_model(model: bytes, name: str) -> sentencepiece.SentencePieceProcessor:
  """The processor of a .model file's bytes.

  Raises:
    TokenizerError: the bytes are no SentencePiece model.
  """
  try:
    return sentencepiece.SentencePieceProcessor(model_proto=model)
  except (RuntimeError, ValueError) as error:
    raise TokenizerError(f'{name}: not a SentencePiece model') from error


def model_pieces(processor: sentencepiece.SentencePieceProcessor, text: str) -> list[Piece]:
  """What the model alone makes of a text, with code-point offsets; '▁' takes up the space."""
  pieces = processor.encode_as_proto(text).pieces
  # The surfaces put together are the text but for what was dropped at its ends; the fields `begin`
  # and `end` count bytes in some releases of sentencepiece and code points in others.
  end = max(0, text.find(''.join([piece.surface for piece in pieces])))
  result = []
  for piece in pieces:
    start, end = end, end + len(piece.surface)
    if piece.piece.startswith(_WORD_START) and piece.surface[:1].isspace():
      start += 1
    result.append(Piece(piece.id, piece.piece, start, end))
  return result


class SentencePieceTokenizer:
  """See encoding.Tokenizer. Ids are those of google-research/albert's FullTokenizer."""

  type = 'sentencepiece'

  def __init__(self, model: bytes, rules: AlbertRules, name: str = 'spiece.model'):
    """model: the bytes of a .model file; name: what errors call it.

    Raises:
      TokenizerError: not a model, or one without the pieces BERT needs.
    """
    self._model = model
    self._processor = load_model(model, name)
    self.rules = rules
    self.vocab_size = self._processor.get_piece_size()
    self._tokens = [self._processor.id_to_piece(index) for index in range(self.vocab_size)]
    self._ids = {token: index for index, token in enumerate(self._tokens)}
    missing = [token for token in SPECIAL_TOKENS if token not in self._ids]
    if missing:
      raise TokenizerError(
        f'{name}: no piece {", ".join(missing)}; a BERT needs {" ".join(SPECIAL_TOKENS)}. Train the'
        ' model with them (python -m bertjax.data.tokenizer train --type sentencepiece)'
      )
    self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id = (
      self._ids[token] for token in SPECIAL_TOKENS
    )
    self.special_ids = (self.pad_id, self.cls_id, self.sep_id, self.mask_id)
    self._check_control(name)
    self._split_again = np.array([_digit_comma(token) for token in self._tokens])
    # Where the comma is unknown it may be one unknown piece together with a digit before it.
    self._split_again[self.unk_id] = ',' not in self._ids

  def _check_control(self, name: str) -> None:
    """Special pieces must not be found in text (B026)."""
    wrong = [self._tokens[i] for i in self.special_ids if not self._processor.is_control(i)]
    if wrong:
      raise TokenizerError(
        f'{name}: {", ".join(wrong)} would be found in ordinary text; train the model with them as'
        ' control symbols'
      )

  @functools.cached_property
  def ordinary_ids(self) -> Int[np.ndarray, 'N']:
    model = self._processor
    return np.array(
      [
        index
        for index in range(self.vocab_size)
        if not (model.is_control(index) or model.is_unknown(index) or model.is_unused(index))
      ],
      np.int32,
    )

  @functools.cached_property
  def continuation(self) -> Bool[np.ndarray, 'V']:
    special = {*self.special_ids, self.unk_id}
    return np.array(
      [
        index not in special and not token.startswith(_WORD_START)
        for index, token in enumerate(self._tokens)
      ]
    )

  @property
  def switches(self) -> dict[str, bool | int]:
    return {'lowercase': self.rules.lowercase, 'strip_accents': self.rules.strip_accents}

  def _pieces(self, text: str) -> list[Piece]:
    """ALBERT's encode_pieces: '▁1997,' becomes the pieces of '1997' and ','."""
    result = []
    for piece in model_pieces(self._processor, text):
      result += self._split_digit_comma(piece) if _digit_comma(piece.text) else [piece]
    return result

  def _split_digit_comma(self, piece: Piece) -> list[Piece]:
    parts = self._processor.encode(piece.text[:-1].replace(_WORD_START, ''), out_type=str)
    if not piece.text.startswith(_WORD_START) and parts[0].startswith(_WORD_START):
      parts = parts[1:] if len(parts[0]) == 1 else [parts[0][1:], *parts[1:]]
    result, start = [], piece.start
    for part in [*parts, ',']:
      end = min(piece.end, start + len(part.removeprefix(_WORD_START)))
      result.append(Piece(self._ids.get(part, self.unk_id), part, start, end))
      start = end
    return result

  def encode_lines(
    self, texts: Sequence[str]
  ) -> tuple[Int[np.ndarray, 'N'], Int[np.ndarray, 'L']]:
    """The ids of many texts back to back and the number of ids of each, both int32."""
    normalised = [self.rules.normalise(text) for text in texts]
    rows = self._processor.encode(normalised, out_type=int, num_threads=1)
    counts = np.fromiter(map(len, rows), np.int32, len(rows))
    flat = np.fromiter(itertools.chain.from_iterable(rows), np.int32, int(counts.sum()))
    again = self._split_again[flat]
    if not again.any():
      return flat, counts
    for row in np.unique(np.searchsorted(np.cumsum(counts), np.flatnonzero(again), 'right')):
      rows[row] = [piece.id for piece in self._pieces(normalised[row])]
      counts[row] = len(rows[row])
    flat = np.fromiter(itertools.chain.from_iterable(rows), np.int32, int(counts.sum()))
    return flat, counts

  def encode_batch(self, texts: Sequence[str]) -> list[Int[np.ndarray, '_']]:
    return split_rows(*self.encode_lines(texts))

  def encode(self, text: str, special_text: bool = False) -> Encoding:
    """See Tokenizer.encode; offsets leave out the space that '▁' stands for."""
    encoding = Encoding([], [], [], [])
    position = 0
    for part in _SPECIAL_TEXT.split(text) if special_text else [text]:
      if special_text and part in SPECIAL_TOKENS:
        found = [Piece(self._ids[part], part, 0, len(part))]
        origins: Sequence[int] = range(len(part))
      else:
        normalised, origins = self.rules.align(part)
        found = self._pieces(normalised)
      for piece in found:
        encoding.ids.append(piece.id)
        encoding.tokens.append(piece.text)
        encoding.offsets.append(_place(piece, origins, position))
        special = special_text and piece.text in SPECIAL_TOKENS
        encoding.word_starts.append(special or piece.text.startswith(_WORD_START))
      position += len(part)
    return encoding

  def decode(self, ids: Iterable[SupportsIndex]) -> str:
    return ''.join(map(self.token, ids)).replace(_WORD_START, ' ').strip()

  def token(self, index: SupportsIndex) -> str:
    return self._tokens[index]

  def token_id(self, token: str) -> int | None:
    return self._ids.get(token)

  def hash(self) -> str:
    switches = json.dumps({'type': self.type, **self.switches}, sort_keys=True)
    return hashlib.sha256(switches.encode() + b'\0' + self._model).hexdigest()

  def save(self, folder: epath.PathLike) -> None:
    """Writes spiece.model, then tokenizer_config.json: names that Transformers knows as well."""
    config = {
      'type': self.type,
      'tokenizer_class': 'AlbertTokenizer',
      'do_lower_case': self.rules.lowercase,
      'keep_accents': not self.rules.strip_accents,
      'remove_space': True,
    }
    settings = json.dumps(config, indent=2).encode() + b'\n'
    write_files(folder, {'spiece.model': self._model, 'tokenizer_config.json': settings})


def train_sentencepiece(
  texts: Iterable[str], vocab_size: int, rules: AlbertRules
) -> SentencePieceTokenizer:
  """A unigram model over ALBERT-normalised text, with BERT's special pieces at 0 to 4.

  Lines above the trainer's limit of 4192 bytes are cut at spaces, so that no text is left out. One
  thread: the same text gives the same model. A small text may give fewer pieces than asked for.

  Raises:
    TokenizerError: no text, or vocab_size too small for the text's characters.
  """
  lines = _TrainingLines(texts, rules)
  first = next(lines, None)
  if first is None:
    raise TokenizerError('there is no text to train on: every line is empty')
  model = io.BytesIO()
  try:
    sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=itertools.chain([first], lines),
      model_writer=model,
      model_type='unigram',
      vocab_size=vocab_size,
      hard_vocab_limit=False,
      pad_id=0,
      unk_id=1,
      bos_id=-1,
      eos_id=-1,
      pad_piece='<pad>',
      unk_piece='<unk>',
      control_symbols=['[CLS]', '[SEP]', '[MASK]'],
      max_sentence_length=_MAX_LINE_BYTES,
      num_threads=1,
      minloglevel=2,
    )
  except RuntimeError as error:
    if lines.error is not None:
      raise lines.error from None
    raise TokenizerError(
      f'SentencePiece found no {vocab_size} pieces in {lines.count} lines of text; ask for another'
      f' --vocab_size or give more text. It says: {str(error).strip()}'
    ) from error
  logging.info(
    'SentencePiece: %d lines, %d of them longer than %d bytes and cut at spaces, 0 left out',
    lines.count,
    lines.cut,
    _MAX_LINE_BYTES,
  )
  return SentencePieceTokenizer(model.getvalue(), rules)


class _TrainingLines(Iterator[str]):
  """Normalised lines that the trainer takes whole, and what was cut on the way."""

  def __init__(self, texts: Iterable[str], rules: AlbertRules):
    self.count = self.cut = 0
    # What reading the text raised; the trainer, which asks for the lines, hides its type.
    self.error: Exception | None = None
    self._lines = self._normalised(texts, rules)

  def __next__(self) -> str:
    try:
      return next(self._lines)
    except StopIteration:
      raise
    except Exception as error:
      self.error = error
      raise

  def _normalised(self, texts: Iterable[str], rules: AlbertRules) -> Iterator[str]:
    for text in texts:
      # The trainer passes over lines with these two characters, which it uses itself.
      line = rules.normalise(text.replace('\0', ' ').replace('\u2585', ' '))
      self.count += 1
      if len(line.encode()) <= _MAX_LINE_BYTES:
        yield from [line] if line else []
      else:
        self.cut += 1
        yield from cut_line(line, _MAX_LINE_BYTES)


def cut_line(line: str, limit: int) -> Iterator[str]:
  """Cuts a line into parts of at most `limit` bytes (4 or more), at spaces where it has any."""
  data, start = line.encode(), 0
  while len(data) - start > limit:
    end = data.rfind(b' ', start + 1, start + limit + 1)
    if end < 0:
      end = start + limit
      while data[end] & 0xC0 == 0x80:  # a later byte of a code point
        end -= 1
    yield data[start:end].decode()
    start = end + (data[end] == ord(' '))
  if start < len(data):
    yield data[start:].decode()


def _digit_comma(piece: str) -> bool:
  return len(piece) > 1 and piece[-1] == ',' and piece[-2].isdigit()


def _place(piece: Piece, origins: Sequence[int], position: int) -> tuple[int, int]:
  """From the normalised text's characters to the original's; an empty piece keeps its place."""
  if piece.start < piece.end:
    return position + origins[piece.start], position + origins[piece.end - 1] + 1
  place = origins[piece.start] if piece.start < len(origins) else len(origins)
  return position + place, position + place
