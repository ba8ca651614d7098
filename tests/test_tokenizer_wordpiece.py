"""WordPiece: Google's ids, offsets, the fast path, training."""

import json
import random
import sys
import unicodedata

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bertjax.data import text_rules, word_table, wordpiece
from bertjax.data.text_rules import TextRules
from bertjax.data.tokenizer import TokenizerError, load, train
from bertjax.data.wordpiece import WordPieceTokenizer

SPECIALS = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]']
LETTERS = 'abcdefghijklmnopqrstuvwxyz0123456789éüßıςσα'
ENTRIES = [
  *SPECIALS, '[unused1]', *LETTERS, *(f'##{c}' for c in LETTERS), *'.,!?[]()-–—“”¿$',
  'the', 'river', 'mill', 'mask', 'sep', 'cls', '##ing', '##er', '中', '水', 'コ', '##ー',
]  # fmt: skip
VOCABULARY = ''.join(f'{entry}\n' for entry in ENTRIES).encode()


def make(vocabulary: bytes = VOCABULARY, **switches) -> WordPieceTokenizer:
  return WordPieceTokenizer(vocabulary, TextRules(**switches))


def reference_tokens(text: str, tokenizer: WordPieceTokenizer) -> list[str]:
  """Google's rules said once more, character by character, with no thought of speed."""
  rules = tokenizer.rules
  spaced = ''
  for c in text:
    category = unicodedata.category(c)
    if c in ' \t\n\r' or category == 'Zs':
      spaced += ' '
    elif c == '\ufffd' or category in ('Cc', 'Cf'):
      continue
    elif is_ideograph(ord(c)) and rules.split_cjk:
      spaced += f' {c} '
    else:
      spaced += c
  tokens = []
  for chunk in spaced.split():
    chunk = chunk.lower() if rules.lowercase else chunk
    if rules.strip_accents:
      chunk = ''.join(c for c in unicodedata.normalize('NFD', chunk)
                      if unicodedata.category(c) != 'Mn')
    separate = ''.join(f' {c} ' if is_punctuation(c) else c for c in chunk)
    for word in separate.split():
      tokens += greedy(word, tokenizer)
  return tokens


def is_ideograph(code: int) -> bool:
  return (
    0x4E00 <= code <= 0x9FFF or 0x3400 <= code <= 0x4DBF or 0x20000 <= code <= 0x2A6DF
    or 0x2A700 <= code <= 0x2B73F or 0x2B740 <= code <= 0x2B81F or 0x2B820 <= code <= 0x2CEAF
    or 0xF900 <= code <= 0xFAFF or 0x2F800 <= code <= 0x2FA1F
  )  # fmt: skip


def is_punctuation(c: str) -> bool:
  code = ord(c)
  symbol = 33 <= code <= 47 or 58 <= code <= 64 or 91 <= code <= 96 or 123 <= code <= 126
  return symbol or unicodedata.category(c).startswith('P')


def greedy(word: str, tokenizer: WordPieceTokenizer) -> list[str]:
  if len(word) > tokenizer.rules.max_chars_per_word:
    return ['[UNK]']
  pieces, rest = [], word
  while rest:
    for end in range(len(rest), 0, -1):
      piece = ('##' if pieces else '') + rest[:end]
      if tokenizer.token_id(piece) is not None:
        break
    else:
      return ['[UNK]']
    pieces.append(piece)
    rest = rest[end:]
  return pieces


# Hostile characters beside ordinary ones, so that examples meet the vocabulary and the odd rules.
texts = st.text(
  st.one_of(
    st.sampled_from('abcrivemlTHES the.,![]()-–“”¿$éÉüßİIıΣσς中水コー'),
    st.sampled_from('\t\n\r \x00\x0b\x1c\x1f\x7f\x85\xa0\xad\u0301\u0307\u200b\u2028\u3000\ufffd'),
    st.characters(),
  ),
  max_size=60,
)


