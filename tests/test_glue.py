"""GLUE: the official files, labels by name, hostile files, encoding, submissions."""

import json
import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bertjax.data import glue, glue_tasks, tokenizer
from bertjax.data import rows as rows_lib
from bertjax.data.glue import RowsError, read

RTE = 'index\tsentence1\tsentence2\tlabel\n0\tIt rains.\tIt is wet.\tentailment\n' \
      '1\tIt "rains.\tIt is dry.\tnot_entailment\n'


def write(path, content) -> str:
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_bytes(content if isinstance(content, bytes) else content.encode())
  return str(path)


def tiny_tokenizer():
  return tokenizer.train(['It rains. It is wet. The mill burned down.'] * 4, vocab_size=80)


def example_line(spec, header, label) -> str:
  """One row for a header, with everything filled in."""
  values = {name: f'{name} x' for name in header}
  if 'index' in values:
    values['index'] = '0'
  for number, name in enumerate(spec.texts):
    values[name] = f'"Text {number}'
  if spec.label in values:
    values[spec.label] = label
  return '\t'.join(values[name] for name in header)


# --- Layouts ---------------------------------------------------------------------------------


@pytest.mark.parametrize('task', glue.TASKS)
def test_every_split_in_its_official_layout(tmp_path, task):
  spec = glue.find_task(task)
  label = spec.codes[1] if spec.codes else '3.5'
  for split, layout in spec.splits.items():
    header = layout.header.split('\t')
    lines = ([layout.header] if layout.has_header else []) + [example_line(spec, header, label)]
    content = '\r\n'.join(lines) + '\r\n'
    file = write(tmp_path / spec.folder.lower() / layout.files[-1], content)
    rows = read(task, tmp_path, split)
    assert glue.find_split(task, file) == split or not layout.submission
    assert rows.text_a == ['"Text 0']
    assert rows.text_b == (['"Text 1'] if len(spec.texts) == 2 else None)
    assert rows.ids == ['0'] or 'id' in header
    if spec.label in header:
      assert rows.labels.tolist() == [3.5 if spec.kind == 'regression' else 1]
    else:
      assert rows.labels is None
      with pytest.raises(RowsError, match='can only be predicted'):
        rows.need_labels()
    assert read(task, tmp_path / spec.folder.lower(), split).text_a == rows.text_a  # own folder


def test_the_table():
  assert list(glue.TASKS) == [
      'cola', 'sst2', 'mrpc', 'stsb', 'qqp', 'mnli', 'qnli', 'rte', 'wnli']
  assert glue.TASKS['mnli'].labels == ('contradiction', 'entailment', 'neutral')
  assert glue.TASKS['mnli'].dev_splits == ('dev_matched', 'dev_mismatched')
  assert glue.TASKS['rte'].test_splits == ('test',)
  assert glue.TASKS['mnli'].test_splits == ('test_matched', 'test_mismatched')
  assert [glue.TASKS[t].num_outputs for t in ('stsb', 'mnli', 'cola')] == [1, 3, 2]
  assert glue.find_task('SST-2') is glue.TASKS['sst2']
  assert glue.find_split('mnli', 'x/MNLI/test_mismatched.tsv') == 'test_mismatched'
  for name in ('diagnostic/diagnostic.tsv', 'AX.tsv'):
    assert glue.find_split('mnli', name) == 'diagnostic'
  assert glue.find_split('mnli', 'MNLI-mm.tsv') == 'test_mismatched'
  assert glue.find_split('rte', 'dev.tsv') is glue.find_split('rte', 'my.tsv') is None
  with pytest.raises(RowsError, match='no task'):
    glue.find_task('boolq')


def test_the_diagnostic_set_lies_beside_mnli(tmp_path):
  write(tmp_path / 'MNLI' / 'train.tsv', 'x')
  write(tmp_path / 'diagnostic' / 'diagnostic.tsv', 'index\tsentence1\tsentence2\n0\ta\tb\n')
  rows = read('mnli', tmp_path, 'diagnostic')
  path = glue.write_submission('mnli', 'diagnostic', rows, np.eye(3)[[2]], tmp_path)
  assert path.read_text() == 'index\tprediction\n0\tneutral\n'
  assert path.name == 'AX.tsv'


