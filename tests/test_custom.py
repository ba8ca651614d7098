"""A person's own TSV, CSV and JSON lines: kinds of labels, hostile files, predictions."""

import csv
import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bertjax.data import custom, tokenizer
from bertjax.data import rows as rows_lib
from bertjax.data.custom import Task, find_labels, read
from bertjax.data.rows import Rows, RowsError

TSV = 'text\tlabel\nIt "rains.\twet\n"It shines.\tdry\nIt pours.\twet\n'


def write(path, content) -> str:
  path.write_bytes(content if isinstance(content, bytes) else content.encode())
  return str(path)


def json_lines(path, records) -> str:
  return write(path, ''.join(json.dumps(record) + '\n' for record in records))


# --- Reading ---------------------------------------------------------------------------------


def test_classification_from_tsv(tmp_path):
  file = write(tmp_path / 'train.tsv', TSV)
  task = find_labels(Task(), file)
  assert task.labels == ('dry', 'wet')
  assert task.num_outputs == 2
  rows = read(task, file, 'train')
  assert rows.text_a == ['It "rains.', '"It shines.', 'It pours.']
  assert rows.text_b is None
  assert rows.ids == ['0', '1', '2']
  assert rows.labels.dtype == np.int32
  assert rows.labels.tolist() == [1, 0, 1]


def test_given_labels_keep_their_order(tmp_path):
  file = write(tmp_path / 'train.tsv', TSV)
  task = find_labels(Task(labels=('wet', 'misty', 'dry')), file)
  assert task.labels == ('wet', 'misty', 'dry')
  assert read(task, file, 'dev').labels.tolist() == [0, 2, 0]


def test_pairs_with_named_columns(tmp_path):
  file = write(tmp_path / 'x.tsv', 'key\tb\ta\tmood\nr1\tsecond\tfirst\tgood\nr2\tB\tA\tbad\n')
  task = find_labels(Task(text_a='a', text_b='b', label='mood', index='key'), file)
  rows = read(task, file, 'train')
  assert (rows.text_a, rows.text_b, rows.ids) == (['first', 'A'], ['second', 'B'], ['r1', 'r2'])


def test_csv_is_real_csv(tmp_path):
  text = 'text,label\r\n"a ""quoted"",\r\nlong text",x\r\n\r\nb,y\r\n'
  file = write(tmp_path / 'x.CSV', text)
  task = find_labels(Task(), file)
  assert read(task, file, 'train').text_a == ['a "quoted",\r\nlong text', 'b']
  bad = write(tmp_path / 'bad.csv', text + 'c\nd,y\n')
  rows = read(task, bad, 'train')
  assert rows.skipped == (6,)
  assert rows.ids == ['0', '1', '3']
  with pytest.raises(RowsError, match=r'bad\.csv, line 6: 1 columns instead of 2'):
    read(task, bad, 'train', strict=True)
  open_quote = write(tmp_path / 'open.csv', text + '"never closed,x\n')
  with pytest.raises(RowsError, match=r'open\.csv, line 6: not CSV: .*twice'):
    read(task, open_quote, 'train')


def test_a_field_of_csv_may_be_a_long_document(tmp_path):
  csv.field_size_limit(131_072)  # Python's own, whatever was read before
  text = 'It rains.\n' * 20_000
  file = write(tmp_path / 'x.csv', f'text,label\n"{text}",y\n')
  assert read(Task(labels=('x', 'y')), file, 'dev').text_a == [text]


def test_json_lines(tmp_path):
  file = json_lines(tmp_path / 'x.jsonl', [
      {'q': 'a\tb\nc', 'n': 7, 'label': 1}, {'q': '\u2028', 'n': 'x', 'label': 0},
      {'q': 'unlabelled', 'n': 9, 'label': None}, {'q': 'also', 'n': 10}])  # fmt: skip
  task = find_labels(Task(text_a='q', index='n'), file)
  assert task.labels == ('0', '1')
  train, test = read(task, file, 'train'), read(task, file, 'test')
  assert train.text_a == ['a\tb\nc', '\u2028']
  assert (train.ids, train.unlabelled) == (['7', 'x'], (3, 4))
  assert train.labels.tolist() == [1, 0]
  assert (len(test), test.labels) == (4, None)


def test_booleans_are_names(tmp_path):
  file = json_lines(tmp_path / 'x.jsonl', [{'text': 'a', 'label': v} for v in (True, False)])
  assert find_labels(Task(), file).labels == ('false', 'true')


