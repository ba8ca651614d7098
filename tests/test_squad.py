"""Reading SQuAD files: checks, repairs and what the errors say."""

import json

import pytest
from small_squad import BRIDGE, entry, write

from bertjax.data import squad


def test_context_and_offsets_stay_as_the_file_has_them(tmp_path):
  context = ' \n' + BRIDGE + '\u00a0 '
  file = write(tmp_path / 'a.json', entry('q', ('1911', context.index('1911'))), context=context)
  (question,) = squad.read(file, 1, training=True)
  assert question.context == context
  assert question.answers == (('1911', 29),)
  assert question.question == 'Who?'


def test_questions_of_a_paragraph_share_its_text(tmp_path):
  file = write(tmp_path / 'a.json', entry('q', ('1911', 27)), entry('r', ('1911', 27)))
  first, second = squad.read(file, 1)
  assert first.context is second.context


def test_all_answers_are_kept_for_scoring_and_one_for_training(tmp_path):
  file = write(tmp_path / 'a.json', entry('q', ('1922', 0), ('1911', 27), ('in  1911', 24)))
  assert len(squad.read(file, 1)[0].answers) == 3
  assert squad.read(file, 1, training=True)[0].answers == (('1911', 27),)


def test_b094_wrong_offsets_are_repaired_or_left_out(tmp_path):
  file = write(
      tmp_path / 'a.json',
      entry('right', ('1911', 27)),
      entry('zero', ('1911', 0)),
      entry('off_by_one', ('Ilse', 74)),
      entry('absent', ('1922', 27)),
      entry('twice', ('er', 0)),
      entry('empty', ('', 3)),
      entry('overlapping', ('aa', 1)),
      entry('none'),
      context=BRIDGE + ' aaa',
  )
  questions, report = squad.read_with_report(file, 1, training=True)
  assert report.repaired == {'zero': 27, 'off_by_one': BRIDGE.index('Ilse')}
  assert set(report.left_out) == {'absent', 'twice', 'empty', 'overlapping', 'none'}
  assert [question.id for question in questions] == ['right', 'zero', 'off_by_one']
  for question in questions:
    ((text, start),) = question.answers
    assert question.context[start:start + len(text)] == text
  with pytest.raises(squad.SquadError, match=r'(?s)a\.json: 2 .*off_by_one.* 5 .*absent'):
    squad.read(file, 1, training=True, strict=True)
  assert len(squad.read(file, 1)) == 8


def test_a_negative_start_is_wrong_though_python_would_take_it(tmp_path):
  context = 'ab ab'
  file = write(tmp_path / 'a.json', entry('q', ('ab', -2)), context=context)
  _, report = squad.read_with_report(file, 1, training=True)
  assert list(report.left_out) == ['q']


def test_b094_tricky_file(bugs):
  questions, report = squad.read_with_report(bugs / 'squad_v11_tricky.json', 1, training=True)
  expected = json.loads((bugs / 'squad_v11_expected.json').read_text(encoding='utf-8'))
  assert report.repaired == {'t16': 41, 't18': 4}
  assert set(report.left_out) == {'t17', 't19'}
  spans = {q.id: (q.answers[0][1], q.answers[0][1] + len(q.answers[0][0])) for q in questions}
  right = {name: tuple(row['char_span']) for name, row in expected.items() if row['offset_ok']}
  assert spans == right | {'t16': (41, 50), 't18': (4, 15)}


def test_v2_impossible_is_trained_as_no_answer(tmp_path):
  file = write(
      tmp_path / 'a.json',
      entry('no', is_impossible=True, plausible_answers=[{'text': '1911', 'answer_start': 27}]),
      entry('odd', ('1911', 27), is_impossible=True),
      entry('forgotten', is_impossible=False),
      entry('unsaid', ('1911', 27)),
      version='v2.0',
  )
  questions, report = squad.read_with_report(file, 2, training=True)
  assert {question.id: question.answers for question in questions} == {
      'no': (), 'odd': (), 'unsaid': (('1911', 27),)
  }
  assert not questions[2].is_impossible
  assert 'not marked impossible' in report.left_out['forgotten']
  assert len(squad.read(file, 2)) == 4


@pytest.mark.parametrize('fields', [{'is_impossible': True}, {}])
def test_b100_v2_file_as_v1_names_the_switch(tmp_path, fields):
  file = write(tmp_path / 'a.json', entry('q', **fields), version='v2.0')
  with pytest.raises(squad.SquadError, match=r'1 of 1 .*v2\.0.*version=2'):
    squad.read(file, 1)


def test_b100_v1_file_can_be_read_as_either(tmp_path):
  file = write(tmp_path / 'a.json', entry('q', ('1911', 27)))
  assert squad.read(file, 1, training=True) == squad.read(file, 2, training=True)
  assert squad.detect_version(file) == 1


