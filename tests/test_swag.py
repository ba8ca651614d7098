"""SWAG and HellaSwag files, their encoding, scores and prediction files."""

import csv
import io
import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bertjax.data import swag, tokenizer
from bertjax.data.swag import SwagError

HEADER = ['', 'video-id', 'fold-ind', 'startphrase', 'sent1', 'sent2', 'gold-source',
          'ending0', 'ending1', 'ending2', 'ending3', 'label']
ROW = ['7', 'v1', '3', 'A cat sits. It', 'A cat sits.', 'It', 'gold', 'sleeps.', 'is a mill, too.',
       'says "no".', 'sings\nand sings.', '2']
HELLASWAG = {'ind': 24, 'activity_label': 'x', 'ctx_a': 'A cat sits.', 'ctx_b': 'it',
             'ctx': 'A cat sits. it', 'label': 3, 'endings': ['a.', 'b.', 'c.', 'd.']}
TEXT = ['the cat sits on the mill and sings', 'it sleeps a lot', 'she says no to the boat'] * 4


@pytest.fixture(scope='module')
def words():
  return tokenizer.train(TEXT, 'wordpiece', 120)


def as_csv(*rows, header=HEADER, quoting=csv.QUOTE_MINIMAL) -> str:
  text = io.StringIO(newline='')
  csv.writer(text, lineterminator='\n', quoting=quoting).writerows([header, *rows])
  return text.getvalue()


def written(folder, text, name='train.csv'):
  path = folder / name
  path.write_bytes(text if isinstance(text, bytes) else text.encode())
  return path


def changed(**values) -> str:
  """The HellaSwag row with other values; None takes the key out."""
  row = {key: value for key, value in (HELLASWAG | values).items() if value is not None}
  return json.dumps(row) + '\n'


def make_rows(**more) -> swag.Rows:
  return swag.Rows(**{'ids': ['0'], 'first': ['the cat sits'], 'second': ['it'],
                      'endings': [['sleeps', 'sings', 'says no', '']], 'labels': None} | more)


# --- Reading -----------------------------------------------------------------------------------


def test_csv_with_commas_quotes_and_line_breaks(tmp_path):
  rows = swag.read(written(tmp_path, as_csv(ROW, ROW[:-1] + ['0'])))
  assert rows.ids == ['7', '7']
  assert rows.first == ['A cat sits.'] * 2
  assert rows.second == ['It'] * 2
  assert rows.endings[0] == ['sleeps.', 'is a mill, too.', 'says "no".', 'sings\nand sings.']
  assert rows.labels.tolist() == [2, 0]
  assert rows.labels.dtype == np.int32


def test_columns_go_by_their_names_and_not_their_place(tmp_path):
  order = [11, 8, 7, 10, 9, 5, 4]
  text = as_csv([ROW[i] for i in order], header=[HEADER[i] for i in order])
  rows = swag.read(written(tmp_path, text))
  assert rows.ids == ['0']  # no unnamed column: rows are numbered
  assert (rows.first, rows.second, rows.labels.tolist()) == (['A cat sits.'], ['It'], [2])
  assert rows.endings == [ROW[7:11]]


def test_bom_crlf_and_blank_lines(tmp_path):
  text = as_csv(ROW, ROW).replace('\n', '\r\n').replace('sings\r\nand', 'sings\nand')
  rows = swag.read(written(tmp_path, b'\xef\xbb\xbf' + f'{text}\r\n\r\n'.encode()))
  assert len(rows) == 2
  assert rows.endings[1] == ROW[7:11]


def test_hellaswag(tmp_path):
  text = changed() + '\n' + changed(ctx_b='', label='1') + changed(ctx_a=None, ctx_b=None, label=0)
  rows = swag.read(written(tmp_path, text, 'val.jsonl'))
  assert rows.ids == ['24'] * 3
  assert rows.first == ['A cat sits.', 'A cat sits.', 'A cat sits. it']
  assert rows.second == ['it', '', '']
  assert rows.endings == [['a.', 'b.', 'c.', 'd.']] * 3
  assert rows.labels.tolist() == [3, 1, 0]
  assert swag.read(written(tmp_path, changed(label=None), 'test.jsonl')).labels is None


def test_swag_columns_as_json(tmp_path):
  row = dict(zip(HEADER, ROW, strict=True))
  rows = swag.read(written(tmp_path, json.dumps(row), 'x.json'))
  assert (rows.ids, rows.second, rows.endings) == (['0'], ['It'], [ROW[7:11]])