@pytest.mark.parametrize('name', ['x.tsv', 'x.csv', 'x.jsonl'])
def test_multi_label(tmp_path, name):
  labels = [['red', 'blue'], [], ['blue']]
  if name == 'x.jsonl':
    file = json_lines(tmp_path / name, [{'text': 't', 'label': names} for names in labels])
  else:
    tab = '\t' if name == 'x.tsv' else ','
    file = write(tmp_path / name, f'text{tab}label\n' + ''.join(
        f't{tab}{" ; ".join(names)}\n' for names in labels))
  task = find_labels(Task('multi_label', separator=';'), file)
  assert task.labels == ('blue', 'red')
  rows = read(task, file, 'train')
  assert rows.labels.dtype == np.float32
  assert rows.labels.tolist() == [[1, 1], [0, 0], [1, 0]]
  assert rows.unlabelled == ()


def test_b111_the_kind_decides_not_the_type_found(tmp_path, bugs):
  """A JSON copy of the STS-B rows with strings for numbers is still a regression."""
  lines = (bugs / 'glue' / 'STS-B' / 'train.tsv').read_text(encoding='utf-8').splitlines()
  fields = [line.split('\t') for line in lines]
  file = json_lines(
      tmp_path / 'sts.jsonl', [dict(zip(fields[0], row, strict=True)) for row in fields[1:]])
  task = find_labels(Task('regression', 'sentence1', 'sentence2', 'score'), file)
  rows = read(task, file, 'train')
  assert task.num_outputs == 1
  assert rows.labels.dtype == np.float32
  assert rows.labels.tolist() == pytest.approx([4.75, 5.0, 0.0, 2.6])


def test_b111_strings_that_are_no_numbers_are_refused(tmp_path):
  def labels(*values):
    return json_lines(tmp_path / 'x.jsonl', [{'text': 'a', 'label': v} for v in values])

  task = Task('regression')
  assert read(task, labels('4.750', 2, -1.5, '1e1'), 'train').labels.tolist() == [4.75, 2, -1.5, 10]
  assert read(task, labels('', None, 3), 'train').unlabelled == (1, 2)
  for bad in ('high', True, float('nan'), 'inf', '1_000', [4.0]):
    with pytest.raises(RowsError, match=r'x\.jsonl, line 2: label .* is not a number'):
      read(task, labels(1, bad), 'train')
  # The other way round, a number with a fraction is no class.
  with pytest.raises(RowsError, match='label 0.5 is not a name'):
    find_labels(Task(), labels(0.5))


def test_b109_rows_without_labels_are_only_predicted(tmp_path):
  file = write(tmp_path / 'x.tsv', 'text\nfirst\nsecond\n')
  rows = read(Task(labels=('a', 'b')), file, 'test')
  assert rows.labels is None
  with pytest.raises(RowsError, match='only be predicted'):
    rows.need_labels()
  with pytest.raises(RowsError, match='no row has a label'):
    read(Task(labels=('a', 'b')), file, 'dev')


@pytest.mark.parametrize(('kind', 'labels', 'first'), [
    ('classification', ['wet', '?', '-1'], "'?'"),
    ('classification', ['wet', ['dry'], 2], "['dry']"),
    ('multi_label', [['wet'], ['dry', 'hot'], ['hot']], "['dry', 'hot']"),
    ('multi_label', [[], -1, 'hot'], '-1'), ('regression', [1.5, '?', '-'], "'?'")])
def test_what_stands_for_a_label_in_rows_to_predict_stops_nothing(
    tmp_path, caplog, kind, labels, first):
  file = json_lines(tmp_path / 'x.jsonl', [{'text': 'a', 'label': label} for label in labels])
  task = Task(kind, labels=() if kind == 'regression' else ('dry', 'wet'))
  rows = read(task, file, 'test')
  assert (len(rows), rows.labels) == (3, None)
  [said] = [record.getMessage() for record in caplog.records if record.levelname == 'WARNING']
  assert f'{file}, line 2: label {first} is none of the task; it and 1 more' in said
  for split in ('train', 'dev'):
    with pytest.raises(RowsError, match=r'x\.jsonl, line 2: '):
      read(task, file, split)


def test_case_counts_only_where_labels_differ_in_nothing_else(tmp_path):
  """A published head says POSITIVE, the file positive."""
  file = write(tmp_path / 'x.tsv', 'text\tlabel\na\tpositive\nb\tNegative\nc\tPOSITIVE\n')
  assert read(Task(labels=('POSITIVE', 'NEGATIVE')), file, 'dev').labels.tolist() == [0, 1, 0]
  several = Task('multi_label', labels=('NEGATIVE', 'POSITIVE'))
  assert read(several, file, 'dev').labels.tolist() == [[0, 1], [1, 0], [0, 1]]
  file = write(tmp_path / 'y.tsv', 'text\tlabel\na\ta\nb\tA\n')
  assert read(Task(labels=('A', 'a')), file, 'dev').labels.tolist() == [1, 0]
  with pytest.raises(RowsError, match="line 2: unknown label 'ab'"):
    read(Task(labels=('AB', 'Ab')), write(tmp_path / 'z.tsv', 'text\tlabel\nx\tab\n'), 'dev')


