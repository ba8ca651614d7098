"""Masked-LM targets: which tokens are predicted, and what the model sees in their place.

As Google's `create_pretraining_data.py`: round(0.15 * length) tokens of an example, [CLS] and
[SEP] counted in the length but never chosen; of those chosen 80% become [MASK], 10% a random word,
10% stay. With whole-word masking, words are taken in random order, all pieces or none, and a word
that would go over the number is passed over; the 80/10/10 draw is per piece, as in Google's code.

A word never reaches across a [SEP]: where the cut to length leaves '##s' at the start of B,
Google's code adds it to the last word of A; here it is a word of its own.
"""

import dataclasses

import numpy as np
from jaxtyping import Bool, Float32, Int, Int32, Int64, UInt32, UInt64

from bertjax.data import hashing

_SPREAD = np.uint32(0x9E3779B9)
_TREATMENT = np.uint32(0x5BD1E995)
_WORD = np.uint32(0x2C1B3C6D)
# Words looked at beyond the number that would fill the budget; few rows need more.
_EXTRA_WORDS = 12


@dataclasses.dataclass(frozen=True)
class MaskingRule:
  """How many tokens are chosen and what replaces them.

  Attributes:
    mask_id: id of [MASK].
    random_words: ids a random replacement is drawn from.
    max_predictions: the most tokens chosen in an example.
    masked_lm_prob: share of the length that is chosen.
    mask_share: share of the chosen that become [MASK].
    random_share: share of the chosen that become a random word; the others stay.
    whole_words: choose words, not pieces.
  """

  mask_id: int
  random_words: Int32[np.ndarray, 'words']
  max_predictions: int
  masked_lm_prob: float = 0.15
  mask_share: float = 0.8
  random_share: float = 0.1
  whole_words: bool = False


def num_to_predict(
    length: Int[np.ndarray, 'b'], masked_lm_prob: float, max_predictions: int
) -> Int64[np.ndarray, 'b']:
  """min(cap, max(1, round(length * prob))), half to even; `length` counts [CLS] and [SEP]."""
  wanted = np.rint(length * masked_lm_prob).astype(np.int64)
  return np.clip(wanted, 1, max_predictions)


def mask_tokens(
    input_ids: Int32[np.ndarray, 'b t'],
    candidates: Bool[np.ndarray, 'b t'],
    length: Int[np.ndarray, 'b'],
    key: UInt64[np.ndarray, 'b'],
    rule: MaskingRule,
    word_starts: Bool[np.ndarray, 'b t'] | None = None,
) -> tuple[Int32[np.ndarray, 'b p'], Int32[np.ndarray, 'b p'], Float32[np.ndarray, 'b p']]:
  """Chooses tokens, replaces them in `input_ids` IN PLACE and returns the targets.

  Args:
    input_ids: T ids per row.
    candidates: where a token may be chosen: neither special tokens nor padding.
    length: tokens of each row, [CLS] and [SEP] included, padding not.
    key: a random word per row; the result depends on nothing else.
    rule: see MaskingRule.
    word_starts: where a word begins; only with `rule.whole_words`. A candidate after a
      position that is none begins a word in any case.

  Returns:
    masked_lm_positions (ascending; 0 in unused slots), masked_lm_ids (the ids that were there) and
    masked_lm_weights (1 for each chosen token, 0 in unused slots). A row without candidates has
    none chosen.
  """
  b, t = input_ids.shape
  random = hashing.mix32(
      (key >> np.uint64(32)).astype(np.uint32)[:, None] + np.arange(t, dtype=np.uint32) * _SPREAD
  )
  # The other half of the key as well: 32 bits of key would repeat within a long run.
  random ^= hashing.mix32(key.astype(np.uint32))[:, None]
  number = num_to_predict(length, rule.masked_lm_prob, rule.max_predictions)
  if rule.whole_words:
    chosen = _choose_words(random, candidates, word_starts, number)
  else:
    chosen = _choose_tokens(random, candidates, number, rule.max_predictions)
  flat = np.flatnonzero(chosen)
  count = np.count_nonzero(chosen, axis=1)
  row = np.repeat(np.arange(b), count)
  slot = np.arange(len(flat)) + np.repeat(
      np.arange(b) * rule.max_predictions - (np.cumsum(count) - count), count
  )
  positions = np.zeros((b, rule.max_predictions), np.int32)
  ids = np.zeros((b, rule.max_predictions), np.int32)
  weights = np.zeros((b, rule.max_predictions), np.float32)
  original = input_ids.ravel()[flat]
  positions.ravel()[slot] = flat - row * t
  ids.ravel()[slot] = original
  weights.ravel()[slot] = 1
  input_ids.ravel()[flat] = _replace(random.ravel()[flat], original, rule)
  return positions, ids, weights