@pytest.mark.parametrize('file', [
    'MNLI/diagnostic.tsv', 'MNLI/AX.tsv', 'diagnostic/diagnostic.tsv', 'AX/AX.tsv'])
def test_what_is_predicted_for_the_leaderboard(tmp_path, file):
  tests = ('test_matched', 'test_mismatched')
  (tmp_path / 'MNLI').mkdir()
  assert glue.predicted_splits('mnli', tmp_path) == tests
  write(tmp_path / file, 'index\tsentence1\tsentence2\n0\ta\tb\n')
  for folder in (tmp_path, tmp_path / 'MNLI'):
    assert glue.predicted_splits('mnli', folder) == (*tests, 'diagnostic')
    assert read('mnli', folder, 'diagnostic').text_b == ['b']
  assert glue.predicted_splits('rte', tmp_path) == ('test',)


def test_our_own_predictions_are_not_taken_for_the_diagnostic_set(tmp_path, caplog):
  write(tmp_path / 'AX.tsv', 'index\tprediction\n0\tneutral\n')
  assert glue.predicted_splits('mnli', tmp_path) == ('test_matched', 'test_mismatched')
  assert 'AX.tsv has the columns index, prediction, and not sentence1, sentence2' in caplog.text


def test_what_is_predicted_of_tfds(monkeypatch, caplog):
  asked = []
  monkeypatch.setattr(glue, '_tfds_builder', asked.append)
  tests = ('test_matched', 'test_mismatched')
  for path in ('tfds:glue/mnli', 'tfds:glue', 'tfds:glue/mnli:2.0.0'):
    assert glue.predicted_splits('mnli', path) == (*tests, 'diagnostic')
  assert asked == ['glue/ax', 'glue/ax', 'glue/ax:2.0.0']
  assert glue.predicted_splits('mnli', 'tfds:glue/ax') == ('diagnostic',)
  assert glue.predicted_splits('rte', 'tfds:glue/rte') == ('test',)

  def refuse(name):
    raise RowsError(f'no network for {name}')

  monkeypatch.setattr(glue, '_tfds_builder', refuse)
  assert glue.predicted_splits('mnli', 'tfds:glue/mnli') == tests
  assert 'AX.tsv is not written: no network for glue/ax' in caplog.text


def test_microsofts_files_of_mrpc(tmp_path):
  line = '1\t70\t71\tHe said "x.\tHe says x.\r\n'
  header = '\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\r\n'
  write(tmp_path / 'MRPC' / 'msr_paraphrase_train.txt', header + line)
  write(tmp_path / 'MRPC' / 'msr_paraphrase_test.txt', header + line + line)
  assert read('mrpc', tmp_path, 'train').text_a == ['He said "x.']
  rows = read('mrpc', tmp_path, 'test')
  assert rows.labels.tolist() == [1, 1]
  assert rows.ids == ['0', '1']  # the leaderboard's index, not Microsoft's ids
  with pytest.raises(RowsError, match=r'no dev\.tsv of MRPC; there is msr_paraphrase_test'):
    read('mrpc', tmp_path, 'dev')


