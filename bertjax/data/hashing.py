"""Random numbers as pure functions of what they are for: counter hashes, no generator objects.

Every draw of the input pipeline is a hash of (seed, epoch, document, sentence, purpose). So an
example can be made alone, in any order and on any host, and is the same each time: resuming is a
seek. The 64-bit hash is splitmix64 (Steele, Lea and Flood, OOPSLA 2014), the 32-bit one, used per
token, Wellons' `lowbias32`.

All arithmetic is modulo 2**64 or 2**32 on arrays of one or more dimensions: numpy warns when a
scalar wraps around.
"""

import numpy as np
from jaxtyping import Bool, Float, Int64, Integer, UInt32, UInt64

_GOLDEN = 0x9E3779B97F4A7C15
_FOLD = np.uint64(0xD6E8FEB86659FD93)  # odd, so that folding a part in is a bijection
_ROUNDS = 8  # of the Feistel network; each is a cheap multiplication


def mix64(x: UInt64[np.ndarray, '...']) -> UInt64[np.ndarray, '...']:
  """The splitmix64 finaliser: a bijection on 64-bit words that looks random."""
  x = x ^ (x >> np.uint64(30))
  x *= np.uint64(0xBF58476D1CE4E5B9)
  x ^= x >> np.uint64(27)
  x *= np.uint64(0x94D049BB133111EB)
  x ^= x >> np.uint64(31)
  return x


def mix32(x: UInt32[np.ndarray, '...']) -> UInt32[np.ndarray, '...']:
  """`lowbias32`: a bijection on 32-bit words that looks random; changes `x` in place."""
  x ^= x >> np.uint32(16)
  x *= np.uint32(0x7FEB352D)
  x ^= x >> np.uint32(15)
  x *= np.uint32(0x846CA68B)
  x ^= x >> np.uint32(16)
  return x


def fold(
    key: int | UInt64[np.ndarray, '*n'], *parts: int | Integer[np.ndarray, '*m']
) -> UInt64[np.ndarray, '...']:
  """Folds non-negative integers or arrays (broadcast) into a key, one after the other."""
  key = np.atleast_1d(np.asarray(key, np.uint64))
  for part in parts:
    # Not `part` itself: folding in 0 would be the draw `bits(key, 0)`, and the two not independent.
    after = np.atleast_1d(np.asarray(part, np.uint64)) + np.uint64(1)
    key = mix64(key + np.uint64(_GOLDEN) ^ after * _FOLD)
  return key


def fold_int(*parts: int) -> int:
  """`fold` of plain integers to one plain integer."""
  return int(fold(*parts, 0)[0])


def bits(key: UInt64[np.ndarray, '*n'], purpose: int) -> UInt64[np.ndarray, '*n']:
  """64 random bits per key; draws for different purposes are independent."""
  return mix64(key + np.uint64((purpose + 1) * _GOLDEN & 0xFFFFFFFFFFFFFFFF))


def below(
    random: UInt64[np.ndarray, '*n'], n: int | Integer[np.ndarray, '*n']
) -> Int64[np.ndarray, '*n']:
  """Uniform integers in [0, n) for 1 <= n <= 2**32, from the upper halves of random words."""
  return ((random >> np.uint64(32)) * np.asarray(n, np.uint64) >> np.uint64(32)).astype(np.int64)


def chance(random: UInt64[np.ndarray, '*n'], probability: float) -> Bool[np.ndarray, '*n']:
  """True with the given probability (to 2**-53)."""
  return uniform(random) < probability


def uniform(random: UInt64[np.ndarray, '*n']) -> Float[np.ndarray, '*n']:
  """Uniform numbers in [0, 1)."""
  return (random >> np.uint64(11)).astype(np.float64) * 2.0**-53


def binomial_half(
    key: UInt64[np.ndarray, 'n'], trials: Integer[np.ndarray, 'n']
) -> Int64[np.ndarray, 'n']:
  """Exact Binomial(trials, 1/2) draws: the set bits among `trials` random bits."""
  heads = np.zeros(trials.shape, np.int64)
  todo = np.flatnonzero(trials > 0)
  left = trials[todo].astype(np.int64)
  word = 0
  while todo.size:
    take = np.minimum(left, 64)
    drawn = bits(key[todo], word) >> (64 - take).astype(np.uint64)
    heads[todo] += np.bitwise_count(drawn)
    more = left > 64
    todo, left, word = todo[more], left[more] - 64, word + 1
  return heads


def permute(index: Int64[np.ndarray, 'n'], size: int, key: int) -> Int64[np.ndarray, 'n']:
  """Where a keyed permutation of [0, size) sends each index, in O(1) memory.

  A Feistel network over the next power of two, walked until the value is below `size` (at most
  two passes per index on average).
  """
  width = max(2, (size - 1).bit_length())
  low = np.uint64(width - width // 2)
  left_mask, right_mask = np.uint64((1 << width // 2) - 1), np.uint64((1 << int(low)) - 1)
  keys = fold(key, np.arange(_ROUNDS))
  out = index.astype(np.uint64)
  todo, moving = slice(None), out
  while moving.size:
    left, right = moving >> low, moving & right_mask
    for r in range(0, _ROUNDS, 2):
      left ^= (right + keys[r]) * _FOLD >> np.uint64(32) & left_mask
      right ^= (left + keys[r + 1]) * _FOLD >> np.uint64(32) & right_mask
    out[todo] = left << low | right
    todo = np.flatnonzero(out >= np.uint64(size))
    moving = out[todo]
  return out.astype(np.int64)