class TestGolden:
  """Every string of shared/golden/04_tokenize."""

  @pytest.mark.parametrize('case', ['uncased', 'cased'])
  def test_google_ids_tokens_and_offsets(self, golden, case):
    folder = golden / '04_tokenize'
    tokenizer = load(folder / f'vocab_{case}.txt', lowercase=case == 'uncased')
    rows = json.loads((folder / f'bert_{case}.json').read_text(encoding='utf-8'))['rows']
    batch = tokenizer.encode_batch([row['text'] for row in rows])
    assert len(rows) == 324
    for row, ids in zip(rows, batch, strict=True):
      encoding = tokenizer.encode(row['text'])
      assert encoding.tokens == row.get('google_tokens', row['tokens']), row['i']
      assert encoding.ids == ids.tolist(), row['i']
      assert [tokenizer.token(i) for i in encoding.ids] == encoding.tokens
      if 'google_tokens' not in row:
        assert encoding.ids == row['ids'][1:-1], row['i']
        assert [list(span) for span in encoding.offsets] == row['offsets'], row['i']

  @pytest.mark.parametrize('case', ['uncased', 'cased'])
  @pytest.mark.parametrize(
    'variant', ['lower_keep_accents', 'nolower_strip_accents', 'no_cjk_split', 'no_clean_text']
  )
  def test_variants(self, golden, case, variant):
    """Made with `tokenizers`: left out are strings where it is known to differ from Google."""
    folder = golden / '04_tokenize'
    rows = json.loads((folder / f'bert_{case}.json').read_text(encoding='utf-8'))['rows']
    meta = json.loads((folder / 'meta.json').read_text(encoding='utf-8'))
    differ = {row['i'] for name in ('uncased', 'cased')
              for row in meta[f'{name}_disagreements'] if not row['rust==google']}
    variants = json.loads((folder / f'bert_{case}_variants.json').read_text(encoding='utf-8'))
    options = variants[variant]['options']
    rules = TextRules(
      lowercase=options['lower'],
      strip_accents=options.get('strip', options['lower']),
      split_cjk=options.get('cjk', True),
      clean_text=options.get('clean', True),
      max_chars_per_word=100,
    )
    tokenizer = WordPieceTokenizer((folder / f'vocab_{case}.txt').read_bytes(), rules)
    checked = 0
    for row in variants[variant]['rows']:
      if row['i'] in differ:
        continue
      text = rows[row['i']]['text']
      encoding = tokenizer.encode(text)
      assert encoding.tokens == row['tokens'], row['i']
      assert [list(span) for span in encoding.offsets] == row['offsets'], row['i']
      assert tokenizer.encode_batch([text])[0].tolist() == encoding.ids
      checked += 1
    assert checked > 80


def tokenize_cases(bugs, *names):
  tokenizer = load(bugs / 'vocab_tiny.txt', lowercase=True)
  rows = [json.loads(line) for line in
          (bugs / 'tokenize_cases.jsonl').read_text(encoding='utf-8').split('\n') if line]
  chosen = [row for row in rows if row['id'] in names]
  assert len(chosen) == len(names)
  for row in chosen:
    encoding = tokenizer.encode(row['text'])
    got = {'tokens': encoding.tokens, 'ids': encoding.ids,
           'offsets': [list(span) for span in encoding.offsets]}
    assert got == {key: row[key] for key in got}, row['id']
    assert tokenizer.encode_batch([row['text']])[0].tolist() == row['ids']
  return tokenizer


def test_b016_tab_and_line_feed_are_white_space(bugs):
  tokenize_cases(bugs, 'tab_lf_cr', 'nbsp', 'ideographic_space')


def test_b017_soft_hyphen(bugs):
  tokenizer = tokenize_cases(bugs, 'soft_hyphen', 'soft_hyphen_alone', 'c1_control')
  ids, counts = tokenizer.encode_lines(['\xad', '\xad\u200b', 'the'])
  assert counts.tolist() == [0, 0, 1]
  assert len(ids) == 1


def test_b019_punctuation_outside_ascii_splits(bugs):
  tokenize_cases(bugs, 'en_dash', 'hyphenation_point', 'inverted_question', 'euro_not_punct')


def test_b021_turkish(bugs):
  tokenize_cases(bugs, 'turkish_uncased', 'turkish_dotless')


def test_b021_words_seen_in_training_are_known_with_accents_kept():
  words = ['İstanbul', 'ılık', 'çiçek', 'ağaç', 'öğretmen', 'güneş', 'şişe', 'Iğdır']
  tokenizer = train(words * 3, 'wordpiece', 200, strip_accents=False)
  for word in words:
    assert '[UNK]' not in tokenizer.encode(word).tokens, word
  assert tokenizer.encode('İstanbul').offsets[-1][1] == 8