def test_b103_bad_lines_of_tsv(tmp_path):
  file = write(tmp_path / 'x.tsv', TSV + 'a\tb\twet\nIt is.\tdry\n\n')
  rows = read(Task(labels=('dry', 'wet')), file, 'train')
  assert rows.skipped == (5,)
  assert rows.ids == ['0', '1', '2', '4']


TEXTS = st.text(st.characters(exclude_characters='\t\n\0', exclude_categories=['Cs']), max_size=20)


@given(st.lists(st.one_of(TEXTS, st.text('"\',\\ \r', max_size=8)), min_size=1, max_size=8))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_texts_come_back_as_they_were_written(tmp_path, texts):
  task = Task(labels=('x', 'y'))
  tab = write(tmp_path / 'x.tsv', 'text\tlabel\n' + ''.join(f'{text}\ty\n' for text in texts))
  lines = json_lines(tmp_path / 'x.jsonl', [{'text': text, 'label': 'y'} for text in texts])
  quoted = ''.join('"' + text.replace('"', '""') + '",y\n' for text in texts)
  comma = write(tmp_path / 'x.csv', 'text,label\n' + quoted)
  for file in (tab, lines, comma):
    assert read(task, file, 'train', strict=True).text_a == texts


# --- Hostile files ---------------------------------------------------------------------------


@pytest.mark.parametrize(('name', 'content', 'message'), [
    ('x.jsonl', '{"text": "a", "label": "x"}\n{"text": "b", "la', 'line 2: not JSON: .*cut off'),
    ('x.jsonl', '[1, 2]\n', 'line 1: not a JSON object'),
    ('x.jsonl', '[' * 100_000, 'line 1: not JSON'),
    ('x.jsonl', '{"txt": "a", "label": "x"}', "line 1: the text 'text' is missing among txt, lab"),
    ('x.jsonl', '{"text": 3, "label": "x"}', "line 1: the text 'text' is 3; a string"),
    ('x.jsonl', '{"text": "a", "label": ["x"]}', r"line 1: label \['x'\] is not a name"),
    ('x.jsonl', b'{"text": "\xff"}', 'line 1: not UTF-8'),
    ('x.jsonl', '\n\n', 'empty'),
    ('x.tsv', '\0\1\2', 'line 1: a NUL byte'),
    ('x.tsv', 'txt\tlabel\na\tx\n', 'line 1: no column text; there are txt, label'),
    ('x.tsv', TSV + 'More rain.\tmisty\n',
     "line 5: unknown label 'misty'; known: x, wet, dry; mend .* all labels in data.labels"),
    ('x.tsv', 'text\tlabel\n', 'no usable row'),
    ('x.csv', 'text\tlabel\na\tx\n', 'line 1: no column text'),
])  # fmt: skip
def test_hostile_files_say_where(tmp_path, name, content, message):
  file = write(tmp_path / name, content)
  with pytest.raises(RowsError, match=rf'{name}.*{message}'):
    read(Task(labels=('x', 'wet', 'dry')), file, 'train')


def test_labels_that_cannot_be(tmp_path):
  file = write(tmp_path / 'x.tsv', 'text\tlabel\na\tx\nb\tx\n')
  with pytest.raises(RowsError, match='1 different labels'):
    find_labels(Task(), file)
  with pytest.raises(RowsError, match="0 different labels in 'mood'"):
    find_labels(Task(label='mood'), file)
  with pytest.raises(RowsError, match="unknown label 'x'; known: none yet"):
    read(Task(), file, 'train')
  with pytest.raises(RowsError, match='no such file'):
    read(Task(), tmp_path / 'nowhere.tsv', 'train')
  with pytest.raises(RowsError, match='is there twice'):
    Task(labels=('a', 'a'))
  with pytest.raises(RowsError, match='none of classification'):
    Task('ranking')
  with pytest.raises(RowsError, match='separator is empty'):
    Task('multi_label', separator='')
  with pytest.raises(RowsError, match="index 'n' is None"):
    read(Task(index='n'), json_lines(tmp_path / 'y.jsonl', [{'text': 'a'}]), 'test')
  with pytest.raises(RowsError, match='neither a list nor a string'):
    find_labels(Task('multi_label'),
                json_lines(tmp_path / 'z.jsonl', [{'text': 'a', 'label': 3}]))