def test_the_real_files(shared):
  folder = shared / 'data' / 'glue_data'
  counts = {
      ('cola', 'train'): 8551, ('cola', 'dev'): 1043, ('cola', 'test'): 1063,
      ('sst2', 'dev'): 872, ('sst2', 'test'): 1821,
      ('stsb', 'train'): 5749, ('stsb', 'dev'): 1500, ('stsb', 'test'): 1379,
      ('rte', 'train'): 2490, ('rte', 'dev'): 277,
      ('wnli', 'train'): 635, ('wnli', 'dev'): 71, ('wnli', 'test'): 146,
      ('qnli', 'dev'): 5463, ('mnli', 'train'): 240, ('mnli', 'dev_matched'): 240,
      ('qqp', 'train'): 160, ('qqp', 'dev'): 160,
  }  # fmt: skip
  for (task, split), count in counts.items():
    rows = read(task, folder, split, strict=True)
    assert len(rows) == count, (task, split)
    assert (rows.labels is None) == (split == 'test')
    assert rows.skipped == rows.unlabelled == ()
    if split == 'test':
      assert rows.ids == [str(i) for i in range(count)]
      assert glue.TASKS[task].splits[split].num_rows == count
  qnli = read('qnli', folder, 'dev')  # keeps the quotation marks that texts begin with
  assert sum(text.startswith('"') for text in qnli.text_a + qnli.text_b) == 19
  dev = read('mnli', folder, 'dev_matched')  # in the layout of the training file
  assert np.bincount(dev.labels).tolist() == [80, 80, 80]
  assert read('stsb', folder, 'dev').labels.dtype == np.float32


@pytest.mark.slow
def test_the_largest_real_file(shared):
  rows = read('sst2', shared / 'data' / 'glue_data' / 'SST-2' / 'train.tsv', 'train', strict=True)
  assert len(rows) == 67349
  assert rows.text_a[0] == 'hide new secretions from the parental units '
  assert np.bincount(rows.labels).tolist() == [29780, 37569]


# --- Bug reports -----------------------------------------------------------------------------


@pytest.fixture
def reports(bugs):
  folder = bugs / 'glue'
  return folder, json.loads((folder / 'expected.json').read_text(encoding='utf-8'))


def test_b102_quotation_marks_are_text(reports):
  folder, expected = reports
  train = read('cola', folder, 'train')
  assert len(train) == expected['CoLA']['train']
  assert train.text_a[0] == expected['CoLA']['first_train_text']
  assert train.labels.tolist() == expected['CoLA']['train_labels']
  for split in ('train', 'test'):
    assert len(read('sst2', folder, split)) == expected['SST-2'][split]
  for split in ('dev_matched', 'dev_mismatched', 'test_matched'):
    assert len(read('mnli', folder, split)) == expected['MNLI'][split]


def test_b102_without_reference_data(tmp_path):
  lines = ['"The boat\t1', '" sank"\t0', '"\t1', 'a\rb\x85c\u2028d "e" \t0']
  file = write(tmp_path / 'x.tsv', 'sentence\tlabel\n' + '\n'.join(lines))  # no final LF either
  rows = read('sst2', file, 'train', strict=True)
  assert rows.text_a == [line.split('\t')[0] for line in lines]
  assert rows.labels.tolist() == [1, 0, 1, 0]


def test_b103_bad_lines_are_skipped_counted_and_named(reports, monkeypatch):
  folder, expected = reports
  said = []
  monkeypatch.setattr(
      rows_lib.logging, 'log', lambda level, text, *args: said.append(text % args))
  rows = read('qqp', folder, 'train')
  assert len(rows) == expected['QQP']['train_usable']
  assert list(rows.skipped) == expected['QQP']['train_bad_lines'] == [4, 5]
  assert rows.ids == ['0', '1', '3']
  assert rows.text_b == ['How is a lantern lit?', '"', 'Is copper cheap?']
  assert said[0].endswith('train.tsv: 3 rows; 2 bad lines skipped: lines 4, 5')
  with pytest.raises(RowsError, match=r'train\.tsv, line 4: 4 columns instead of 6'):
    read('qqp', folder, 'train', strict=True)


def test_b103_without_reference_data(tmp_path):
  bad = RTE + 'only one\n' + '3\ta\tb\tentailment\n\n\n'
  rows = read('rte', write(tmp_path / 'x.tsv', bad), 'dev')
  assert rows.skipped == (4,)
  assert rows.ids == ['0', '1', '3']
  with pytest.raises(RowsError, match=r'x\.tsv, line 4: 1 columns instead of 4'):
    read('rte', str(tmp_path / 'x.tsv'), 'dev', strict=True)