def _choose_tokens(random, candidates, number, most):
  """The `number` candidates with the smallest random words, as a mask [B, T]."""
  t = random.shape[1]
  order = _sortable(random, candidates, t)
  most = min(most, t)
  smallest = np.sort(np.partition(order, most - 1, axis=1)[:, :most], axis=1) if most < t else (
      np.sort(order, axis=1)
  )
  last = np.take_along_axis(smallest, np.minimum(number, most)[:, None] - 1, axis=1)
  return (order <= last) & candidates


def _sortable(random, candidates, t):
  """Random words made distinct by their position in the low bits; non-candidates come last."""
  low = np.uint32((1 << (t - 1).bit_length()) - 1)
  order = random >> np.uint32(1) & ~low
  order |= np.arange(t, dtype=np.uint32)
  order[~candidates] = 0xFFFFFFFF
  return order


def _choose_words(random, candidates, word_starts, number):
  """Words in random order, all pieces or none, as long as they fit; as a mask [B, T]."""
  b, t = random.shape
  begins = candidates & word_starts
  begins[:, 1:] |= candidates[:, 1:] & ~candidates[:, :-1]
  begins[:, 0] |= candidates[:, 0]
  starts = np.flatnonzero(begins)
  # A word ends where the next one begins or where the candidates do. Both are found by counting
  # candidates, since a word is a run of them.
  before = np.cumsum(candidates.ravel(), dtype=np.int32)[starts] - 1
  size = np.diff(before, append=np.int32(np.count_nonzero(candidates)))
  sizes = np.zeros(b * t, np.int32)
  sizes[starts] = size
  order = _sortable(random, begins, t)
  wide = min(t, int(number.max(initial=1)) + _EXTRA_WORDS)
  taken = _greedy(order, sizes.reshape(b, t), number, wide)
  # Spread each word's choice over its pieces.
  chosen = np.zeros(b * t, bool)
  rows = np.repeat(taken[starts], size)
  chosen[np.flatnonzero(candidates)] = rows
  return chosen.reshape(b, t)


def _greedy(order, sizes, number, wide):
  """Which words are taken when `wide` words per row are looked at; flat mask over word starts."""
  b, t = order.shape
  rank = np.sort(
      order if wide == t else np.partition(order, wide - 1, axis=1)[:, :wide], axis=1
  )
  low = np.uint32((1 << (t - 1).bit_length()) - 1)
  position = np.where(rank == 0xFFFFFFFF, 0, rank & low).astype(np.int64)
  size = np.where(rank == 0xFFFFFFFF, 0, np.take_along_axis(sizes, position, axis=1))
  position += np.arange(b)[:, None] * t
  columns, left = np.ascontiguousarray(size.T), number.astype(np.int32)
  fits = np.empty((wide, b), bool)
  for word in range(wide):
    fits[word] = columns[word] <= left
    left = left - columns[word] * fits[word]
  fits &= columns > 0
  taken = np.zeros(b * t, bool)
  taken[position[fits.T]] = True
  short = np.flatnonzero((left > 0) & (rank[:, -1] != 0xFFFFFFFF))
  if wide < t and short.size:
    # Words were passed over and the row is not full: look at all of its words.
    taken.reshape(b, t)[short] = _greedy(order[short], sizes[short], number[short], t).reshape(
        -1, t
    )
  return taken


def _replace(
    random: UInt32[np.ndarray, 'n'], original: Int32[np.ndarray, 'n'], rule: MaskingRule
) -> Int32[np.ndarray, 'n']:
  """What stands in the place of chosen tokens: [MASK], a random word, or the token itself."""
  treatment = hashing.mix32(random ^ _TREATMENT)
  word = hashing.mix32(treatment ^ _WORD).astype(np.uint64)
  words = rule.random_words[(word * np.uint64(len(rule.random_words)) >> np.uint64(32))]
  share = treatment * 2.0**-32
  out = np.where(share < rule.mask_share + rule.random_share, words, original)
  out[share < rule.mask_share] = rule.mask_id
  return out