# --- Encoding, scores, predictions -----------------------------------------------------------


def test_encode_scores_and_one_row(tmp_path):
  file = write(tmp_path / 'x.tsv', 'text\tlabel\nIt rains.\tred\n')
  task = Task('multi_label', labels=('blue', 'red'))
  rows = read(task, file, 'dev')
  encoded = rows_lib.encode(rows, tokenizer.train(['It rains.'] * 4, vocab_size=40), 16)
  assert len(encoded) == 1
  assert encoded.values['labels'].tolist() == [[0, 1]]
  found = custom.scores(task, np.array([[-1.0, 2.0]], np.float32), rows.labels)
  assert found == {'micro_f1': 1.0, 'macro_f1': 0.5, 'accuracy': 1.0}
  regression = custom.scores(
      Task('regression'), np.array([[1.0], [3.0]], np.float32), np.array([0, 9], np.float32))
  assert regression == pytest.approx({'pearson': 1.0, 'spearman': 1.0})


def test_probabilities():
  outputs = np.array([[1000.0, 0.0], [-3.0, -3.0]], np.float32)
  np.testing.assert_allclose(custom.probabilities('classification', outputs), [[1, 0], [.5, .5]])
  np.testing.assert_allclose(
      custom.probabilities('multi_label', outputs), [[1, .5], [0.04742587] * 2], rtol=1e-6)
  assert custom.probabilities('regression', outputs[:, :1]) is None


ROWS = Rows(['r1', 'r2'], ['a', 'b'], None, None, 'x.tsv')


def test_predictions_of_classes(tmp_path):
  task, outputs = Task(labels=('dry', 'wet')), np.array([[0, np.log(3)], [0, 0]], np.float32)
  path = custom.write_predictions(task, ROWS, outputs, tmp_path / 'out' / 'p.tsv')
  assert path.read_text() == (
      'id\tprediction\tprobability_dry\tprobability_wet\n'
      'r1\twet\t0.250000\t0.750000\nr2\tdry\t0.500000\t0.500000\n')
  path = custom.write_predictions(task, ROWS, outputs, tmp_path / 'p.jsonl')
  assert json.loads(path.read_text().splitlines()[0]) == {
      'id': 'r1', 'prediction': 'wet', 'probabilities': {'dry': 0.25, 'wet': 0.75}}
  assert not [*tmp_path.glob('*.tmp')]


def test_predictions_of_many_labels_and_of_numbers(tmp_path):
  task = Task('multi_label', labels=('blue', 'red'))
  outputs = np.array([[1, 2], [-1, -2]], np.float32)
  path = custom.write_predictions(task, ROWS, outputs, tmp_path / 'p.tsv')
  assert [line.split('\t')[1] for line in path.read_text().splitlines()] == [
      'prediction', 'blue,red', '']
  path = custom.write_predictions(task, ROWS, outputs, tmp_path / 'p.jsonl')
  assert [json.loads(line)['prediction'] for line in path.read_text().splitlines()] == [
      ['blue', 'red'], []]
  numbers = np.array([[0.1], [-2.5e-7]], np.float32)
  path = custom.write_predictions(Task('regression'), ROWS, numbers, tmp_path / 'p.tsv')
  assert path.read_text() == 'id\tprediction\nr1\t0.1\nr2\t-2.5e-07\n'
  path = custom.write_predictions(Task('regression'), ROWS, numbers, tmp_path / 'p.jsonl')
  assert json.loads(path.read_text().splitlines()[0]) == {'id': 'r1', 'prediction': 0.1}


def test_predictions_that_cannot_be_written(tmp_path):
  task, outputs = Task(labels=('a', 'b')), np.zeros((2, 2), np.float32)
  with pytest.raises(RowsError, match=r'written as \.jsonl or \.tsv'):
    custom.write_predictions(task, ROWS, outputs, tmp_path / 'p.xls')
  with pytest.raises(RowsError, match='2 rows with 2 outputs wanted'):
    custom.write_predictions(task, ROWS, outputs[:1], tmp_path / 'p.tsv')
  odd = Rows(['r\t1', 'r2'], ['a', 'b'], None, None, 'x.jsonl')
  with pytest.raises(RowsError, match='has a tab or a line break'):
    custom.write_predictions(task, odd, outputs, tmp_path / 'p.tsv')
  with pytest.raises(RowsError, match="label 'a,b' holds the separator"):
    custom.write_predictions(
        Task('multi_label', labels=('a,b', 'c')), ROWS, outputs, tmp_path / 'p.tsv')
  assert not [*tmp_path.iterdir()]