def test_empty_ending_is_kept_with_one_warning(tmp_path, caplog):
  row = [*ROW[:10], '', ROW[11]]
  rows = swag.read(written(tmp_path, as_csv(ROW, row, row)))
  assert [len(endings) for endings in rows.endings] == [4, 4, 4]
  assert rows.endings[1][3] == ''
  [warning] = [record for record in caplog.records if record.levelname == 'WARNING']
  # The first row takes two lines: its last ending has a line break.
  assert '2 of 3 rows have an empty ending, the first in line 4' in warning.getMessage()


def test_a_field_may_be_a_long_document(tmp_path):
  csv.field_size_limit(131_072)  # Python's own, whatever was read before
  text = 'It rains.\n' * 20_000
  assert swag.read(written(tmp_path, as_csv([*ROW[:4], text, *ROW[5:]]))).first == [text]


@pytest.mark.parametrize(('text', 'first'), [
    (as_csv([*ROW[:-1], '-1'], [*ROW[:-1], '?']), "line 2: label '-1'"),
    (as_csv(ROW, [*ROW[:-1], 'gold'], [*ROW[:-1], '-1'], [*ROW[:-1], '']), "line 4: label 'gold'"),
    (changed() + changed(label=[1]) + changed(label=-1), "line 2: label '[1]'"),
    (as_csv(ROW, [*ROW[:-1], '']), None),
])
def test_what_stands_for_a_label_in_rows_to_predict_stops_nothing(tmp_path, caplog, text, first):
  path = written(tmp_path, text)
  rows = swag.read(path, labelled=False)
  assert len(rows) >= 2 and rows.labels is None
  said = [record.getMessage() for record in caplog.records if record.levelname == 'WARNING']
  assert [f'{path}: {first} is none of the task; it and 1 more' in line for line in said] == (
      [True] if first else [])
  assert swag.read(written(tmp_path, as_csv(ROW)), labelled=False).labels.tolist() == [2]


@pytest.mark.parametrize('content, said', [
    (b'\x89PNG\r\n\x1a\n\xff\xff', 'line 1: not UTF-8 text at byte 0'),
    (as_csv(ROW).encode() + b'8,\xe9,', 'line 4: not UTF-8'),
    (b'a\nb\0c', 'line 2: a NUL byte'),
    (b'', 'no rows'),
    (as_csv(), 'no rows'),
    (as_csv(ROW[:-1], header=HEADER[:4] + HEADER[5:]), 'line 1: no column sent1; the header has'),
    (as_csv(ROW + ['a'], header=HEADER + ['sent1']), 'column sent1 stands there more than once'),
    (as_csv(ROW, ROW[:-1]), 'line 4: 11 fields, but the header has 12'),
    (as_csv(ROW, ROW + ['x']), 'line 4: 13 fields, but the header has 12'),
    (as_csv(ROW)[:-10], 'line 2: unexpected end of data'),
    (as_csv([*ROW[:-1], '4']), "line 2: label '4'; it must be 0, 1, 2 or 3"),
    (as_csv([*ROW[:-1], '-1']), "label '-1'; it must be 0, 1, 2 or 3 (a file without labels can"),
    (as_csv([*ROW[:-1], 'gold']), "label 'gold'"),
    (as_csv(ROW, [*ROW[:-1], '']), 'line 4: no label, but other rows have one'),
    (changed() + changed()[:60], 'line 2: not JSON'),
    (changed() + '[1, 2]', 'line 2: a JSON list'),
    ('[' * 100_000, 'line 1: not JSON'),
    (changed(endings=['a', 'b', 'c']), 'line 1: 3 endings; there must be 4'),
    (changed(endings=['a', 'b', 'c', 1]), "'endings' must be a list of texts"),
    (changed(endings=None), "'ending0' must be a text, and is not there"),
    (changed(ctx_b=5), "'ctx_b' must be a text, and is 5"),
    (changed(ctx_a=None, ctx_b=None, ctx=None), 'none of the keys ctx_a and ctx_b'),
    (changed(label=4), "label '4'"),
    (changed(label=True), "label 'True'"),
    (changed(label=1.0), "label '1.0'"),
])
def test_hostile_files(tmp_path, content, said):
  path = written(tmp_path, content)
  with pytest.raises(SwagError) as error:
    swag.read(path)
  assert str(error.value).startswith(f'{path}: ')
  assert said in str(error.value)