def test_b104_every_row_of_a_test_file_has_its_prediction(tmp_path):
  file = write(tmp_path / 'test.tsv', 'index\tsentence\n0\tIt rains.\n1\n2\tIt pours.\n')
  with pytest.raises(RowsError, match=r'test\.tsv, line 3: 1 columns instead of 2; mend the line'):
    read('sst2', file, 'test')


def test_b104_a_header_is_a_header(reports, tmp_path):
  folder, expected = reports
  for split in ('train', 'dev', 'test'):
    assert len(read('cola', folder, split)) == expected['CoLA'][split]
  rows = read('cola', folder, 'test')
  path = glue.write_submission('cola', 'test', rows, np.eye(2)[[1, 0, 1]], tmp_path)
  assert path.read_text() == 'index\tprediction\n0\t1\n1\t0\n2\t1\n'


def test_b104_the_content_decides(tmp_path):
  with_header = write(tmp_path / 'a.tsv', 'sentence\tlabel\nIt rains.\t1\n')
  assert read('cola', with_header, 'train').text_a == ['It rains.']
  without = write(tmp_path / 'b.tsv', 's\t1\t\tIt rains.\ns\t0\t*\tRains it.\n')
  for split in ('train', 'dev', 'test'):
    rows = read('cola', without, split)
    assert rows.text_a == ['It rains.', 'Rains it.']
    assert rows.ids == ['0', '1']
  # The others have a header, and a file without one is not read shifted.
  with pytest.raises(RowsError, match=r'line 1: wrong columns.*RTE has a header index, sentence1'):
    read('rte', write(tmp_path / 'c.tsv', RTE.partition('\n')[2]), 'train')


def test_b106_scores_are_floats(reports):
  folder, expected = reports
  rows = read('stsb', folder, 'train')
  assert rows.labels.dtype == np.float32
  assert rows.labels.tolist() == pytest.approx(expected['STS-B']['labels'])
  assert glue.TASKS['stsb'].num_outputs == 1
  constant = glue.scores('stsb', np.ones((4, 1), np.float32), rows.labels)
  assert constant == {'pearson': None, 'spearman': None}


def test_b106_without_reference_data(tmp_path):
  text = 'sentence1\tsentence2\tscore\na\tb\t4.75\nc\td\t2\n'
  rows = read('stsb', write(tmp_path / 'x.tsv', text), 'train')
  assert rows.labels.dtype == np.float32
  assert rows.labels.tolist() == [4.75, 2.0]
  for bad in ('nan', '5.5', '1_0', 'high', '-2'):
    with pytest.raises(RowsError, match=r'x\.tsv, line 2: .* is no score from 0 to 5'):
      read('stsb', write(tmp_path / 'x.tsv', text.replace('4.75', bad)), 'train')


@given(st.permutations(glue.TASKS['mnli'].labels), st.integers(0, 2**31))
@settings(max_examples=20, deadline=None)
def test_b107_names_connect_labels_and_outputs(stored, seed):
  """A model with its labels in another order scores the same and predicts the same."""
  rng = np.random.default_rng(seed)
  outputs = rng.standard_normal((20, 3)).astype(np.float32)
  labels = rng.integers(0, 3, 20).astype(np.int32)
  wanted = glue.TASKS['mnli'].labels
  of_model = outputs[:, rows_lib.label_order(wanted, stored)]  # what the permuted head gives
  back = of_model[:, rows_lib.label_order(stored, wanted)]
  np.testing.assert_array_equal(back, outputs)
  assert glue.scores('mnli', back, labels) == glue.scores('mnli', outputs, labels)