def test_b025_glued_symbols_make_the_word_unknown(bugs):
  tokenize_cases(bugs, 'heart_glued', 'emoji_glued')


def test_b026_special_text_is_text(bugs):
  tokenizer = tokenize_cases(bugs, 'literal_mask')
  text = 'the [MASK] of [SEP] it [CLS] [PAD] [UNK][MASK]'
  assert not set(tokenizer.encode(text).ids) & set(tokenizer.special_ids)
  assert not set(tokenizer.encode_batch([text])[0].tolist()) & set(tokenizer.special_ids)
  asked = tokenizer.encode('the [MASK] of it', special_text=True)
  assert asked.ids == [166, tokenizer.mask_id, 168, 174]
  assert asked.offsets == [(0, 3), (4, 10), (11, 13), (14, 16)]


def test_b028_long_words(bugs):
  tokenizer = tokenize_cases(bugs, 'len200', 'len201')
  shorter = load(bugs / 'vocab_tiny.txt', lowercase=True, max_chars_per_word=100)
  assert shorter.encode('a' * 200).tokens == ['[UNK]']
  assert shorter.hash() != tokenizer.hash()


def test_b028_a_megabyte_without_spaces_is_one_unknown():
  tokenizer = make()
  for blob in ('a' * 1_000_000, 'é' * 1_000_000):
    encoding = tokenizer.encode(blob)
    assert encoding.tokens == ['[UNK]']
    assert encoding.offsets == [(0, 1_000_000)]
    assert tokenizer.encode_batch([blob])[0].tolist() == [tokenizer.unk_id]
  assert len(tokenizer.encode_batch(['a.' * 500_000])[0]) == 1_000_000


def test_b030_offsets_count_code_points(bugs):
  tokenize_cases(bugs, 'multibyte_before', 'emoji_glued', 'ja_mixed')


def test_b033_no_base_letter_is_lost(bugs):
  tokenize_cases(bugs, 'macron', 'accent_nfc', 'accent_nfd')
  rules = TextRules()
  checked = 0
  for code in range(sys.maxunicode + 1):
    letter = chr(code)
    if not unicodedata.category(letter).startswith('L'):
      continue
    parts = unicodedata.normalize('NFD', letter.lower())
    if len(parts) == 1:
      continue
    base = [c for c in parts if unicodedata.category(c) != 'Mn']
    assert ''.join(''.join(rules.piece_words(piece)) for piece in rules.pieces(letter)) == (
      ''.join(base)
    )
    assert base
    checked += 1
  assert checked > 10_000  # most of them Hangul


class TestVocabulary:
  def test_b008_crlf(self, bugs):
    tokenizer = load(bugs / 'vocab_crlf.txt')
    assert tokenizer.encode('rivers mill').tokens == ['river', '##s', 'mill']
    assert tokenizer.vocab_size == 8

  def test_b009_only_line_feed_ends_an_entry(self, bugs, tmp_path):
    tokenizer = load(bugs / 'vocab_u2028.txt')
    ids = {token: tokenizer.token_id(token) for token in ('river', 'mill', 'bell', '##s')}
    assert ids == {'river': 5, 'mill': 7, 'bell': 9, '##s': 10}
    assert (tokenizer.token(6), tokenizer.token(8), tokenizer.vocab_size) == ('\u2028', '\x85', 11)
    tokenizer.save(tmp_path)
    assert (tmp_path / 'vocab.txt').read_bytes() == (bugs / 'vocab_u2028.txt').read_bytes()

  def test_crlf_byte_order_mark_and_no_last_newline(self):
    plain = make()
    odd = make(b'\xef\xbb\xbf' + VOCABULARY.replace(b'\n', b'\r\n')[:-2])
    assert odd.vocab_size == plain.vocab_size
    assert odd.encode('the river').ids == plain.encode('the river').ids
    assert odd.hash() != plain.hash()

  def test_duplicates_are_refused(self):
    with pytest.raises(TokenizerError, match=r"vocab\.txt: 'the' stands in line \d+ and again"):
      make(VOCABULARY + b'the\n')

  @pytest.mark.parametrize('token', SPECIALS)
  def test_missing_special_token_is_refused(self, token):
    without = VOCABULARY.replace(f'{token}\n'.encode(), b'')
    with pytest.raises(TokenizerError, match=rf'\[{token[1:-1]}\] missing'):
      make(without)

  def test_not_utf8_is_refused(self):
    with pytest.raises(TokenizerError, match=f'not UTF-8 at byte {len(VOCABULARY)}'):
      make(VOCABULARY + b'\xe9\n')

  def test_id_sets(self):
    tokenizer = make()
    assert tokenizer.special_ids == (0, 2, 3, 4)
    assert tokenizer.unk_id == 1
    assert tokenizer.ordinary_ids.tolist() == list(range(6, tokenizer.vocab_size))
    assert [tokenizer.token(i) for i in np.flatnonzero(tokenizer.continuation)] == [
      entry for entry in ENTRIES if entry.startswith('##')
    ]


