"""Windows over contexts: coverage, maximal context, labels, offsets; Google's features."""

import itertools
import json
import unicodedata

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from small_squad import BRIDGE, CAFE, EMOJI, JAPANESE, TEXTS, YEARS, question, small_tokenizer

from bertjax.data import squad, squad_windows, tokenizer

KINDS = ('wordpiece', 'sentencepiece')


def make(questions, kind='wordpiece', training=True, **sizes):
  sizes = {'max_length': 96, 'doc_stride': 16, 'max_query_length': 8, **sizes}
  return squad_windows.windows(questions, small_tokenizer(kind), training=training, **sizes)


def answer_text(windows, questions, row):
  """The slice of the context that a window's label covers; None for [CLS]."""
  start = windows.examples.values['start_positions'][row]
  end = windows.examples.values['end_positions'][row]
  if start == 0:
    assert end == 0
    return None
  offsets = windows.offsets(row)
  return questions[windows.question[row]].context[offsets[start, 0]:offsets[end, 1]]


def test_a_window_is_cls_question_sep_text_sep():
  tok = small_tokenizer()
  asked = question('q', BRIDGE, '1911', question='the bridge')
  windows = make([asked], max_length=384)
  row = {name: rows[0] for name, rows in windows.examples.tokens.items()}
  first, second = tok.encode('the bridge').ids, tok.encode(BRIDGE).ids
  ids = [tok.cls_id, *first, tok.sep_id, *second, tok.sep_id]
  assert row['input_ids'].tolist() == ids
  assert row['token_type_ids'].tolist() == [0] * (len(first) + 2) + [1] * (len(second) + 1)
  assert row['attention_mask'].tolist() == [1] * len(ids)
  assert all(values.dtype == np.int32 for values in row.values())
  assert windows.examples.pad_id == tok.pad_id
  assert windows.offsets(0)[len(first) + 2:-1].tolist() == [*map(list, tok.encode(BRIDGE).offsets)]
  assert (windows.offsets(0)[:len(first) + 2] == -1).all()
  assert (windows.offsets(0)[-1] == -1).all()
  assert windows.max_context(0).sum() == len(second)
  assert answer_text(windows, [asked], 0) == '1911'
  assert len(windows) == len(windows.examples) == 1
  assert windows.unique_ids.tolist() == [1000000000]


def test_without_training_there_are_no_labels():
  assert not make([question('q', BRIDGE, '1911')], training=False).examples.values


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize(
    ('length', 'stride'), [*itertools.product((64, 128, 384), (16, 64, 128, 256))]
)
def test_b088_windows_cover_every_token(kind, length, stride):
  context = ' '.join([BRIDGE, YEARS] * 4)
  asked = [question('q', context), question('r', BRIDGE), question('s', context, question='')]
  windows = make(asked, kind, max_length=length, doc_stride=stride)
  lengths = windows.examples.lengths
  assert lengths.max() <= length
  for number, text in enumerate((context, BRIDGE, context)):
    rows = np.flatnonzero(windows.question == number)
    total = len(small_tokenizer(kind).encode(text).ids)
    covered = np.zeros(total, int)
    best = np.zeros(total, int)
    for row in rows:
      first, count, shift = windows.first[row], windows.count[row], windows.text_start[row]
      covered[first:first + count] += 1
      flags = windows.max_context(row)
      best[first:first + count] += flags[shift:shift + count]
      assert not flags[:shift].any() and not flags[shift + count:].any()
    assert covered.min() == 1 or len(rows) > 1
    assert covered.min() >= 1
    assert (best == 1).all()