def test_b107_unknown_names_stop():
  wanted = glue.TASKS['mnli'].labels
  upper = [name.upper() for name in reversed(wanted)]
  assert rows_lib.label_order(upper, wanted).tolist() == [2, 1, 0]
  assert rows_lib.label_order(['a', 'A'], ['A', 'a']).tolist() == [1, 0]
  for stored in (['LABEL_0', 'LABEL_1', 'LABEL_2'], wanted[:2], [*wanted, 'other'],
                 ['neutral', 'neutral', 'entailment']):
    with pytest.raises(RowsError, match='id2label'):
      rows_lib.label_order(stored, wanted)


def test_b109_rows_without_labels_are_only_predicted(reports):
  folder, expected = reports
  dev = read('mnli', folder, 'dev_matched')
  assert len(dev.unlabelled) == expected['MNLI']['dev_matched_unlabelled']
  assert dev.unlabelled == (5,)
  assert dev.labels.min() >= 0
  for task in ('cola', 'sst2'):
    rows = read(task, folder, 'test')
    assert rows.labels is None
    with pytest.raises(RowsError, match='can only be predicted, not trained on or scored'):
      rows.need_labels()
  with pytest.raises(RowsError, match="no column 'label', so these rows can only be predicted"):
    read('sst2', folder / 'SST-2' / 'test.tsv', 'dev')


def test_b109_without_reference_data(tmp_path):
  text = RTE + '2\ta\tb\t-1\n3\tc\td\t-\n'
  file = write(tmp_path / 'x.tsv', text)
  dev, test = read('rte', file, 'dev'), read('rte', file, 'test')
  assert (len(dev), dev.unlabelled, dev.labels.tolist()) == (2, (4, 5), [0, 1])
  assert (len(test), test.unlabelled, test.labels) == (4, (), None)
  assert read('rte', write(tmp_path / 'y.tsv', RTE), 'test').labels.tolist() == [0, 1]
  with pytest.raises(RowsError, match='no row has a label'):
    read('rte', write(tmp_path / 'z.tsv', RTE.replace('not_entailment', '-1')
                      .replace('entailment', '-1')), 'train')


@pytest.mark.parametrize(('task', 'labels'), [
    ('rte', ['entailment', '?', 'maybe']), ('stsb', ['4.5', '?', '9'])])
def test_what_stands_for_a_label_in_rows_to_predict_stops_nothing(tmp_path, caplog, task, labels):
  lines = [f'sentence1\tsentence2\t{glue.TASKS[task].label}', *(f'a\tb\t{x}' for x in labels), '']
  file = write(tmp_path / 'x.tsv', '\n'.join(lines))
  rows = read(task, file, 'test')
  assert (len(rows), rows.labels) == (3, None)
  [said] = [record.getMessage() for record in caplog.records if record.levelname == 'WARNING']
  assert f"{file}, line 3: label '?' is none of the task; it and 1 more" in said


# --- Hostile files ---------------------------------------------------------------------------


@pytest.mark.parametrize(('content', 'message'), [
    (b'index\tsentence1\0\tsentence2\tlabel\n', r'line 1: a NUL byte'),
    (RTE.encode('utf-16'), r'line 1: not UTF-8 text at byte 0'),
    (RTE.encode() + b'2\t\xff\tb\tentailment\n', r'line 4: not UTF-8 text at byte'),
    (bytes(random.Random(0).randrange(1, 256) for _ in range(500)), r'line \d+: not UTF-8'),
    (b'', 'empty'),
    (b'\r\n\n', 'empty'),
    (RTE.encode().partition(b'\n')[0], 'no usable row'),
    (RTE.replace('\t', ','), 'line 1: wrong columns'),
    (RTE.replace('sentence2', 'hypothesis'), 'line 1: wrong columns'),
    (RTE.replace('not_entailment', 'maybe'), r"line 3: unknown label 'maybe'; RTE has entailment"),
    (RTE.partition('\n')[0] + '\na\nb\n', 'no usable row; bad lines: lines 2, 3; check'),
])  # fmt: skip
def test_hostile_files_say_where(tmp_path, content, message):
  file = write(tmp_path / 'bad.tsv', content)
  with pytest.raises(RowsError, match=rf'bad\.tsv.*{message}'):
    read('rte', file, 'train')