def test_no_file_and_a_folder(tmp_path):
  with pytest.raises(SwagError, match='no such file'):
    swag.read(tmp_path / 'none.csv')
  with pytest.raises(SwagError, match='is a folder'):
    swag.read(tmp_path)


FIELDS = st.text(st.characters(codec='utf-8', exclude_characters='\0'), max_size=12)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(st.tuples(*[FIELDS] * 6, st.sampled_from('0123')), min_size=1, max_size=4))
def test_any_text_survives_both_layouts(tmp_path, drawn):
  lines = [[str(i), 'v', '0', '', a, b, 'gold', *rest] for i, (a, b, *rest) in enumerate(drawn)]
  as_json = ''.join(json.dumps({'ind': i, 'ctx_a': a, 'ctx_b': b, 'endings': rest[:4],
                                'label': int(rest[4])}) + '\n'
                    for i, (a, b, *rest) in enumerate(drawn))
  for text in (as_csv(*lines, quoting=csv.QUOTE_ALL), as_json):
    rows = swag.read(written(tmp_path, text))
    assert rows.ids == [str(i) for i in range(len(drawn))]
    assert list(zip(rows.first, rows.second, strict=True)) == [(a, b) for a, b, *_ in drawn]
    assert rows.endings == [list(rest[:4]) for _, _, *rest in drawn]
    assert rows.labels.tolist() == [int(rest[-1]) for rest in drawn]


# --- Encoding ----------------------------------------------------------------------------------


def test_four_choices_of_one_length(words):
  encoded = swag.encode(make_rows(labels=np.array([1], np.int32)), words, 32)
  ids = encoded.tokens['input_ids'][0]
  assert ids.dtype == np.int32
  assert ids.shape == encoded.tokens['token_type_ids'][0].shape == (4, encoded.lengths[0])
  for row, kinds, mask, ending in zip(*(encoded.tokens[f][0] for f in (
      'input_ids', 'token_type_ids', 'attention_mask')), ['sleeps', 'sings', 'says no', ''],
      strict=True):
    first, second = (words.encode(text).ids for text in ('the cat sits', f'it {ending}'))
    wanted = [words.cls_id, *first, words.sep_id, *second, words.sep_id]
    real = len(wanted)
    assert row.tolist() == wanted + [words.pad_id] * (len(row) - real)
    assert mask.tolist() == [1] * real + [0] * (len(row) - real)
    assert np.flatnonzero(kinds).tolist() == list(range(len(first) + 2, real))
  assert encoded.values['labels'].tolist() == [1]
  assert encoded.pad_id == words.pad_id
  assert 'labels' not in swag.encode(make_rows(), words, 32).values


def test_the_longer_part_is_cut(words):
  rows = make_rows(first=['the cat ' * 20], endings=[['sleeps a lot', 'sings', 'no', 'mill']])
  long, short = swag.encode(rows, words, 64), swag.encode(rows, words, 16)
  assert short.lengths.tolist() == [16]
  for cut, whole in zip(short.tokens['input_ids'][0], long.tokens['input_ids'][0], strict=True):
    ends = np.flatnonzero(whole == words.sep_id)
    ending = whole[ends[0]:ends[1] + 1].tolist()
    real = cut[cut != words.pad_id].tolist()
    assert real[-len(ending):] == ending  # all of sent2 and the ending is there


def test_cut_rows_are_counted_in_the_log(words, caplog):
  rows = make_rows(
      ids=['0', '1', '2'], first=['the cat', 'the cat ' * 9, 'the'],
      second=['it', 'it', 'it ' * 9],
      endings=[['sings', 'no', 'a', 'it'], ['no', 'a', 'it', 'mill'], ['no', 'a', 'it', 'mill']])
  with caplog.at_level('INFO'):
    swag.encode(rows, words, 12)
  assert '2 of 3 rows were cut to max_length 12, 1 of them in an ending; in 1 nothing is left' in (
      caplog.text)
  assert [record.levelname for record in caplog.records] == ['WARNING']
  caplog.clear()
  with caplog.at_level('INFO'):
    swag.encode(rows, words, 64)
  assert caplog.text == ''


def test_too_small_a_max_length(words):
  with pytest.raises(SwagError, match='at least 5'):
    swag.encode(make_rows(), words, 4)
  assert swag.encode(make_rows(), words, 5).lengths.tolist() == [5]