@hypothesis.given(st.integers(0, 300), st.integers(1, 60), st.integers(1, 80))
@hypothesis.settings(deadline=None, max_examples=200)
def test_layout_is_googles(num_tokens, room, stride):
  """Against the definition, token by token."""
  spans, start = [], 0
  while start < num_tokens:
    count = min(room, num_tokens - start)
    spans.append((start, count))
    if start + count == num_tokens:
      break
    start += min(count, stride)
  layout = squad_windows.make_layout(num_tokens, room, stride)
  assert list(zip(layout.starts.tolist(), layout.counts.tolist(), strict=True)) == spans
  for token in range(num_tokens):
    context = [
        min(token - start, start + count - 1 - token) + 0.01 * count
        if start <= token < start + count else -1
        for start, count in spans
    ]
    here = (layout.best_first <= token) & (token < layout.best_last)
    assert here.sum() == 1 and context.index(max(context)) == here.argmax()


def test_layout_of_a_long_context_ends():
  layout = squad_windows.make_layout(50_000, 100, 1)
  assert len(layout.starts) == 49_901


@pytest.mark.parametrize(('length', 'query'), [(64, 64), (67, 64), (16, 64), (4, 1)])
def test_b087_no_room_for_text_is_refused_at_start(length, query):
  with pytest.raises(squad.SquadError, match=rf'max_length {length} leaves no room .*{query}'):
    make([], max_length=length, max_query_length=query)


@pytest.mark.parametrize('sizes', [{'doc_stride': 0}, {'max_query_length': 0}, {'doc_stride': -3}])
def test_sizes_below_one_are_refused(sizes):
  with pytest.raises(squad.SquadError, match='at least 1'):
    make([], **sizes)


def test_b087_long_question_is_cut_and_the_run_ends():
  asked = [question('q', YEARS, '1895', question='who opened the old bridge ' * 40)]
  windows = make(asked, max_length=28, max_query_length=24)
  assert (windows.text_start == 26).all()
  assert (windows.count == 1).all()
  assert len(windows) == len(small_tokenizer().encode(YEARS).ids)


def test_b087_b088_b091_tricky_file(bugs):
  questions = [
      question for question in squad.read(bugs / 'squad_v11_tricky.json', 1, training=True)
      if question.id in ('t21', 't22', 't23')
  ]
  windows = make(questions, max_length=64, doc_stride=128, max_query_length=24)
  for number, asked in enumerate(questions):
    rows = np.flatnonzero(windows.question == number)
    found = [answer_text(windows, questions, row) for row in rows]
    assert set(found) == {None, asked.answers[0][0]}
    assert found.count(None) > len(found) / 2
  with pytest.raises(squad.SquadError, match='leaves no room'):
    make(questions, max_length=64, max_query_length=64)


def test_b091_windows_without_the_answer_point_at_cls_and_are_counted(caplog):
  caplog.set_level('INFO', logger='absl')
  asked = [question('q', (BRIDGE + ' ') * 6 + 'Omega', 'Omega'), question('no', BRIDGE)]
  windows = make(asked, max_length=64)
  found = [answer_text(windows, asked, row) for row in range(len(windows))]
  rows = np.flatnonzero(windows.question == 0)
  assert found[rows[-1]] == 'Omega'
  without = sum(found[row] is None for row in rows)
  assert 0 < without < len(rows)
  assert f'{without} windows lack the answer' in caplog.text
  assert all(found[row] is None for row in np.flatnonzero(windows.question == 1))
  first = windows.examples.tokens['input_ids'][0][0]
  assert first == small_tokenizer().cls_id


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize(('context', 'answer'), [
    (BRIDGE, '4\u202f200 crowns'), (BRIDGE, 'three winters\nof work'), (BRIDGE, 'The Varn bridge'),
    (BRIDGE.replace(' ', '\u00a0'), 'Varn\u00a0bridge'),
    (BRIDGE.replace(' ', '\u3000'), 'Varn\u3000bridge'),
    (YEARS, '1895'), (YEARS, '1943'), (YEARS, 'clock-tower'), (YEARS, '(1895–1943)'),
    (JAPANESE, '三十年間'), (EMOJI, 'a 🌉'), (EMOJI, 'blue cloth'),
    (CAFE, 'Cafe\u0301 Kopru\u0308'), (CAFE, 'Zoe\u0308'), (CAFE, 'I\u0307rem Ak'), (CAFE, '1987'),
])
def test_b092_b101_labels_are_the_exact_answer(kind, context, answer):
  # Surrounded by white space, which must not move anything.
  asked = [question('q', f' \t{context}\n', answer)]
  windows = make(asked, kind, max_length=384)
  assert answer_text(windows, asked, 0) == answer