def test_missing_files_say_what_is_there(tmp_path):
  with pytest.raises(RowsError, match='no such file or folder'):
    read('rte', tmp_path / 'nowhere', 'train')
  write(tmp_path / 'RTE' / 'dev.tsv', RTE)
  with pytest.raises(RowsError, match=r'no train\.tsv of RTE; there is dev\.tsv'):
    read('rte', tmp_path, 'train')
  with pytest.raises(RowsError, match='MNLI has no split'):
    read('mnli', tmp_path, 'dev')
  (tmp_path / 'empty').mkdir()
  with pytest.raises(RowsError, match='there is nothing'):
    read('rte', tmp_path / 'empty', 'train')


def test_many_bad_lines_do_not_fill_the_screen(tmp_path):
  file = write(tmp_path / 'x.tsv', RTE.partition('\n')[0] + '\n' + 'bad\n' * 100)
  with pytest.raises(RowsError, match=r'19, 20, 21, \.\.\.; check'):
    read('rte', file, 'train')


TEXTS = st.text(st.characters(exclude_characters='\t\n\0', exclude_categories=['Cs']), max_size=20)
QUOTED = st.one_of(TEXTS, st.text(st.sampled_from('"\' ,\\\r;a'), max_size=12))


@given(st.lists(st.tuples(QUOTED, QUOTED, st.sampled_from(['0', '1'])), min_size=1, max_size=8))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_texts_come_back_as_they_were_written(tmp_path, examples):
  lines = ['\t'.join(row) for row in examples]
  file = write(tmp_path / 'x.tsv', '\n'.join(['sentence1\tsentence2\tlabel', *lines, '']))
  rows = read('wnli', file, 'train', strict=True)
  assert [*zip(rows.text_a, rows.text_b, rows.labels.astype(str), strict=True)] == examples


# --- tensorflow-datasets ---------------------------------------------------------------------


@pytest.fixture
def fake_tfds(monkeypatch):
  """tfds.builder('glue/mnli') with the real features and four rows, stored in another order."""
  tfds = pytest.importorskip('tensorflow_datasets')
  asked = []

  def as_dataset(self, split, **_):
    tf = pytest.importorskip('tensorflow')
    asked.append((self.builder_config.name, split))
    regression = self.builder_config.name == 'stsb'
    features = self.info.features
    texts = [name for name in features if name not in ('idx', 'label')]
    labels = [2, 0, 1, -1] if 'test' not in split else [-1] * 4
    return tf.data.Dataset.from_tensor_slices({
        'idx': np.array([3, 1, 0, 2], np.int32),
        'label': np.array([0.5, 3.25, 4.75, -1], np.float32) if regression else np.array(labels),
        **{name: [f'{name} "{i}ü' for i in (3, 1, 0, 2)] for name in texts},
    })

  with tfds.testing.mock_data(as_dataset_fn=as_dataset):
    yield asked


@pytest.mark.slow  # imports TensorFlow
def test_b107_tfds_labels_go_by_name(fake_tfds):
  # There: entailment, neutral, contradiction; here: contradiction, entailment, neutral.
  rows = read('mnli', 'tfds:glue/mnli', 'dev_mismatched')
  assert fake_tfds == [('mnli', 'validation_mismatched')]
  assert rows.ids == ['0', '1', '3']
  assert rows.labels.tolist() == [2, 1, 0]
  assert rows.unlabelled == (3,)
  assert rows.text_a[0] == 'premise "0ü'
  assert rows.text_b[2] == 'hypothesis "3ü'
  test = read('mnli', 'tfds:glue/mnli', 'test_matched')
  assert test.ids == ['0', '1', '2', '3']
  assert test.labels is None
  for path in ('tfds:glue/mnli', 'tfds:glue/ax'):
    read('mnli', path, 'diagnostic')
    assert fake_tfds.pop() == ('ax', 'test')
  assert read('stsb', 'tfds:glue/stsb', 'dev').labels.tolist() == [4.75, 3.25, 0.5]
  with pytest.raises(RowsError, match='give tfds:glue/rte'):
    read('rte', 'tfds:glue/mnli', 'train')