def test_b100_all_combinations_of_the_tricky_files(bugs):
  old, new = bugs / 'squad_v11_tricky.json', bugs / 'squad_v20_tricky.json'
  assert len(squad.read(old, 1)) == len(squad.read(old, 2)) == 23
  assert len(squad.read(new, 2)) == 8
  with pytest.raises(squad.SquadError, match='version=2'):
    squad.read(new, 1)
  assert (squad.detect_version(old), squad.detect_version(new)) == (1, 2)
  assert squad.detect_version(bugs / 'squad_eval_gold_v11.json') == 2
  # Says v2.0, but all questions have answers: v1.1 scores are defined.
  assert len(squad.read(bugs / 'squad_eval_gold_v11.json', 1)) == 5


HOSTILE = {
    'truncated': (b'{"version": "1.1", "data": [{"title": "A", ', 'line 1, column'),
    'binary': (b'\x93NUMPY\x01\x00v\x00', 'not UTF-8 at byte 0'),
    'zip': (b'PK\x03\x04\x14\x00\xff\xfe', 'not UTF-8 at byte 6'),
    'empty': (b'', 'line 1, column 1'),
    'list': (b'[]', 'no list "data"'),
    'data is text': (b'{"data": "x"}', 'no list "data"'),
    'no questions': (b'{"data": []}', 'has no questions'),
    'deep': (b'[' * 100_000, 'nested too deeply'),
    'article': (b'{"data": [3]}', r'data\[0\]: no "paragraphs"'),
    'context': (b'{"data": [{"paragraphs": [{"text": "", "qas": []}]}]}',
                r'data\[0\]\.paragraphs\[0\]: no "context" \(there is: text, qas\)'),
    'question': (b'{"data": [{"paragraphs": [{"context": "", "qas": [{"id": "a"}]}]}]}',
                 r"qas\[0\] \(id 'a'\): no \"question\""),
    'id': (b'{"data": [{"paragraphs": [{"context": "", "qas": [{"id": 7}]}]}]}',
           r'"id" is 7, not of type str'),
}


@pytest.mark.parametrize('name', HOSTILE)
def test_hostile_files_stop_with_the_place(tmp_path, name):
  content, message = HOSTILE[name]
  file = tmp_path / 'dev.json'
  file.write_bytes(content)
  with pytest.raises(squad.SquadError, match=r'dev\.json.*' + message):
    squad.read(file, 2)


@pytest.mark.parametrize('answer', [{'text': 'a'}, {'text': 'a', 'answer_start': '0'},
                                    {'text': 'a', 'answer_start': True}, {'answer_start': 0}, 'a'])
def test_hostile_answers(tmp_path, answer):
  row = entry('q')
  row['answers'] = [answer]
  with pytest.raises(squad.SquadError, match=r"\(id 'q'\)\.answers\[0\]: "):
    squad.read(write(tmp_path / 'a.json', row), 1)


def test_an_id_twice_is_refused(tmp_path):
  file = write(tmp_path / 'a.json', entry('q', ('1911', 27)), entry('q', ('1911', 27)))
  with pytest.raises(squad.SquadError, match='more than once'):
    squad.read(file, 1)


def test_missing_file_and_wrong_version(tmp_path):
  with pytest.raises(squad.SquadError, match='no such file'):
    squad.read(tmp_path / 'no.json', 1)
  with pytest.raises(squad.SquadError, match='neither 1'):
    squad.read(tmp_path / 'no.json', 3)


def test_files_to_predict_on_need_no_answers(tmp_path):
  file = write(tmp_path / 'a.json', {'id': 'q', 'question': 'Who?'})
  assert squad.read(file, 1)[0].answers == ()


def test_byte_order_mark(tmp_path):
  file = write(tmp_path / 'a.json', entry('q', ('1911', 27)))
  file.write_bytes(b'\xef\xbb\xbf' + file.read_bytes())
  assert squad.read(file, 1)[0].context == BRIDGE


def test_b094_command(tmp_path, capsys):
  file = write(tmp_path / 'a.json', entry('q', ('1911', 0)), entry('r', ('1922', 0)))
  assert squad.main([str(file)]) == 0
  shown = json.loads(capsys.readouterr().out)
  assert shown['version'] == 1
  assert shown['questions'] == 1
  assert shown['repaired'] == {'q': 27}
  assert list(shown['left_out']) == ['r']
  assert squad.main([str(file), '--strict']) == 2
  assert 'error: ' in capsys.readouterr().err


def test_long_lists_of_ids_are_cut(tmp_path):
  file = write(tmp_path / 'a.json', *(entry(f'q{i}', ('1922', 0)) for i in range(300)))
  with pytest.raises(squad.SquadError, match='and 280 more'):
    squad.read(file, 1, training=True, strict=True)


def test_published_files(shared):
  folder = shared / 'data' / 'squad'
  sizes = {}
  for name, version in (('xquad.en', 1), ('cmrc2018_trial', 1), ('squad2-dev-half-cs224n', 2)):
    questions, report = squad.read_with_report(folder / f'{name}.json', version, training=True)
    sizes[name] = len(questions), len(report.repaired), len(report.left_out)
  assert sizes == {
      'xquad.en': (1190, 0, 0), 'cmrc2018_trial': (1002, 5, 0),
      'squad2-dev-half-cs224n': (6078, 0, 0),
  }