# --- Scores and predictions --------------------------------------------------------------------


def test_scores():
  outputs = np.array([[0, 1, 2, 3], [1, 1, 0, 0], [5, 0, 0, 0], [0, 0, 1, 0]], np.float32)
  assert swag.scores(outputs, np.array([3, 0, 1, 2], np.int32)) == {'accuracy': 0.75}
  with pytest.raises(SwagError, match='no labels'):
    swag.scores(outputs, None)


def test_write_predictions(tmp_path):
  rows = make_rows(ids=['7', 'a,"b"'], first=['a'] * 2, second=['b'] * 2, endings=[['c'] * 4] * 2)
  outputs = np.array([[0, np.log(2), 0, 0], [1000, 0, 0, 0]], np.float32)
  swag.write_predictions(rows, outputs, tmp_path / 'new' / 'predictions.csv')
  assert (tmp_path / 'new' / 'predictions.csv').read_text('utf-8').split('\n') == [
      'id,prediction,probability0,probability1,probability2,probability3',
      '7,1,0.200000,0.400000,0.200000,0.200000',
      '"a,""b""",0,1.000000,0.000000,0.000000,0.000000', '']
  assert len(list((tmp_path / 'new').iterdir())) == 1


def test_golden_accuracy(golden):
  case = json.loads((golden / '05_metrics' / 'swag.json').read_text('utf-8'))
  outputs = np.array(case['logits'], np.float32)
  assert outputs.argmax(-1).tolist() == case['preds']
  assert swag.scores(outputs, np.array(case['labels'], np.int32)) == {
      'accuracy': case['accuracy']}


# --- Reports and real files --------------------------------------------------------------------


def test_b112_fields_with_commas_quotes_and_line_breaks(bugs, words, caplog):
  expected = json.loads((bugs / 'swag' / 'expected.json').read_text('utf-8'))['train.csv']
  rows = swag.read(bugs / 'swag' / 'train.csv')
  assert len(rows) == expected['rows'] == 3
  assert rows.endings[0][2] == expected['doubled_quotes']['ending2']
  assert ',' in rows.first[expected['embedded_comma'][0]]
  assert '\n' in rows.first[expected['embedded_newline'][0]]
  empty = expected['empty_ending']
  assert rows.endings[empty['row']][empty['ending']] == ''
  assert rows.labels.tolist() == [0, 0, 0]
  assert caplog.text.count('empty ending') == 1
  encoded = swag.encode(rows, words, 128)
  assert [ids.shape[0] for ids in encoded.tokens['input_ids']] == [4, 4, 4]


def test_b113_test_file_without_labels(bugs, words, tmp_path):
  expected = json.loads((bugs / 'swag' / 'expected.json').read_text('utf-8'))['test.csv']
  rows = swag.read(bugs / 'swag' / 'test.csv')
  assert (len(rows), rows.labels) == (expected['rows'], None)
  assert 'labels' not in swag.encode(rows, words, 128).values
  outputs = np.zeros((1, 4), np.float32)
  swag.write_predictions(rows, outputs, tmp_path / 'predictions.csv')
  assert len((tmp_path / 'predictions.csv').read_text('utf-8').splitlines()) == 1 + len(rows)
  with pytest.raises(SwagError, match='no labels'):
    swag.scores(outputs, rows.labels)


def test_real_hellaswag(shared):
  rows = swag.read(shared / 'data' / 'multiple_choice' / 'hellaswag_val_1000.jsonl')
  assert len(rows) == 1000
  assert rows.ids[:2] == ['20022', '2533']
  assert np.bincount(rows.labels).tolist() == [267, 228, 266, 239]
  assert sum(second == '' for second in rows.second) == 87
  tok = tokenizer.load(shared / 'data' / 'vocab' / 'bert-base-uncased-vocab.txt', lowercase=True)
  encoded = swag.encode(rows, tok, 128)
  assert len(encoded) == 1000
  assert encoded.lengths.max() <= 128
  # No two choices of a question are the same: no ending was cut away.
  assert all(len(np.unique(ids, axis=0)) == 4 for ids in encoded.tokens['input_ids'])


def test_real_swag_sample(shared):
  rows = swag.read(shared / 'data' / 'multiple_choice' / 'swag_sample_10.jsonl')
  assert len(rows) == 10
  assert rows.second[0] == 'A drum line'
  assert rows.labels[:2].tolist() == [0, 3]