def test_b092_b101_tricky_file(bugs, shared):
  questions = squad.read(bugs / 'squad_v11_tricky.json', 1, training=True)
  vocabulary = shared / 'data' / 'vocab' / 'bert-base-uncased-vocab.txt'
  tok = tokenizer.load(vocabulary, lowercase=True)
  windows = squad_windows.windows(questions, tok, training=True)
  found = {}
  for row, number in enumerate(windows.question):
    found.setdefault(number, set()).add(answer_text(windows, questions, row))
  for number, asked in enumerate(questions):
    assert found[number] - {None} == {asked.answers[0][0]}, asked.id


def test_the_answer_inside_a_piece_takes_the_whole_piece():
  tok = small_tokenizer()
  offsets = tok.encode(YEARS).offsets
  first, last = max(offsets, key=lambda span: span[1] - span[0])
  assert last - first > 2
  asked = [squad.Question('q', 'Who?', YEARS, ((YEARS[first + 1:last - 1], first + 1),))]
  assert answer_text(make(asked), asked, 0) == YEARS[first:last]


def test_parts_of_one_character_keep_the_span_tight():
  """A decomposed syllable may be shared by two pieces."""
  context = squad_windows.Context(
      np.arange(4, dtype=np.int32), np.array([[0, 3], [2, 3], [2, 3], [2, 5]], np.int32)
  )
  asked = question('q', 'abcde', 'c')
  assert squad_windows._answer_tokens(asked, context) == (1, 2)
  assert squad_windows._answer_tokens(question('q', 'abcde', 'abc'), context) == (0, 2)
  assert squad_windows._answer_tokens(question('q', 'abcde', 'de'), context) == (3, 3)


@pytest.mark.parametrize('kind', KINDS)
def test_offsets_take_in_the_marks_of_the_last_letter(kind):
  context = squad_windows.tokenise('Cafe\u0301\u0327 e\u0301x', small_tokenizer(kind))
  ends = context.offsets[:, 1].tolist()
  assert 6 in ends and not {4, 5, 8} & set(ends)
  assert (context.offsets[:, 0] <= context.offsets[:, 1]).all()


@hypothesis.given(st.text('abé\u0301\u0323é 한글각ㄱ漢\u202f\u200d🌉.,', max_size=40))
@hypothesis.settings(deadline=None, max_examples=100)
def test_offsets_neither_lose_nor_overlap_more_than_a_character(text):
  context = squad_windows.tokenise(text, small_tokenizer())
  kept = {
      index for index, letter in enumerate(text)
      if not letter.isspace() and unicodedata.category(letter) not in ('Cf', 'Mn')
  }
  covered = {index for first, last in context.offsets for index in range(first, last)}
  assert kept <= covered
  plain = small_tokenizer().encode(text).offsets
  for (first, last), (start, end) in zip(context.offsets.tolist(), plain, strict=True):
    assert first == start
    assert all(unicodedata.category(letter)[0] == 'M' for letter in text[end:last])


def test_b089_empty_contexts_and_questions():
  asked = [
      question('e1', ''), question('e2', ' \n\t '), question('e3', '\u200b\u200b'),
      question('e5', BRIDGE, '1911', question=''),
      question('e6', BRIDGE, '1911', question='\u200b\u200b'),
  ]
  windows = make(asked, max_length=384)
  assert windows.question.tolist() == [3, 4]
  assert windows.text_start.tolist() == [2, 2]
  assert [answer_text(windows, asked, row) for row in (0, 1)] == ['1911', '1911']
  empty = make(asked[:3])
  assert len(empty) == 0
  assert empty.examples.values['start_positions'].shape == (0,)
  assert len(make([])) == 0


