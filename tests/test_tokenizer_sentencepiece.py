"""SentencePiece: Google ALBERT's ids, offsets, training."""

import io
import json
import unicodedata

import numpy as np
import pytest
import sentencepiece
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bertjax.data.sentencepiece_model import (
  SPECIAL_TOKENS,
  SentencePieceTokenizer,
  cut_line,
  load_model,
  model_pieces,
)
from bertjax.data.text_rules import AlbertRules
from bertjax.data.tokenizer import TokenizerError, load, train

TEXT = [
  'The river ran by the mill in 1997, and the mills ran too.',
  'Rivers, mills and stones: a miller waited 12, 13, 14 days.',
  'Déjà vu at the café, said the miller; the river said nothing.',
] * 12


@pytest.fixture(scope='module')
def small():
  return train(TEXT, 'sentencepiece', 120)


@pytest.fixture(scope='module')
def albert(golden):
  return load(golden / '04_tokenize' / 'albert_spiece.model')


def rows(golden, name):
  return json.loads((golden / '04_tokenize' / name).read_text(encoding='utf-8'))['rows']


def test_albert_pieces_and_ids(golden, albert):
  cases = rows(golden, 'sentencepiece_albert.json')
  assert len(cases) == 324
  batch = albert.encode_batch([case['text'] for case in cases])
  for case, ids in zip(cases, batch, strict=True):
    encoding = albert.encode(case['text'])
    assert albert.rules.normalise(case['text']) == case['google_preprocessed'], case['i']
    assert encoding.tokens == case['google_albert_pieces'], case['i']
    assert encoding.ids == case['google_albert_ids'] == ids.tolist(), case['i']


@pytest.mark.parametrize(
  ('cases', 'model'),
  [
    ('sentencepiece_albert.json', 'albert_spiece.model'),
    ('sentencepiece_t5.json', 't5_cc_all.32000.100extra.model'),
  ],
)
def test_the_model_alone(golden, cases, model):
  processor = load_model((golden / '04_tokenize' / model).read_bytes(), model)
  for case in rows(golden, cases):
    pieces = model_pieces(processor, case['text'])
    assert [piece.id for piece in pieces] == case['ids'], case['i']
    assert [piece.text for piece in pieces] == case['pieces'], case['i']


@pytest.mark.parametrize('name', ['t5_cc_all.32000.100extra.model', 'botchan_1000.model'])
def test_a_model_without_berts_pieces_is_refused(shared, name):
  folder = shared / ('golden/04_tokenize' if name.startswith('t5') else 'data/sentencepiece')
  with pytest.raises(TokenizerError, match=r'no piece .*\[CLS\], \[SEP\], \[MASK\]'):
    load(folder / name)


def test_special_pieces_found_in_text_are_refused():
  model = io.BytesIO()
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(TEXT), model_writer=model, vocab_size=60, hard_vocab_limit=False,
    pad_id=0, unk_id=1, bos_id=-1, eos_id=-1, user_defined_symbols=['[CLS]', '[SEP]', '[MASK]'],
    minloglevel=2,
  )  # fmt: skip
  with pytest.raises(TokenizerError, match='control symbols'):
    SentencePieceTokenizer(model.getvalue(), AlbertRules())


def test_not_a_model():
  with pytest.raises(TokenizerError, match=r'x\.model: not a SentencePiece model'):
    load_model(b'nonsense', 'x.model')


def test_ids_and_offsets(small):
  assert [small.token(i) for i in range(5)] == list(SPECIAL_TOKENS)
  assert small.special_ids == (0, 2, 3, 4)
  assert small.ordinary_ids.tolist() == list(range(5, small.vocab_size))
  assert not small.continuation[list(small.special_ids)].any()
  text = '  The  miller\twaited at the CAFÉ in 1997, too'
  encoding = small.encode(text)
  words = ''
  for token, (start, end), begins in zip(
    encoding.tokens, encoding.offsets, encoding.word_starts, strict=True
  ):
    assert small.rules.normalise(text[start:end]) == token.removeprefix('▁')
    assert begins == token.startswith('▁')
    words += token
  assert words.replace('▁', ' ').strip() == 'the miller waited at the cafe in 1997, too'
  assert small.decode(encoding.ids) == 'the miller waited at the cafe in 1997, too'


def test_a_comma_after_a_digit_stands_alone(albert):
  encoding = albert.encode('in 1997, 2,000,000 x3, ok,')
  assert not [token for token in encoding.tokens if token[-1] == ',' and token[-2:-1].isdigit()]
  assert encoding.offsets[1:3] == [(3, 7), (7, 8)]


def test_b026_special_text_is_text(small):
  text = 'the [MASK] of [SEP] it <pad> [CLS]'
  assert not set(small.encode(text).ids) & set(small.special_ids)
  assert not set(small.encode_batch([text])[0].tolist()) & set(small.special_ids)
  asked = small.encode('the [MASK] ran', special_text=True)
  place = asked.ids.index(small.mask_id)
  assert asked.offsets[place] == (4, 10)
  assert asked.tokens[place] == '[MASK]'