def test_tfds_names_are_the_tables():
  """The builders know their features without data, so this needs no network."""
  tfds = pytest.importorskip('tensorflow_datasets')
  for name, spec in glue.TASKS.items():
    features = tfds.builder(f'glue/{name}').info.features
    assert {*(spec.tfds_texts or spec.texts), 'label', 'idx'} <= set(features)
    assert sorted(getattr(features['label'], 'names', [])) == sorted(spec.labels)


def test_b107_an_unknown_name_in_tfds_stops():
  with pytest.raises(RowsError, match="unknown label 'maybe'"):
    glue._tfds_label(glue.find_task('rte'), 1, ['entailment', 'maybe'], 'tfds:glue/rte')


def test_tfds_that_cannot_be_had(monkeypatch):
  tfds = pytest.importorskip('tensorflow_datasets')

  def refuse(name):
    raise RuntimeError(f'no network for {name}\nsecond line')

  monkeypatch.setattr(tfds, 'builder', refuse)
  with pytest.raises(RowsError, match=r'cannot give it: no network for glue/rte:2\.0\.0; give'):
    read('rte', 'tfds:glue/rte:2.0.0', 'train')


# --- Encoding and submissions ----------------------------------------------------------------


def test_encode_is_googles(golden, tmp_path):
  for case in ('cased', 'uncased'):
    pairs = json.loads(
        (golden / '04_tokenize' / f'google_{case}_pairs.json').read_text(encoding='utf-8'))
    vocabulary = golden / '04_tokenize' / f'vocab_{case}.txt'
    tok = tokenizer.load(vocabulary, lowercase=case == 'uncased')
    for pair in pairs:
      text_b = None if pair['b'] is None else [pair['b']]
      rows = rows_lib.Rows(['0'], [pair['a']], text_b, None, 'pairs')
      found = rows_lib.encode(rows, tok, pair['max_length']).tokens
      assert found['input_ids'][0].tolist() == pair['input_ids']
      assert found['token_type_ids'][0].tolist() == pair['segment_ids']


def test_encode(tmp_path, monkeypatch):
  said = []
  monkeypatch.setattr(rows_lib.logging, 'info', lambda text, *args: said.append(text % args))
  tok = tiny_tokenizer()
  rows = read('rte', write(tmp_path / 'x.tsv', RTE), 'train')
  whole = rows_lib.encode(rows, tok, 64)
  assert len(whole) == 2
  assert whole.values['labels'].tolist() == [0, 1]
  assert whole.pad_id == tok.pad_id
  first = whole.tokens['input_ids'][0]
  assert first[0] == tok.cls_id
  assert (first == tok.sep_id).sum() == 2
  longest = int(whole.lengths.max())
  cut = rows_lib.encode(rows, tok, longest - 1)
  assert cut.lengths.max() == longest - 1
  ends = (whole.lengths > longest - 1).sum()
  assert [line for line in said if 'cut to' in line] == [
      f'{rows.source}: 0 of 2 rows cut to 64 tokens',
      f'{rows.source}: {ends} of 2 rows cut to {longest - 1} tokens']
  assert rows_lib.encode(rows, tok, 5).lengths.tolist() == [5, 5]
  with pytest.raises(RowsError, match='max_length 4 leaves no room'):
    rows_lib.encode(rows, tok, 4)


def test_b133_one_row(tmp_path):
  file = write(tmp_path / 'one.tsv', 'index\tsentence\n7\tIt rains.\n')
  rows = read('sst2', file, 'test')
  encoded = rows_lib.encode(rows, tiny_tokenizer(), 16)
  assert len(encoded) == 1
  assert 'labels' not in encoded.values
  path = glue.write_submission('sst2', 'test', rows, np.eye(2)[[1]], tmp_path / 'new' / 'folder')
  assert path.read_text() == 'index\tprediction\n7\t1\n'