class TestProperties:
  @settings(deadline=None, max_examples=150)
  @given(st.lists(texts, max_size=5), st.booleans(), st.booleans(), st.booleans())
  @example(['ΟΔΟΣ ΟΔΟΣ. 中ΑΣ ΑΣ中', 'İstanbul', 'a\x00b', '\x00a \x00', 'é\x00'], True, True, True)
  @example(['the riv', 'er\nmill', '', '\ud800the'], True, True, True)
  def test_both_ways_give_googles_tokens(self, lines, lowercase, strip_accents, split_cjk):
    tokenizer = make(lowercase=lowercase, strip_accents=strip_accents, split_cjk=split_cjk)
    # Twice: the second time everything comes from the table.
    for _ in range(2):
      batch = tokenizer.encode_batch(lines)
      for line, ids in zip(lines, batch, strict=True):
        want = reference_tokens(line, tokenizer)
        assert tokenizer.encode(line).tokens == want
        assert [tokenizer.token(i) for i in ids] == want

  @settings(deadline=None, max_examples=150)
  @given(texts, st.booleans(), st.booleans())
  @example('co\xadoperate \u0301e\u0301 가각 İI \ufb01x', True, True)
  def test_offsets_hold_the_token(self, text, lowercase, strip_accents):
    tokenizer = make(lowercase=lowercase, strip_accents=strip_accents)
    encoding = tokenizer.encode(text)
    end = 0
    for token, (first, last), start in zip(
      encoding.tokens, encoding.offsets, encoding.word_starts, strict=True
    ):
      assert 0 <= first < last <= len(text)
      assert start == (not token.startswith('##'))
      # Two pieces may share a character that became several; a word begins after the last one.
      assert first >= (end if start and not shares(text, first) else end - 1)
      end = last
      if token != '[UNK]':
        normal = normalised(text[first:last], tokenizer.rules)
        piece = token.removeprefix('##')
        # A final sigma shows itself only with the word before it.
        assert piece.replace('ς', 'σ') in normal.replace('ς', 'σ')
        if not any(shares(text, place) for place in (first, last - 1)):
          assert piece.replace('ς', 'σ') == normal.replace('ς', 'σ')

  @settings(deadline=None, max_examples=100)
  @given(texts)
  def test_without_cleaning_both_ways_agree(self, text):
    tokenizer = make(clean_text=False)
    assert tokenizer.encode_batch([text])[0].tolist() == tokenizer.encode(text).ids

  def test_no_rule_makes_white_space(self):
    """Then nothing is lost by cutting at white space first."""
    for code in range(sys.maxunicode + 1):
      c = chr(code)
      if not c.isspace() and unicodedata.category(c) != 'Cs':
        assert not any(d.isspace() for d in unicodedata.normalize('NFD', c.lower())), hex(code)

  def test_character_classes_are_pythons(self):
    draw = random.Random(0)
    for code in [*range(0x3500), *(draw.randrange(sys.maxunicode + 1) for _ in range(20_000))]:
      c = chr(code)
      dropped = (unicodedata.category(c) in ('Cc', 'Cf') and c not in '\t\n\r') or c == '\ufffd'
      assert (text_rules._keep(c) is None) == dropped
      assert isinstance(text_rules._isolate_punctuation(c), str) == is_punctuation(c)
      assert isinstance(text_rules._isolate_cjk(c), str) == is_ideograph(code)


def normalised(text: str, rules: TextRules) -> str:
  return ''.join(
    word for chunk in rules.chunks(text) for piece in rules.pieces(chunk)
    for word in rules.piece_words(piece)
  )  # fmt: skip


def shares(text: str, place: int) -> bool:
  """Whether this character becomes several, so that a piece may end inside it."""
  return len(unicodedata.normalize('NFD', text[place].lower())) > 1