texts = st.text(
  st.one_of(
    st.sampled_from('the river mill 19,97 ÉéıİΣς가ﬁ½…'),
    st.sampled_from('\t\n \x00\x1c\x85\xa0\xad\u0301\u0315\u302e\u2028\u3000\ufffd\ud800▁'),
    st.characters(),
  ),
  max_size=50,
)


@settings(deadline=None, max_examples=100)
@given(st.lists(texts, max_size=4))
@example(['1997, 12,', '٣, ٣,,', '\ud800'])
def test_both_ways_agree(small, lines):
  ids, counts = small.encode_lines(lines)
  assert ids.dtype == counts.dtype == np.int32
  want = [small.encode(line).ids for line in lines]
  assert counts.tolist() == list(map(len, want))
  assert ids.tolist() == [i for row in want for i in row]


@settings(deadline=None, max_examples=100)
@given(texts, st.booleans(), st.booleans())
def test_alignment(text, lowercase, strip_accents):
  rules = AlbertRules(lowercase, strip_accents)
  normal, origins = rules.align(text)
  assert normal == rules.normalise(text)
  assert len(normal) == len(origins)
  for character, place in zip(normal, origins, strict=True):
    source = unicodedata.normalize('NFKD', text[place])
    if character == ' ':
      assert any(part.isspace() for part in source)
    elif character != '\ufffd' and character not in 'ςσ':
      assert character in source + source.lower() + text[place] + text[place].lower()


@settings(deadline=None, max_examples=100)
@given(texts)
def test_offsets_stay_inside(small, text):
  encoding = small.encode(text)
  for start, end in encoding.offsets:
    assert 0 <= start <= end <= len(text)
  starts = [start for start, _ in encoding.offsets]
  assert starts == sorted(starts) or unicodedata.normalize('NFKD', text) != text


class TestTraining:
  def test_same_text_same_model(self, small, tmp_path):
    assert train(TEXT, 'sentencepiece', 120).hash() == small.hash()
    small.save(tmp_path)
    assert load(tmp_path).hash() == small.hash()
    assert load(tmp_path / 'spiece.model').hash() == small.hash()

  def test_accents_and_case_are_kept_on_request(self, tmp_path):
    tokenizer = train(TEXT, 'sentencepiece', 120, lowercase=False, strip_accents=False)
    tokenizer.save(tmp_path)
    text = 'Déjà vu at the café'
    assert ''.join(load(tmp_path).encode(text).tokens) == '▁' + text.replace(' ', '▁')

  @pytest.mark.parametrize('only_long', [False, True])
  def test_b011_long_lines_are_cut_not_lost(self, bugs, only_long, caplog):
    lines = (bugs / 'spm_longlines.txt').read_text(encoding='utf-8').split('\n')[:-1]
    long = [line for line in lines if len(line.encode()) > 4192]
    assert len(long) == 5
    with caplog.at_level('INFO', logger='absl'):
      tokenizer = train(long if only_long else lines, 'sentencepiece', 300)
    assert f'{5 if only_long else 30} lines, 5 of them longer' in caplog.text
    assert '0 left out' in caplog.text
    for line in long:
      assert tokenizer.unk_id not in tokenizer.encode(line).ids

  @pytest.mark.parametrize('limit', [8, 16, 50])
  def test_cut_lines_hold_everything(self, limit):
    line = 'the river ' + 'a' * 70 + ' mill ' + 'é' * 41 + ' 中文 x'
    parts = list(cut_line(line, limit))
    assert max(len(part.encode()) for part in parts) <= limit
    assert ''.join(parts).replace(' ', '') == line.replace(' ', '')

  @pytest.mark.parametrize('word', ['\U0001f600' * 1048, 'a' * 3000, 'a' * 4192])
  def test_a_long_word_is_cut_only_where_it_must_be(self, word):
    assert list(cut_line(f'{word} {"b " * 600}mill', 4192))[0].startswith(word)
    assert word in list(cut_line(f'{"b " * 2000}{word}', 4192))

  @pytest.mark.parametrize('letter', ['a', 'é', '中', '\U0001f600'])
  def test_a_word_longer_than_a_line_is_cut_between_letters(self, letter):
    parts = list(cut_line(f'the {letter * 9000} x', 4192))
    assert all(parts) and max(len(part.encode()) for part in parts) <= 4192
    assert parts[0] == 'the' and ''.join(parts[1:]).replace(' ', '') == letter * 9000 + 'x'
    assert not any(' ' in part for part in parts[1:-1])

  def test_plain_words_when_it_cannot_be_done(self):
    with pytest.raises(TokenizerError, match='no text to train on'):
      train(['', ' \t'], 'sentencepiece', 100)
    with pytest.raises(TokenizerError, match='found no 8 pieces in 36 lines'):
      train(TEXT, 'sentencepiece', 8)

  def test_an_error_of_the_reader_is_not_hidden(self):
    def lines():
      yield 'the river'
      raise OSError('disk gone')

    with pytest.raises(OSError, match='disk gone'):
      train(lines(), 'sentencepiece', 100)
