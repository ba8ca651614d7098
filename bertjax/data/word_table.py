"""Looks up a whole block of text in NumPy: every ASCII word of it at once, in a hash table.

A dictionary look-up a word costs a third of a microsecond, most of it waiting for memory; here a
word is two 64-bit integers, and cutting, hashing, looking up and copying ids are array operations.
Words that the table does not hold (new, longer than 16 bytes, not ASCII) are left to the caller.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32, Int64, UInt8, UInt64

_WORD_BYTES = 16
_SLOT_BITS = 19
_SLOTS = 1 << _SLOT_BITS
_BLOCK_CHARS = 1 << 18
_FACTORS = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F], np.uint64)
_SHIFT = np.uint64(64 - _SLOT_BITS)

_SPACE, _PUNCTUATION, _LETTER, _OTHER = range(4)


def _byte_classes() -> UInt8[np.ndarray, '256']:
  classes = np.full(256, _OTHER, np.uint8)
  for byte in range(0x21, 0x7F):
    classes[byte] = _LETTER if chr(byte).isalnum() else _PUNCTUATION
  classes[[0x20, 0x09, 0x0A, 0x0D]] = _SPACE
  return classes


_CLASSES = _byte_classes()
# Keeps the first n bytes of a little-endian 64-bit word.
_MASKS = np.array([(1 << 8 * count) - 1 for count in range(9)], np.uint64)


class Units(NamedTuple):
  """Where a block's words, single punctuation marks and other chunks begin and end, in bytes."""

  starts: Int64[np.ndarray, 'U']
  ends: Int64[np.ndarray, 'U']


def cut(block: bytes) -> Units:
  """Cuts UTF-8 text at white space and around ASCII punctuation.

  A white-space-separated chunk with any other byte (not ASCII, or a control character) stays whole.
  """
  classes = _CLASSES[np.frombuffer(block, np.uint8)]
  # A border of white space on both sides, so that every byte has neighbours.
  padded = np.zeros(len(classes) + 2, np.uint8)
  padded[1:-1] = classes
  others = np.flatnonzero(padded == _OTHER)
  if len(others):
    _widen(padded, others)
  change = padded[1:] != padded[:-1]
  mark = padded[1:-1] == _PUNCTUATION
  inside = padded[1:-1] != _SPACE
  starts = np.flatnonzero(inside & (change[:-1] | mark))
  ends = np.flatnonzero(inside & (change[1:] | mark)) + 1
  return Units(starts, ends)


def _widen(padded: UInt8[np.ndarray, 'N'], others: Int64[np.ndarray, 'O']) -> None:
  """Gives every byte of a chunk the class _OTHER if one has it."""
  spaces = np.flatnonzero(padded == _SPACE)
  after = np.unique(np.searchsorted(spaces, others))
  for first, last in zip(spaces[after - 1].tolist(), spaces[after].tolist(), strict=True):
    padded[first + 1 : last] = _OTHER


def word_keys(block: bytes, units: Units) -> UInt64[np.ndarray, 'U 2']:
  """The first 16 bytes of each unit as two integers, zero beyond its end."""
  words = np.frombuffer(block + bytes(2 * _WORD_BYTES - len(block) % 8), '<u8')
  index = units.starts >> 3
  shift = ((units.starts & 7) << 3).astype(np.uint64)
  # Shifting by 64 is undefined, so the following word is shifted by the rest but one, and by one.
  rest, one = np.uint64(63) - shift, np.uint64(1)
  first, second, third = words[index], words[index + 1], words[index + 2]
  lengths = units.ends - units.starts
  keys = np.empty((len(index), 2), np.uint64)
  keys[:, 0] = (first >> shift | second << one << rest) & _MASKS[np.minimum(lengths, 8)]
  keys[:, 1] = (second >> shift | third << one << rest) & _MASKS[np.clip(lengths - 8, 0, 8)]
  return keys