def test_an_answer_without_a_token_is_not_trained_on(caplog):
  caplog.set_level('INFO', logger='absl')
  context = 'The bridge  \u200b opened'
  asked = [question('q', context, '\u200b'), question('r', context, 'opened')]
  windows = make(asked)
  assert windows.question.tolist() == [1]
  assert '1 questions left out' in caplog.text
  assert make(asked, training=False).question.tolist() == [0, 1]


def test_b094_a_wrong_offset_never_becomes_a_label():
  wrong = squad.Question('q', 'Who?', BRIDGE, (('1911', 3),))
  with pytest.raises(squad.SquadError, match="'q'.*does not stand at 3.*training=True"):
    make([wrong])
  assert len(make([wrong], training=False))


def test_contexts_are_tokenised_once(monkeypatch):
  tok, seen = small_tokenizer(), []
  encode = type(tok).encode
  monkeypatch.setattr(
      type(tok), 'encode', lambda self, text: seen.append(text) or encode(self, text)
  )
  make([question(f'{name}{text}', text) for name in range(5) for text in TEXTS])
  assert sorted(seen) == sorted(TEXTS)


def test_segments_and_masks_share_their_memory():
  windows = make([question(str(number), BRIDGE) for number in range(10)])
  for name in ('token_type_ids', 'attention_mask'):
    first, *others = windows.examples.tokens[name]
    assert not first.flags.writeable
    assert all(np.shares_memory(first, other) for other in others)


@pytest.mark.parametrize('version', [1, 2])
def test_golden_features(golden, shared, version):
  key = ('v1.1', 'v2.0')[version - 1]
  reference = json.loads((golden / '05_metrics' / 'google_run_squad.json').read_text('utf-8'))
  questions = squad.read(golden / '05_metrics' / f'squad_{key}.json', version, training=True)
  vocabulary = shared / 'data' / 'vocab' / 'bert-base-uncased-vocab.txt'
  tok = tokenizer.load(vocabulary, lowercase=True)
  windows = squad_windows.windows(questions, tok, 96, 32, 10, training=True)
  features = reference[key]['train_features']
  assert len(windows) == len(features)
  values = windows.examples.values
  for row, feature in enumerate(features):
    ids = windows.examples.tokens['input_ids'][row]
    assert [tok.token(index) for index in ids] == feature['tokens']
    types = windows.examples.tokens['token_type_ids'][row]
    assert types.sum() == len(types) - feature['segment_b_start']
    assert windows.text_start[row] == feature['segment_b_start']
    assert questions[windows.question[row]].id == feature['qas_id']
    assert windows.unique_ids[row] == feature['unique_id']
    assert row - (windows.question == windows.question[row]).argmax() == feature['doc_span_index']
    assert windows.max_context(row).tolist() == [*map(bool, feature['token_is_max_context'])]
    assert values['start_positions'][row] == feature['start_position']
    assert values['end_positions'][row] == feature['end_position']
    check_words(questions[windows.question[row]].context, windows.offsets(row),
                feature['token_to_orig_map'])


def check_words(context, offsets, words):
  """Google maps tokens to white-space words; ours to characters, which lie in those words."""
  starts = [index for index, letter in enumerate(context)
            if not letter.isspace() and (index == 0 or context[index - 1].isspace())]
  for (first, last), word in zip(offsets.tolist(), words, strict=True):
    if word == -1:
      assert (first, last) == (-1, -1)
      continue
    assert starts[word] <= first < last
    assert word + 1 == len(starts) or last <= starts[word + 1]
