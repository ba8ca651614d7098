"""What every tokenizer gives and offers: the Encoding, the Tokenizer protocol, the error."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol, SupportsIndex, runtime_checkable

import numpy as np
from etils import epath
from jaxtyping import Bool, Int


class TokenizerError(ValueError):
  """A vocabulary, model or setting that cannot be used; the message names the file and the mend."""


class Encoding(NamedTuple):
  """One text as tokens.

  Attributes:
    ids: vocabulary ids, without [CLS] and [SEP].
    tokens: the pieces as the reference prints them: WordPiece shows '[UNK]' for an unknown word,
      SentencePiece (like Google's ALBERT code) the unknown text itself.
    offsets: (start, end) of each token in code points of the original text.
    word_starts: True where a token begins a word.
  """

  ids: list[int]
  tokens: list[str]
  offsets: list[tuple[int, int]]
  word_starts: list[bool]


@runtime_checkable
class Tokenizer(Protocol):
  """Text to ids and back; WordPiece and SentencePiece look the same from here.

  Attributes:
    type: 'wordpiece' or 'sentencepiece'.
    vocab_size: number of ids.
    pad_id, unk_id, cls_id, sep_id, mask_id: the ids BERT needs.
    special_ids: ids that are never masked and never come from text: pad, cls, sep, mask. The
      unknown token is not among them: it stands for a real word, and Google masks it like one.
    ordinary_ids: ids a random replacement may draw, ascending: no special, unknown or [unusedN].
    continuation: True where the piece continues a word ('##x', or no leading '▁').
    switches: what shapes the ids besides the vocabulary, as the manifest records it.
  """

  type: str
  vocab_size: int
  pad_id: int
  unk_id: int
  cls_id: int
  sep_id: int
  mask_id: int
  special_ids: tuple[int, ...]
  ordinary_ids: Int[np.ndarray, 'N']
  continuation: Bool[np.ndarray, 'V']
  switches: dict[str, bool | int]

  def encode(self, text: str, special_text: bool = False) -> Encoding:
    """Ids, tokens, offsets and word starts; a literal '[MASK]' counts only with special_text."""
    ...

  def encode_lines(
    self, texts: Sequence[str]
  ) -> tuple[Int[np.ndarray, 'N'], Int[np.ndarray, 'L']]:
    """The ids of many texts back to back, and how many each has: the fast way, int32."""
    ...

  def encode_batch(self, texts: Sequence[str]) -> list[Int[np.ndarray, '_']]:
    """The ids of each text, int32."""
    ...

  def decode(self, ids: Iterable[SupportsIndex]) -> str:
    """Readable text; spaces around punctuation are not restored by WordPiece."""
    ...

  def token(self, index: SupportsIndex) -> str:
    """The piece with this id."""
    ...

  def token_id(self, token: str) -> int | None:
    """The id of this piece, None where the vocabulary has no such piece."""
    ...

  def hash(self) -> str:
    """sha256 over the vocabulary's bytes and every switch, hexadecimal."""
    ...

  def save(self, folder: epath.PathLike) -> None:
    """Writes the vocabulary, byte for byte as it was read, and tokenizer_config.json."""
    ...


def split_rows(
  flat: Int[np.ndarray, 'N'], counts: Int[np.ndarray, 'L']
) -> list[Int[np.ndarray, '_']]:
  """Cuts what encode_lines gives back into one array a text."""
  return np.split(flat, np.cumsum(counts)[:-1]) if len(counts) else []


def write_files(folder: epath.PathLike, files: dict[str, bytes]) -> None:
  """Writes files into a folder so that each is there whole or not at all.

  They come in the order given: where the last is, all are.
  """
  folder = epath.Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  for name, content in files.items():
    temporary = folder / f'{name}.tmp'
    temporary.write_bytes(content)
    temporary.replace(folder / name)