class TestFastPath:
  def test_many_words_through_a_small_table(self, monkeypatch):
    """The table fills, is emptied and collides, and the ids stay right."""
    monkeypatch.setattr(word_table, '_SLOTS', 64)
    monkeypatch.setattr(word_table, '_SHIFT', np.uint64(64 - 6))
    monkeypatch.setattr(word_table, '_BLOCK_CHARS', 200)
    monkeypatch.setattr(wordpiece, '_MEMO_SIZE', 8)
    tokenizer = make()
    draw = random.Random(0)
    words = [''.join(draw.choices('abcdeé–,', k=draw.randint(1, 24))) for _ in range(500)]
    lines = [' '.join(draw.choices(words, k=draw.randint(0, 12))) for _ in range(300)]
    for _ in range(2):
      ids, counts = tokenizer.encode_lines(lines)
      assert ids.dtype == counts.dtype == np.int32
      want = [tokenizer.encode(line).ids for line in lines]
      assert counts.tolist() == list(map(len, want))
      assert ids.tolist() == [i for row in want for i in row]
    assert len(tokenizer._chunks) <= 8
    assert len(tokenizer._chunks._old) <= 8

  def test_words_alike_in_their_first_sixteen_bytes(self):
    tokenizer = make()
    words = ['a' * 16, 'a' * 17, 'a' * 15, 'a' * 8, 'a' * 9, 'a' * 17 + 'b', 'b' * 16]
    for _ in range(2):
      batch = tokenizer.encode_batch(words)
      assert [row.tolist() for row in batch] == [tokenizer.encode(word).ids for word in words]

  def test_empty_input(self):
    tokenizer = make()
    assert tokenizer.encode_batch([]) == []
    ids, counts = tokenizer.encode_lines(['', ' ', ''])
    assert (ids.tolist(), counts.tolist()) == ([], [0, 0, 0])

  def test_line_breaks_inside_a_text_do_not_move_the_counts(self):
    ids, counts = make().encode_lines(['the\nriver', 'mill'])
    assert counts.tolist() == [2, 1]
    assert len(ids) == 3


class TestTraining:
  TEXT = ['The river mill, the mills; rivers!', 'Milling at the river: a mill.'] * 5

  def test_vocabulary_and_round_trip(self, tmp_path):
    tokenizer = train(self.TEXT, 'wordpiece', 120)
    assert [tokenizer.token(i) for i in range(5)] == SPECIALS
    assert 'river' in tokenizer.encode('river').tokens
    for line in self.TEXT:
      assert '[UNK]' not in tokenizer.encode(line).tokens
      assert tokenizer.decode(tokenizer.encode(line).ids).replace(' ', '') == (
        line.lower().replace(' ', '')
      )
    tokenizer.save(tmp_path)
    assert load(tmp_path).hash() == tokenizer.hash()

  def test_order_of_the_lines_does_not_matter(self):
    backwards = train(self.TEXT[::-1], 'wordpiece', 90)
    assert backwards.hash() == train(self.TEXT, 'wordpiece', 90).hash()

  def test_at_most_the_size_asked_for(self):
    assert train(self.TEXT, 'wordpiece', 40).vocab_size == 40

  def test_rare_letters_make_room(self):
    text = ['the river'] * 50 + [chr(0x4E00 + i) for i in range(200)]
    tokenizer = train(text, 'wordpiece', 60)
    assert tokenizer.vocab_size <= 60
    assert tokenizer.encode('the river').tokens == ['the', 'river']

  def test_large_counts_are_scaled(self, monkeypatch):
    text = ['the river'] * 1000 + ['mill mill', 'stone']
    whole = train(text, 'wordpiece', 40)
    monkeypatch.setattr(wordpiece, '_TRAINING_WORDS', 100)
    assert train(text, 'wordpiece', 40).hash() == whole.hash()

  def test_nothing_to_train_on(self):
    with pytest.raises(TokenizerError, match='no text to train on'):
      train(['', ' \t', '\xad'], 'wordpiece', 100)
    with pytest.raises(TokenizerError, match='vocab_size 8 is too small'):
      train(['abcdefghijkl mnopqrst'], 'wordpiece', 8)
    with pytest.raises(TokenizerError, match='no room'):
      train(['a'], 'wordpiece', 5)
