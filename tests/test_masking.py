"""Masking alone: counts, candidates, the 80/10/10 split, whole words, and the bug reports."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertjax.data import hashing, masking

MASK = 4
WORDS = np.arange(10, 100, dtype=np.int32)


def rule(**changes):
  return masking.MaskingRule(
      **{'mask_id': MASK, 'random_words': WORDS, 'max_predictions': 20, **changes}
  )


def run(row, candidates, length, rule, draws, word_starts=None):
  """Masks one row `draws` times: ids after, positions, ids before, weights."""
  ids = np.tile(np.asarray(row, np.int32), (draws, 1))
  flags = np.zeros(ids.shape, bool)
  flags[:, candidates] = True
  starts = None if word_starts is None else np.tile(np.asarray(word_starts), (draws, 1))
  out = masking.mask_tokens(
      ids, flags, np.full(draws, length), hashing.fold(1, np.arange(draws)), rule, starts
  )
  return ids, *out


def text_row(t=128, seed=0):
  """[CLS] ... [SEP] without padding, and its candidates."""
  row = np.random.default_rng(seed).integers(10, 100, t)
  row[0], row[-1] = 2, 3
  return row, np.arange(1, t - 1)


def test_number_of_predictions_is_googles(golden):
  cases = json.loads((golden / '06_masking' / 'num_to_predict.json').read_text(encoding='utf-8'))
  lengths = np.array(cases['len'])
  for cap in (20, 76):
    got = masking.num_to_predict(lengths, 0.15, cap)
    np.testing.assert_array_equal(got, cases[f'cap{cap}'])


def test_number_of_predictions_rounds_half_to_even():
  lengths = np.array([1, 3, 10, 30, 50, 128, 512])  # 1.5 -> 2, 4.5 -> 4, 7.5 -> 8
  np.testing.assert_array_equal(
      masking.num_to_predict(lengths, 0.15, 76), [1, 1, 2, 4, 8, 19, 76]
  )


@pytest.mark.parametrize('whole_words', [False, True])
def test_targets_restore_the_text_and_are_sorted(whole_words):
  row, candidates = text_row()
  starts = np.random.default_rng(1).random(len(row)) < 0.6
  ids, positions, labels, weights = run(
      row, candidates, 128, rule(whole_words=whole_words), 500, starts
  )
  for i in range(500):
    used = weights[i] > 0
    assert used.sum() == 19 and used[:19].all()
    assert (np.diff(positions[i][used]) > 0).all()
    assert (positions[i][~used] == 0).all() and (labels[i][~used] == 0).all()
    restored = ids[i].copy()
    restored[positions[i][used]] = labels[i][used]
    np.testing.assert_array_equal(restored, row)
  assert len({tuple(p) for p in positions}) == 500


def test_depends_on_the_key_of_the_row_alone():
  row, candidates = text_row(64)
  ids, positions, labels, _ = run(row, candidates, 64, rule(), 40)
  pick = np.array([31, 2, 2, 17])
  again = np.tile(row.astype(np.int32), (4, 1))
  flags = np.zeros(again.shape, bool)
  flags[:, candidates] = True
  key = hashing.fold(1, pick)
  got = masking.mask_tokens(again, flags, np.full(4, 64), key, rule())
  np.testing.assert_array_equal(got[0], positions[pick])
  np.testing.assert_array_equal(got[1], labels[pick])
  np.testing.assert_array_equal(again, ids[pick])


def test_choice_of_positions_is_uniform():
  row, candidates = text_row(40)
  _, positions, _, weights = run(row, candidates, 40, rule(), 20_000)
  counts = np.bincount(positions[weights > 0], minlength=40)[1:-1]
  expected = 20_000 * 6 / 38
  chi_square = ((counts - expected) ** 2 / expected).sum()
  assert chi_square < 75  # 37 degrees of freedom, p = 2e-4


def mask_case(bugs, name):
  cases = json.loads((bugs / 'mask_cases.json').read_text(encoding='utf-8'))
  (case,) = [case for case in cases if case['id'] == name]
  special = {'[CLS]': 2, '[SEP]': 3, '[PAD]': 1}
  row = [special.get(token, 10 + i) for i, token in enumerate(case['tokens'])]
  return row, case['maskable'], sum(token != '[PAD]' for token in case['tokens']), case


@pytest.mark.parametrize('whole_words', [False, True])
def test_b034_padding_is_never_chosen(bugs, whole_words):
  row, maskable, length, _ = mask_case(bugs, 'padding')
  starts = np.ones(len(row), bool)
  ids, positions, _, weights = run(
      row, maskable, length, rule(whole_words=whole_words), 10_000, starts
  )
  assert set(positions[weights > 0].tolist()) == set(maskable)
  others = np.setdiff1d(np.arange(len(row)), maskable)
  assert (ids[:, others] == np.asarray(row)[others]).all()


@pytest.mark.parametrize('whole_words', [False, True])
def test_b035_special_tokens_are_never_chosen(bugs, whole_words):
  row, maskable, length, _ = mask_case(bugs, 'only_specials')
  ids, _, _, weights = run(
      row, maskable, length, rule(whole_words=whole_words), 100, np.ones(len(row), bool)
  )
  assert weights.sum() == 0 and (ids == row).all()
  row, maskable, length, _ = mask_case(bugs, 'one_token')
  _, positions, _, weights = run(
      row, maskable, length, rule(whole_words=whole_words), 100, np.ones(len(row), bool)
  )
  assert (weights.sum(1) == 1).all() and (positions[:, 0] == 1).all()
  row, maskable, length, case = mask_case(bugs, 'budget_over')
  asked = rule(whole_words=whole_words, masked_lm_prob=case['masked_lm_prob'])
  _, positions, _, weights = run(row, maskable, length, asked, 1000, np.ones(len(row), bool))
  assert (weights.sum(1) == 6).all() and (positions[:, :6] == np.arange(1, 7)).all()


@pytest.mark.parametrize('whole_words', [False, True])
def test_special_and_padding_positions_are_never_chosen(whole_words):
  """The twin of B034 and B035 without files; ids at the candidates may be anything."""
  row = np.array([2, 3, 1, 4, 3, 1, 1, 1, 1, 1], np.int32)  # the text itself looks special
  ids, positions, _, weights = run(
      row, [1, 2, 3], 5, rule(whole_words=whole_words, masked_lm_prob=0.5), 2000, np.ones(10, bool)
  )
  assert set(positions[weights > 0].tolist()) == {1, 2, 3}
  assert (ids[:, [0, 4, 5, 6, 7, 8, 9]] == row[[0, 4, 5, 6, 7, 8, 9]]).all()
  empty = run(row, [], 5, rule(whole_words=whole_words), 3, np.ones(10, bool))
  assert empty[3].sum() == 0 and (empty[0] == row).all()


def test_b036_random_words_are_ordinary_and_flat():
  row, candidates = text_row(128)
  always = rule(mask_share=0.0, random_share=1.0, masked_lm_prob=0.9, max_predictions=128)
  ids, positions, _, weights = run(row, candidates, 128, always, 9000)
  drawn = np.take_along_axis(ids, positions.astype(np.int64), 1)[weights > 0]
  assert drawn.size > 1_000_000
  counts = np.bincount(drawn, minlength=100)
  assert (counts[:10] == 0).all() and (counts[10:] > 0).all()
  expected = drawn.size / 90
  assert ((counts[10:] - expected) ** 2 / expected).sum() < 140  # 89 degrees, p = 5e-4


def test_b037_eighty_ten_ten_of_fifteen_percent():
  row, candidates = text_row(512)
  free = rule(max_predictions=512, random_words=np.array([200], np.int32))
  ids, positions, labels, weights = run(row, candidates, 512, free, 14_000)
  used = weights > 0
  assert used.sum() > 1_000_000
  seen = np.take_along_axis(ids, positions.astype(np.int64), 1)[used]
  assert abs((seen == MASK).mean() - 0.8) < 0.003
  assert abs((seen == 200).mean() - 0.1) < 0.003
  assert abs((seen == labels[used]).mean() - 0.1) < 0.003
  assert abs(used.sum() / (14_000 * 510) - 0.15) < 0.001


def test_b038_whole_words_all_or_none_and_mixed_treatment():
  row, candidates = text_row(128)
  starts = np.ones(128, bool)
  starts[[2, 3, 4, 20, 21, 40]] = False  # words of 4, 3 and 2 pieces
  words = [[1, 2, 3, 4], [19, 20, 21], [39, 40]]
  ids, positions, _, weights = run(row, candidates, 128, rule(whole_words=True), 10_000, starts)
  chosen = np.zeros((10_000, 128), bool)
  draw, slot = np.nonzero(weights)
  chosen[draw, positions[draw, slot]] = True
  assert (chosen.sum(1) == 19).all()
  treatment = np.where(ids == MASK, 0, np.where(ids == row, 2, 1))
  for word in words:
    hit = chosen[:, word]
    assert (hit.all(1) == hit.any(1)).all()
    assert 0.1 < hit.all(1).mean() < 0.17  # long words are passed over a little more often
    kinds = treatment[hit.all(1)][:, word]
    mixed = (kinds != kinds[:, :1]).any(1).mean()
    same = 0.8 ** len(word) + 2 * 0.1 ** len(word)  # the draw is per piece
    assert abs(mixed - (1 - same)) < 0.045


def test_words_that_do_not_fit_are_passed_over():
  """Budget 3; one word of 30 pieces and few short ones: the long one is never taken."""
  row = np.arange(10, 46).astype(np.int32)
  starts = np.zeros(36, bool)
  starts[[1, 31, 33, 34]] = True  # 30, 2, 1 and 1 pieces
  _, positions, _, weights = run(
      row, np.arange(1, 35), 20, rule(whole_words=True), 2000, starts
  )
  taken = {tuple(p[w > 0].tolist()) for p, w in zip(positions, weights, strict=True)}
  # In random order, whatever fits: 2 + 1, or 1 + 1 and then nothing more.
  assert taken == {(31, 32, 33), (31, 32, 34), (33, 34)}


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_whole_words_match_the_plain_loop(data):
  """The vectorised greedy choice against a loop over words in the same random order."""
  t = data.draw(st.integers(2, 90))
  seed = data.draw(st.integers(0, 10**6))
  rng = np.random.default_rng(seed)
  b = 5
  candidates = rng.random((b, t)) < rng.random()
  starts = rng.random((b, t)) < rng.random()
  number = rng.integers(1, 20, b)
  random = rng.integers(0, 2**32, (b, t), dtype=np.uint32)
  got = masking._choose_words(random, candidates, starts, number)
  for i in range(b):
    words = []
    for p in np.flatnonzero(candidates[i]).tolist():
      if words and not starts[i, p] and p - 1 == words[-1][-1]:
        words[-1].append(p)
      else:
        words.append([p])
    low = (1 << (t - 1).bit_length()) - 1
    words.sort(key=lambda w: ((int(random[i, w[0]]) >> 1) & ~low, w[0]))
    left, expected = int(number[i]), []
    for word in words:
      if len(word) <= left:
        expected += word
        left -= len(word)
    assert np.flatnonzero(got[i]).tolist() == sorted(expected)


def test_b040_every_mode_returns_the_same_arrays():
  row, candidates = text_row(64)
  plain = run(row, candidates, 64, rule(), 4)
  words = run(row, candidates, 64, rule(whole_words=True), 4, np.ones(64, bool))
  for x, y in zip(plain, words, strict=True):
    assert x.shape == y.shape and x.dtype == y.dtype


def test_b042_a_low_cap_still_chooses_uniformly():
  row, candidates = text_row(512)
  _, positions, _, weights = run(row, candidates, 512, rule(max_predictions=20), 4000)
  assert (weights.sum(1) == 20).all()
  quarter = np.bincount(positions[weights > 0] // 128, minlength=4)
  assert np.abs(quarter / quarter.sum() - 0.25).max() < 0.01