class WordTable:
  """Units of up to 16 bytes -> their ids; open addressing, bounded: emptied when it is full."""

  def __init__(self):
    self._clear()

  def _clear(self) -> None:
    # A slot: the two key words, where its ids lie in the pool, how many they are. Key 0: free.
    self._slots = np.zeros((_SLOTS, 4), np.uint64)
    self.ids = np.zeros(0, np.int32)
    self._size = 0

  def find(
    self, keys: UInt64[np.ndarray, 'U 2']
  ) -> tuple[Int64[np.ndarray, 'U'], Int64[np.ndarray, 'U']]:
    """Where in `ids` the ids of each unit begin, and how many; 0 for a unit that is not there."""
    slots = _hash(keys)
    rows = self._slots[slots]
    hit = (rows[:, 0] == keys[:, 0]) & (rows[:, 1] == keys[:, 1])
    place, number = rows[:, 2].astype(np.int64), np.where(hit, rows[:, 3], 0).astype(np.int64)
    left = np.flatnonzero(~hit & (rows[:, 0] != 0))
    while len(left):
      slots[left] = (slots[left] + 1) & (_SLOTS - 1)
      rows = self._slots[slots[left]]
      hit = (rows[:, 0] == keys[left, 0]) & (rows[:, 1] == keys[left, 1])
      place[left[hit]], number[left[hit]] = rows[hit, 2], rows[hit, 3]
      left = left[~hit & (rows[:, 0] != 0)]
    return place, number

  def add(self, keys: UInt64[np.ndarray, 'N 2'], ids: list[bytes]) -> None:
    """Adds units that are not there yet, all different; `ids` as int32 bytes."""
    if self._size + len(ids) > _SLOTS // 2:
      self._clear()
      keys, ids = keys[: _SLOTS // 2], ids[: _SLOTS // 2]
    numbers = np.fromiter(map(len, ids), np.int64, len(ids)) // 4
    rows = np.empty((len(ids), 4), np.uint64)
    rows[:, :2], rows[:, 3] = keys, numbers
    rows[:, 2] = len(self.ids) + np.cumsum(numbers) - numbers
    self.ids = np.concatenate([self.ids, np.frombuffer(b''.join(ids), np.int32)])
    self._size += len(ids)
    slots = _hash(keys)
    while len(rows):
      # Of several that want the same free slot the first gets it, the others try the next one.
      wanted, first = np.unique(slots, return_index=True)
      placed = first[self._slots[wanted, 0] == 0]
      self._slots[slots[placed]] = rows[placed]
      slots, rows = np.delete(slots, placed), np.delete(rows, placed, axis=0)
      slots = (slots + 1) & (_SLOTS - 1)


def _hash(keys: UInt64[np.ndarray, 'N 2']) -> Int64[np.ndarray, 'N']:
  mixed = keys[:, 0] ^ (keys[:, 1] * _FACTORS[1])
  mixed ^= mixed >> np.uint64(32)
  return (mixed * _FACTORS[0] >> _SHIFT).astype(np.int64)


class BlockEncoder:
  """Ids of many texts at once: table look-ups for what was met before, a callback for the rest."""

  def __init__(
    self,
    lowercase: bool,
    encode_word: Callable[[str], bytes],
    encode_chunk: Callable[[str], bytes],
  ):
    """Both give ids as int32 bytes.

    Args:
      lowercase: the rules lower-case.
      encode_word: called with ASCII letters and digits, already lower-cased.
      encode_chunk: called with anything else that has no ASCII white space in it.
    """
    self._lowercase = lowercase
    self._encode_word = encode_word
    self._encode_chunk = encode_chunk
    self._table = WordTable()

  def encode(
    self, texts: Sequence[str]
  ) -> tuple[Int32[np.ndarray, 'N'], Int32[np.ndarray, 'L']]:
    """All ids back to back and the number of ids of each text."""
    parts = [self._encode_block(block) for block in _blocks(texts)]
    if not parts:
      return np.zeros(0, np.int32), np.zeros(0, np.int32)
    ids, counts = zip(*parts, strict=True)
    return np.concatenate(ids), np.concatenate(counts)

  def _encode_block(
    self, texts: Sequence[str]
  ) -> tuple[Int32[np.ndarray, 'N'], Int32[np.ndarray, 'L']]:
    text = '\n'.join(texts)
    if text.count('\n') != len(texts) - 1:
      text = '\n'.join([part.replace('\n', ' ') for part in texts])
    # NUL is dropped by cleaning; here it would look like the end of a word.
    block = text.replace('\0', '').encode('utf-8', 'surrogatepass')
    # Changes ASCII letters only. The rules lower-case the rest; the order makes no difference.
    block = block.lower() if self._lowercase else block
    units = cut(block)
    place, number = self._look_up(block, units)
    new = np.flatnonzero(number == 0)
    known = self._table.ids
    if len(new):
      fresh = self._encode_new(block, units, new)
      number[new] = np.fromiter(map(len, fresh), np.int64, len(fresh)) // 4
      place[new] = len(known) + np.cumsum(number[new]) - number[new]
      known = np.concatenate([known, np.frombuffer(b''.join(fresh), np.int32)])
    total = np.concatenate([[0], np.cumsum(number)])
    ids = known[np.repeat(place - total[:-1], number) + np.arange(total[-1])]
    lines = np.flatnonzero(np.frombuffer(block, np.uint8) == 0x0A)
    borders = total[np.searchsorted(units.starts, lines)]
    counts = np.diff(np.concatenate([[0], borders, total[-1:]]))
    return ids, counts.astype(np.int32)

  def _look_up(
    self, block: bytes, units: Units
  ) -> tuple[Int64[np.ndarray, 'U'], Int64[np.ndarray, 'U']]:
    place, number = self._table.find(word_keys(block, units))
    # A key holds 16 bytes: a longer word may look like a shorter one.
    number[units.ends - units.starts > _WORD_BYTES] = 0
    return place, number

  def _encode_new(
    self, block: bytes, units: Units, new: Int64[np.ndarray, 'N']
  ) -> list[bytes]:
    """The ids of units that the table does not have; it gets the short ones."""
    starts, ends = units.starts[new].tolist(), units.ends[new].tolist()
    words = [block[start:end] for start, end in zip(starts, ends, strict=True)]
    first: dict[bytes, int] = {}
    for index, word in enumerate(words):
      first.setdefault(word, index)
    ids = {
      word: self._encode_word(word.decode())
      if word.isalnum()
      else self._encode_chunk(word.decode('utf-8', 'surrogatepass'))
      for word in first
    }
    short = [index for word, index in first.items() if len(word) <= _WORD_BYTES and ids[word]]
    chosen = Units(units.starts[new[short]], units.ends[new[short]])
    self._table.add(word_keys(block, chosen), [ids[words[index]] for index in short])
    return [ids[word] for word in words]


def _blocks(texts: Sequence[str]) -> Iterator[Sequence[str]]:
  """Bounds the memory a call takes: about 50 bytes for each of a block's."""
  first = size = 0
  for index, text in enumerate(texts):
    if size > _BLOCK_CHARS:
      yield texts[first:index]
      first, size = index, 0
    size += len(text)
  if first < len(texts):
    yield texts[first:]