def test_submissions(tmp_path):
  rows = rows_lib.Rows(['0', '1', '2'], ['a'] * 3, ['b'] * 3, None, 'test.tsv')
  hits = np.array([1, 0, 1])
  expected = {
      ('mrpc', 'test'): ('MRPC.tsv', ['1', '0', '1']),
      ('qqp', 'test'): ('QQP.tsv', ['1', '0', '1']),
      ('wnli', 'test'): ('WNLI.tsv', ['1', '0', '1']),
      ('rte', 'test'): ('RTE.tsv', ['not_entailment', 'entailment', 'not_entailment']),
      ('qnli', 'test'): ('QNLI.tsv', ['not_entailment', 'entailment', 'not_entailment']),
      ('mnli', 'test_matched'): ('MNLI-m.tsv', ['entailment', 'contradiction', 'entailment']),
      ('mnli', 'test_mismatched'): ('MNLI-mm.tsv', ['entailment', 'contradiction', 'entailment']),
      ('mnli', 'diagnostic'): ('AX.tsv', ['entailment', 'contradiction', 'entailment']),
      ('mnli', 'test'): ('MNLI-test.tsv', ['entailment', 'contradiction', 'entailment']),
      ('rte', 'dev'): ('RTE-dev.tsv', ['not_entailment', 'entailment', 'not_entailment']),
  }
  for (task, split), (name, values) in expected.items():
    outputs = np.eye(glue.TASKS[task].num_outputs, dtype=np.float32)[hits]
    path = glue.write_submission(task, split, rows, outputs, tmp_path)
    assert path.name == name
    lines = path.read_text().splitlines()
    assert lines == ['index\tprediction', *(f'{i}\t{v}' for i, v in enumerate(values))]
  scores = np.array([[-0.2], [5.3], [2.34567]], np.float32)
  path = glue.write_submission('stsb', 'test', rows, scores, tmp_path)
  assert path.read_text() == 'index\tprediction\n0\t0.000\n1\t5.000\n2\t2.346\n'
  assert not list(tmp_path.glob('*.tmp'))


def test_submissions_of_wrong_outputs_are_refused(tmp_path):
  rows = rows_lib.Rows(['0', '1'], ['a'] * 2, ['b'] * 2, None, 'test.tsv')
  with pytest.raises(RowsError, match='2 rows with 2 outputs wanted'):
    glue.write_submission('rte', 'test', rows, np.eye(2)[[0]], tmp_path / 'new')
  with pytest.raises(RowsError, match='row 1: the prediction is not finite'):
    glue.write_submission('rte', 'test', rows, np.array([[0, 1], [np.nan, 1]]), tmp_path / 'new')
  assert not (tmp_path / 'new').exists()


def test_a_short_test_file_is_said(tmp_path, monkeypatch):
  said = []
  monkeypatch.setattr(glue.logging, 'warning', lambda text, *args: said.append(text % args))
  rows = rows_lib.Rows(['0'], ['a'], ['b'], None, 'test.tsv')
  glue.write_submission('rte', 'test', rows, np.eye(2)[[0]], tmp_path)
  assert said == ['RTE.tsv: 1 rows; the leaderboard expects 3000']


def test_scores_are_the_tasks_own():
  outputs = np.eye(2, dtype=np.float32)[[0, 1, 1, 0]]
  labels = np.array([0, 1, 0, 0], np.int32)
  assert set(glue.scores('cola', outputs, labels)) == {'matthews', 'accuracy'}
  assert glue.scores('mrpc', outputs, labels) == pytest.approx({'accuracy': 0.75, 'f1': 2 / 3})
  assert list(glue.scores('stsb', outputs[:, :1], labels.astype(np.float32))) == [
      'pearson', 'spearman']
  for spec in glue_tasks.TASKS.values():
    assert set(spec.metrics) <= set(glue.scores_lib.METRICS)
