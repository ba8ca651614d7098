"""Fine-tuning on GLUE and on a person's own files from end to end, on toys that can be learnt."""

import csv
import json
import random
from unittest import mock

import numpy as np
import pytest
import small_checkpoint as small
from etils import epath

import bertjax
from bertjax import checkpoint, errors, train
from bertjax.convert import import_checkpoint
from bertjax.finetune import glue, job, sweep
from bertjax.finetune import settings as settings_lib
from bertjax.finetune.task import Task
from configs.finetune import glue as recipe

ENTAILMENT = ('not_entailment', 'entailment')


@pytest.fixture(scope='module', autouse=True)
def _quick_programs(tmp_path_factory):
  with small.quick_programs(tmp_path_factory.mktemp('programs')):
    yield


@pytest.fixture
def log(caplog):
  caplog.set_level('INFO', logger='absl')
  return caplog


@pytest.fixture(scope='module')
def home(tmp_path_factory):
  """A checkpoint of an encoder, and data: a mark in the second sentence decides the label."""
  return make_home(tmp_path_factory.mktemp('home'))


def make_home(folder):
  small.make(folder / 'encoder')
  draw = random.Random(0)
  write_rte(folder / 'glue/RTE/train.tsv', draw, 160)
  write_rte(folder / 'glue/RTE/dev.tsv', draw, 61)
  write_rte(folder / 'glue/RTE/test.tsv', draw, 13, labelled=False)
  return folder


def write(path, rows):
  """A TSV file as GLUE has them, with nothing quoted."""
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(''.join('\t'.join(map(str, row)) + '\n' for row in rows), encoding='utf-8')
  return path


def write_rte(path, draw, count, labelled=True):
  rows = [['index', 'sentence1', 'sentence2'] + ['label'] * labelled]
  for number in range(count):
    label = draw.randrange(2)
    texts = [small.sentence(draw), small.sentence(draw, *['red'] * label)]
    rows.append([number, *texts] + [ENTAILMENT[label]] * labelled)
  return write(path, rows)


def settings_of(home, task='rte', **data):
  config = small.shrink(recipe.get_config(f'task={task}'), home / 'encoder', **data)
  config.seq_length, config.seq_lengths = 16, ()
  if task == 'rte':
    config.data.path = str(home / 'glue')
  return config


@pytest.fixture(scope='module')
def rte(home):
  """The workdir of a run on RTE."""
  assert glue.fine_tune(settings_of(home), str(home / 'rte')) == 0
  return home / 'rte'


def evaluate(config, workdir, capsys, **changes) -> dict:
  """What mode=eval prints, the first split."""
  capsys.readouterr()
  assert glue.fine_tune(small.changed(config, changes, mode='eval'), str(workdir)) == 0
  return json.loads(capsys.readouterr().out.splitlines()[0])


def predict(config, workdir, **changes) -> dict[str, bytes]:
  """The files that mode=predict writes."""
  assert glue.fine_tune(small.changed(config, changes, mode='predict'), str(workdir)) == 0
  return small.files(workdir / 'predictions')


# --- Training, scores, submissions ---------------------------------------------------------------


@pytest.mark.slow
def test_it_learns_and_keeps_the_best_model(home, rte):
  dev = small.records(rte, 'dev')
  assert [record['step'] for record in dev] == [20, 40, 60, 80]
  best = checkpoint.read_metadata(rte / 'best')
  assert best['scores']['accuracy'] == max(record['accuracy'] for record in dev) > 0.9
  assert best['step'] == next(record['step'] for record in dev
                              if record['accuracy'] == best['scores']['accuracy'])
  assert best['head']['labels'] == ['entailment', 'not_entailment']
  assert best['head']['task'] == 'RTE' and best['head']['kind'] == 'classification'
  [result] = json.loads((rte / 'results.json').read_text(encoding='utf-8'))
  assert result['baseline'] < 0.6 and not result['failed'] and result['seed'] == 0
  assert result['score'] == best['scores']['accuracy'] and result['metric'] == 'accuracy'
  assert small.records(rte, 'data')[0]['batches_of_length_16'] == 20


def test_eval_gives_the_scores_of_training(home, rte, capsys):
  printed = evaluate(settings_of(home), rte, capsys)
  assert printed.pop('split') == 'dev'
  small.assert_close(printed, small.best_scores(rte))
  stored = json.loads((rte / 'scores_dev.json').read_text(encoding='utf-8'))
  small.assert_close(stored, printed | {'split': 'dev'})


def test_predict_writes_the_submission(home, rte):
  lines = predict(settings_of(home), rte)['RTE.tsv'].decode().splitlines()
  rows = [line.split('\t') for line in lines]
  assert rows[0] == ['index', 'prediction']
  assert [row[0] for row in rows[1:]] == [str(number) for number in range(13)]
  test = (home / 'glue/RTE/test.tsv').read_text(encoding='utf-8').splitlines()[1:]
  right = [ENTAILMENT['red' in line.split('\t')[2].split()] for line in test]
  assert np.mean([row[1] == label for row, label in zip(rows[1:], right, strict=True)]) > 0.9


def test_the_same_command_again_has_nothing_to_do(home, rte, log):
  before = small.files(rte / 'best')
  assert glue.fine_tune(settings_of(home), str(rte)) == 0
  assert 'Training is complete' in log.text and 'Nothing to do' in log.text
  assert small.files(rte / 'best') == before


@pytest.mark.slow
def test_b132_any_batch_size_and_number_of_devices(home, rte, tmp_path, capsys):
  draw = random.Random(3)
  write_rte(tmp_path / 'dev.tsv', draw, 13)
  config = small.changed(settings_of(home), {'data.dev': str(tmp_path / 'dev.tsv')})
  scores, written = evaluate(config, rte, capsys), predict(config, rte)
  for devices, size in ((1, 1), (1, 5), (2, 13), (8, 8), (8, 64)):
    with small.devices(devices):
      changes = {'evaluate.batch_size': size}
      small.assert_close(evaluate(config, rte, capsys, **changes), scores)
      assert predict(config, rte, **changes) == written


def test_b133_one_row_has_one_prediction_beside_the_submission(home, rte, tmp_path):
  submission = predict(settings_of(home), rte)['RTE.tsv']
  one = write_rte(tmp_path / 'test.txt', random.Random(5), 1, labelled=False)
  found = predict(settings_of(home, test=one), rte)
  lines = found['RTE-file-test.tsv'].decode().splitlines()
  assert len(lines) == 2 and lines[1].startswith('0\t')
  assert found['RTE.tsv'] == submission


def test_b109_what_has_no_labels_is_predicted_and_not_scored(home, rte):
  config = settings_of(home, dev=home / 'glue/RTE/test.tsv')
  before = small.files(rte)
  with pytest.raises(errors.EXPECTED, match=r'test.tsv, line 1.*can only be predicted'):
    glue.fine_tune(small.changed(config, mode='eval'), str(rte))
  with pytest.raises(errors.EXPECTED, match=r'test.tsv, line 1.*can only be predicted'):
    glue.fine_tune(small.changed(config, {
        'data.train': str(home / 'glue/RTE/test.tsv')}), str(home / 'none'))
  assert small.files(rte) == before and not (home / 'none').exists()


def test_b104_cola_has_a_header_in_its_test_file_only(home, tmp_path):
  """Five rows to train on, fewer than a batch."""
  draw = random.Random(1)
  for name, count in (('train', 5), ('dev', 2)):
    write(tmp_path / f'CoLA/{name}.tsv',
          [('gj04', number % 2, '', small.sentence(draw)) for number in range(count)])
  write(tmp_path / 'CoLA/test.tsv',
        [('index', 'sentence'), *((number, small.sentence(draw)) for number in range(3))])
  config = small.changed(settings_of(home, 'cola', path=tmp_path), num_epochs=2)
  workdir = tmp_path / 'run'
  assert glue.fine_tune(config, str(workdir)) == 0
  assert checkpoint.read_metadata(workdir)['step'] == 2  # one batch of five rows and three fillers
  assert set(small.best_scores(workdir)) == {'loss', 'matthews', 'accuracy'}
  lines = predict(config, workdir)['CoLA.tsv'].decode().splitlines()
  assert [line.split('\t')[0] for line in lines] == ['index', '0', '1', '2']


# --- MNLI and its labels -------------------------------------------------------------------------

NLI = ('contradiction', 'entailment', 'neutral')


def write_mnli(path, draw, count):
  """A '-' where nobody agreed in the third row."""
  rows = [('index', 'sentence1', 'sentence2', 'gold_label')]
  for number in range(count):
    label = draw.randrange(3)
    rows.append((number, small.sentence(draw, length=4),
                 small.sentence(draw, small.MARKS[label], length=4),
                 '-' if number == 2 and count < 100 else NLI[label]))
  write(path, rows)


@pytest.fixture(scope='module')
def mnli(home):
  """Configuration and workdir of a run on MNLI."""
  draw = random.Random(4)
  for name, count in (('train', 240), ('dev_matched', 31), ('dev_mismatched', 31),
                      ('test_matched', 9), ('test_mismatched', 8)):
    write_mnli(home / f'glue/MNLI/{name}.tsv', draw, count)
  write_mnli(home / 'glue/diagnostic/diagnostic.tsv', draw, 5)
  config = small.changed(settings_of(home, 'mnli', path=home / 'glue'), {
      'evaluate.metric': 'dev_mismatched/accuracy'})
  assert glue.fine_tune(config, str(home / 'mnli')) == 0
  return config, home / 'mnli'


@pytest.mark.slow
def test_mnli_matched_and_mismatched(mnli):
  config, workdir = mnli
  scores = small.best_scores(workdir)
  assert checkpoint.read_metadata(workdir / 'best')['metric'] == 'dev_mismatched/accuracy'
  dev = small.records(workdir, 'dev')
  assert scores['dev_mismatched/accuracy'] == max(row['dev_mismatched/accuracy'] for row in dev)
  assert set(scores) == {'loss', 'accuracy', 'dev_mismatched/loss', 'dev_mismatched/accuracy'}
  assert min(scores['accuracy'], scores['dev_mismatched/accuracy']) > 0.8
  assert (scores['accuracy'] * 30) % 1 == pytest.approx(0, abs=1e-6)  # B109: '-' does not count
  files = predict(config, workdir)
  assert {name: len(content.splitlines()) for name, content in files.items()} == {
      'AX.tsv': 6, 'MNLI-m.tsv': 10, 'MNLI-mm.tsv': 9}


def test_b107_labels_go_by_name(mnli, tmp_path, capsys):
  """A checkpoint with its label names and the rows of its head in another order is the same."""
  config, workdir = mnli
  metadata = checkpoint.read_metadata(workdir / 'best')
  params = checkpoint.restore_params(workdir / 'best')
  order = [2, 0, 1]
  metadata['head']['labels'] = [f'{NLI[number]}'.upper() for number in order]
  params['classifier'] = {name: array[..., order] for name, array in params['classifier'].items()}
  checkpoint.save_params(tmp_path / 'best', 7, params, metadata,
                         checkpoint.tokenizer_folder(workdir / 'best'))
  wanted, scores = predict(config, workdir), evaluate(config, workdir, capsys)
  small.assert_close(evaluate(config, tmp_path, capsys), scores)
  assert predict(config, tmp_path) == wanted
  # And it goes on from there with its head, in its order.
  started = []
  more = small.changed(config, init_from=str(tmp_path))
  with mock.patch.object(train, 'train', lambda job, folder, stopping: started.append(job) or 3):
    assert glue.fine_tune(more, str(tmp_path / 'more')) == 3
  assert started[0].metadata['head']['labels'] == ['NEUTRAL', 'CONTRADICTION', 'ENTAILMENT']
  initial, words = started[0].initial()
  np.testing.assert_array_equal(initial['classifier']['kernel'], params['classifier']['kernel'])
  assert 'newly' not in words


def test_a_misspelt_metric_is_refused(mnli, tmp_path):
  config, _ = mnli
  for metric in ('acuracy', 'dev_mismatchd/accuracy'):
    with pytest.raises(errors.EXPECTED, match=f'evaluate.metric.*{metric}.*accuracy'):
      glue.fine_tune(small.changed(config, {'evaluate.metric': metric}), str(tmp_path / 'a'))
  assert not (tmp_path / 'a').exists()


# --- STS-B ---------------------------------------------------------------------------------------


def write_stsb(path, draw, count):
  rows = [('index', 'sentence1', 'sentence2', 'score')]
  for number in range(count):
    marks = draw.randrange(4)
    rows.append((number, small.sentence(draw, length=3),
                 small.sentence(draw, *['red'] * marks, length=6), f'{marks * 1.25:.3f}'))
  write(path, rows)


@pytest.mark.slow
def test_b106_regression_replaces_a_head_of_classes(home, tmp_path, log):
  small.make(tmp_path / 'three', 'classification', labels=NLI)
  draw = random.Random(6)
  for name, count in (('train', 160), ('dev', 40), ('test', 5)):
    write_stsb(tmp_path / f'STS-B/{name}.tsv', draw, count)
  config = small.changed(settings_of(home, 'stsb', path=tmp_path), init_from=str(
      tmp_path / 'three'))
  assert glue.fine_tune(config, str(tmp_path / 'run')) == 0
  assert 'newly initialised: classifier; not used: classifier' in log.text
  params = checkpoint.restore_params(tmp_path / 'run/best')
  assert params['classifier']['kernel'].shape == (32, 1)
  assert small.best_scores(tmp_path / 'run')['pearson'] > 0.7
  lines = predict(config, tmp_path / 'run')['STS-B.tsv'].decode().splitlines()[1:]
  assert all(0 <= float(line.split('\t')[1]) <= 5 for line in lines) and len(lines) == 5


def test_b106_constant_predictions_are_undefined_and_no_crash(home, tmp_path):
  """Also a run whose score is undefined has failed, and the table counts it."""
  draw = random.Random(6)
  for name in ('train', 'dev'):
    write_stsb(tmp_path / f'STS-B/{name}.tsv', draw, 16)
  params = checkpoint.restore_params(small.make(tmp_path / 'random', 'regression', labels=['x']))
  params['classifier']['kernel'] *= 0
  small.make(tmp_path / 'zero', 'regression', params=params)
  config = small.changed(settings_of(home, 'stsb', path=tmp_path), {
      'optimizer.learning_rate': 0.0}, init_from=str(tmp_path / 'zero'), num_epochs=1)
  assert glue.fine_tune(config, str(tmp_path / 'run')) == 0
  [record] = small.records(tmp_path / 'run', 'dev')
  assert record['pearson'] is None and record['spearman'] is None and record['loss'] > 0
  results = json.loads((tmp_path / 'run/results.json').read_text(encoding='utf-8'))
  assert [(result['score'], result['failed']) for result in results] == [(None, True)]
  assert sweep.table(results * 2).splitlines()[-1].split() == ['0', '2', '2', 'undefined']


@pytest.mark.slow
def test_b106_the_reported_checkpoint_and_scores(bugs, tmp_path):
  """A Google checkpoint of a classifier with three outputs, and scores with fractions."""
  imported = import_checkpoint.load(f'tf:{bugs / "ckpt_tf1_classifier"}', lowercase=True)
  import_checkpoint.save(imported, tmp_path / 'ckpt')
  config = small.shrink(recipe.get_config('task=stsb'), tmp_path / 'ckpt',
                        train=bugs / 'glue/STS-B/train.tsv', dev=bugs / 'glue/STS-B/train.tsv')
  config.num_epochs = 1
  assert glue.fine_tune(config, str(tmp_path / 'run')) == 0
  params = checkpoint.restore_params(tmp_path / 'run/best')
  assert params['classifier']['bias'].shape == (1,)
  assert {'pearson', 'spearman'} <= set(small.best_scores(tmp_path / 'run'))


# --- A person's own files ------------------------------------------------------------------------


@pytest.mark.slow
def test_several_labels_from_json_lines(home, tmp_path):
  draw = random.Random(7)
  for name, count in (('train', 200), ('dev', 40), ('test', 7)):
    rows = []
    for number in range(count):
      marks = [mark for mark in ('blue', 'red') if draw.random() < 0.5]
      rows.append({'id': f'{name}{number}', 'body': small.sentence(draw, *marks)}
                  | ({} if name == 'test' else {'colours': marks}))
    (tmp_path / f'{name}.jsonl').write_text(
        ''.join(json.dumps(row) + '\n' for row in rows), encoding='utf-8')
  config = settings_of(
      home, 'custom', kind='multi_label', train=tmp_path / 'train.jsonl',
      dev=tmp_path / 'dev.jsonl', test=tmp_path / 'test.jsonl', text_a='body', label='colours',
      index='id')
  assert glue.fine_tune(config, str(tmp_path / 'run')) == 0
  scores = small.best_scores(tmp_path / 'run')
  assert scores['micro_f1'] > 0.9 and set(scores) == {'loss', 'micro_f1', 'macro_f1', 'accuracy'}
  rows = list(map(json.loads, predict(config, tmp_path / 'run')['test.jsonl'].splitlines()))
  assert [row['id'] for row in rows] == [f'test{number}' for number in range(7)]
  assert all(set(row['probabilities']) == {'blue', 'red'} for row in rows)
  assert all(row['prediction'] == [name for name, p in row['probabilities'].items() if p > 0.5]
             for row in rows)


def test_numbers_from_csv(home, tmp_path):
  draw = random.Random(8)
  for name, count in (('train', 160), ('dev', 40)):
    with (tmp_path / f'{name}.csv').open('w', encoding='utf-8', newline='') as file:
      writer = csv.writer(file)
      writer.writerow(['text', 'label'])
      for _ in range(count):
        marks = draw.randrange(3)
        writer.writerow([small.sentence(draw, *['green'] * marks), marks - 0.5])
  config = settings_of(home, 'custom', kind='regression', train=tmp_path / 'train.csv',
                       dev=tmp_path / 'dev.csv')
  assert glue.fine_tune(config, str(tmp_path / 'run')) == 0
  assert small.best_scores(tmp_path / 'run')['pearson'] > 0.7
  lines = predict(config, tmp_path / 'run')['dev.tsv'].decode().splitlines()
  assert lines[0] == 'id\tprediction' and len(lines) == 41


def test_classes_from_tsv_and_one_row(home, tmp_path):
  draw = random.Random(9)
  for name, count in (('train', 160), ('dev', 40), ('one', 1)):
    labels = [draw.choice(('blue', 'red')) for _ in range(count)]
    write(tmp_path / f'{name}.tsv', [('mood', 'review'), *(
        (label, small.sentence(draw, label)) for label in labels)])
  config = settings_of(home, 'custom', train=tmp_path / 'train.tsv', dev=tmp_path / 'dev.tsv',
                       text_a='review', label='mood')
  assert glue.fine_tune(config, str(tmp_path / 'run')) == 0
  assert small.best_scores(tmp_path / 'run')['accuracy'] > 0.9
  [header, row] = predict(config, tmp_path / 'run', **{
      'data.test': str(tmp_path / 'one.tsv')})['one.tsv'].decode().splitlines()
  assert header == 'id\tprediction\tprobability_blue\tprobability_red'
  assert row.split('\t')[:2] == ['0', labels[0]]


def task_of(home, head, mode='train', **data):
  """What a run on a person's own files would begin with."""
  config = small.changed(settings_of(home, 'custom', **data), mode=mode)
  origin = job.open_origin(str(home / 'encoder'))
  origin = origin._replace(metadata=origin.metadata | {'head': head})
  return glue.load(settings_lib.from_config(config, glue.GlueData), origin), origin


def test_a_published_head_goes_on_whatever_the_case_of_its_labels(home, tmp_path):
  file = write(tmp_path / 'x.tsv', [
      ('text', 'label'), ('red mill', 'positive'), ('blue mill', 'negative')])
  for labels, values in ((['POSITIVE', 'NEGATIVE'], [0, 1]), (['negative', 'positive'], [1, 0])):
    head = {'kind': 'classification', 'labels': labels}
    task, origin = task_of(home, head, train=file, dev=file)
    assert task.labels == tuple(labels) and job.same_head(origin, task)
    assert task.train.values['labels'].tolist() == values
    # The trained model says the same names, and is evaluated on the same file.
    task, origin = task_of(home, head, 'eval', dev=file)
    assert job.same_head(origin, task)
    assert task.splits[0].examples.values['labels'].tolist() == values
  task, _ = task_of(home, {'kind': 'classification', 'labels': ['good', 'bad']}, train=file)
  assert task.labels == ('negative', 'positive')


def test_only_files_to_predict_need_ids(home, tmp_path):
  file = write(tmp_path / 'x.tsv', [('text', 'label'), ('mill', 'a'), ('boat', 'b')])
  test = write(tmp_path / 'test.tsv', [('id', 'text'), ('r7', 'mill')])
  head = {'kind': 'classification', 'labels': ['a', 'b']}
  files = {'train': file, 'dev': file, 'test': test, 'index': 'id'}
  assert len(task_of(home, head, **files)[0].train) == 2
  [split] = task_of(home, head, 'predict', **files)[0].splits
  [written] = split.write(np.zeros((1, 2), np.float32), epath.Path(tmp_path / 'out'))
  assert written.read_text().splitlines()[1].startswith('r7\ta\t')
  with pytest.raises(errors.EXPECTED, match='no column id'):
    task_of(home, head, 'predict', **files | {'test': file})


# --- Several runs, early stopping, what is trained -----------------------------------------------


@pytest.mark.slow
def test_seeds_and_rates_end_in_a_table(home, tmp_path, capsys):
  """The rate of nearly nothing fails: it stays at the majority rate."""
  config = small.changed(
      settings_of(home, dev=home / 'glue/RTE/dev.tsv'), {'evaluate.every': 40}, num_epochs=2,
      seeds=(0, 1), learning_rates=(5e-3, 1e-9))
  assert glue.fine_tune(config, str(tmp_path / 'run')) == 0
  results = json.loads((tmp_path / 'run/results.json').read_text(encoding='utf-8'))
  assert [(row['learning_rate'], row['seed']) for row in results] == [
      (5e-3, 0), (5e-3, 1), (1e-9, 0), (1e-9, 1)]
  *_, title, header, high, low, best_run = capsys.readouterr().out.splitlines()
  assert 'RTE: accuracy' in title and 'knows nothing' in title
  assert header.split() == ['learning', 'rate', 'runs', 'failed', 'median', 'best', 'worst',
                            'deviation']
  scores = sorted(row['score'] for row in results[:2])
  assert high.split()[:2] == ['0.005', '2'] and low.split()[:2] == ['1e-09', '2']
  assert high.split()[3:6] == [f'{np.median(scores):.4f}', f'{scores[1]:.4f}', f'{scores[0]:.4f}']
  assert int(low.split()[2]) == sum(row['score'] <= row['baseline'] for row in results[2:])
  assert not np.array_equal(*(checkpoint.restore_params(tmp_path / f'run/lr0.005_seed{seed}/best')[
      'classifier']['kernel'] for seed in (0, 1)))
  assert glue.fine_tune(config, str(tmp_path / 'run')) == 0  # nothing to do, the same table
  assert capsys.readouterr().out.splitlines()[-5:] == [title, header, high, low, best_run]
  # The same command predicts with the best of the runs.
  assert glue.fine_tune(small.changed(config, {'data.test': str(home / 'glue/RTE/test.tsv')},
                                      mode='eval'), str(tmp_path / 'run')) == 0
  top = max(results, key=lambda row: row['score'])
  assert best_run == f'the best run: {tmp_path}/run/{top["folder"]}'
  said = json.loads(capsys.readouterr().out.splitlines()[-1])
  assert said['accuracy'] == pytest.approx(top['score'])
  # So do all others who are given the folder of several runs.
  loaded = bertjax.load(tmp_path / 'run')
  assert loaded.metadata['scores'] == top['scores']
  assert job.open_origin(str(tmp_path / 'run')).metadata == loaded.metadata


def test_it_stops_early_and_the_same_command_has_nothing_to_do(home, tmp_path, log):
  config = small.changed(settings_of(home), {
      'evaluate.every': 5, 'evaluate.patience': 2, 'optimizer.learning_rate': 0.0})
  assert glue.fine_tune(config, str(tmp_path)) == 0
  assert [record['step'] for record in small.records(tmp_path, 'dev')] == [5, 10, 15]
  assert 'Stopped early, before step 15' in log.text and 'last better at step 5' in log.text
  assert checkpoint.read_metadata(tmp_path / 'best')['step'] == 5
  assert checkpoint.read_metadata(tmp_path)['step'] == 15
  before = small.files(tmp_path / 'best')
  log.clear()
  assert glue.fine_tune(config, str(tmp_path)) == 0
  assert 'Nothing to do' in log.text and small.files(tmp_path / 'best') == before


def moved(before, after) -> set[str]:
  """The parameters that are not bit for bit as they were; of the layers with their number."""
  found = set()
  for name, old in checkpoint.leaves(before).items():
    new = checkpoint.leaves(after)[name]
    if 'encoder/layers' in name:
      found |= {f'layer {n}' for n in range(len(old)) if (old[n] != new[n]).any()}
    elif (old != new).any():
      found.add(name.split('/')[1])
  return found


def test_frozen_layers_stay_bit_for_bit(home, tmp_path):
  config = small.changed(settings_of(home), {'optimizer.freeze_layers': 1}, num_epochs=1)
  assert glue.fine_tune(config, str(tmp_path)) == 0
  after = checkpoint.restore_params(tmp_path)
  assert moved(checkpoint.restore_params(home / 'encoder'), after) == {'layer 1', 'pooler'}


@pytest.mark.slow
def test_features_of_all_layers(home, tmp_path, capsys):
  """The feature-based use: the encoder is frozen, the head mixes its layers."""
  config = small.changed(settings_of(home), {
      'head.layers': 'weighted_sum', 'optimizer.freeze': 'encoder'}, num_epochs=2)
  assert glue.fine_tune(config, str(tmp_path)) == 0
  after = checkpoint.restore_params(tmp_path / 'best')
  assert moved(checkpoint.restore_params(home / 'encoder'), after) == {'pooler'}
  assert after['layer_weights'].shape == (3,) and (after['layer_weights'] != 0).all()
  printed = evaluate(config, tmp_path, capsys)
  small.assert_close(printed, small.best_scores(tmp_path) | {'split': 'dev'})


def test_from_scratch_and_few_rows(home, tmp_path, log):
  config = small.changed(settings_of(home), {'data.max_train_rows': 16}, seed=1,
                         from_scratch=True)
  assert glue.fine_tune(config, str(tmp_path)) == 0
  assert 'from scratch' in log.text and '16 training examples' in log.text
  assert checkpoint.read_metadata(tmp_path)['step'] == 8
  table, other = (checkpoint.restore_params(path)['bert']['embeddings']['word_embeddings'][
      'embedding'] for path in (tmp_path, home / 'encoder'))
  assert table.shape == other.shape and np.abs(table - other).max() > 0.1


# --- What is refused -----------------------------------------------------------------------------


def test_another_configuration_is_refused_with_the_differences(home, rte):
  before = small.files(rte)
  config = small.changed(settings_of(home), {'optimizer.b1': 0.8}, seed=3)
  with pytest.raises(errors.EXPECTED) as error:
    glue.fine_tune(config, str(rte))
  assert 'seed: stored 0, now 3' in str(error.value)
  assert 'optimizer.b1: stored 0.9, now 0.8' in str(error.value)
  with pytest.raises(errors.EXPECTED, match='data: stored'):
    glue.fine_tune(small.changed(settings_of(home), {'data.max_train_rows': 100}), str(rte))
  assert small.files(rte) == before


@pytest.mark.parametrize('content, wanted', [
    (b'\x7fELF\x02\x01\x01\x00\xff\xfe', r'bad.tsv.*not UTF-8'),
    (b'', r'bad.tsv.*empty'),
    (b'text\tlabel\na mill\tred\n', r'bad.tsv, line 1: wrong columns.*sentence1'),
    (b'index\tsentence1\tsentence2\tlabel\n0\ta\tb\tmaybe\n', r"line 2: unknown label 'maybe'"),
    (b'index\tsentence1\tsentence2\tlabel\n0\ta\tb\n', r'line 2: 3 columns instead of 4'),
])
def test_hostile_files_are_refused_and_leave_nothing(home, tmp_path, content, wanted):
  (tmp_path / 'bad.tsv').write_bytes(content)
  for which in ('train', 'dev'):
    config = settings_of(home, strict=True, **{which: tmp_path / 'bad.tsv'})
    with pytest.raises(errors.EXPECTED, match=wanted):
      glue.fine_tune(config, str(tmp_path / 'run'))
  assert not (tmp_path / 'run').exists()


def test_truncated_json_lines_are_refused(home, tmp_path):
  (tmp_path / 'cut.jsonl').write_text('{"text": "a", "label": "x"}\n{"text": "b", "la',
                                      encoding='utf-8')
  config = settings_of(home, 'custom', train=tmp_path / 'cut.jsonl')
  with pytest.raises(errors.EXPECTED, match=r'cut.jsonl, line 2: not JSON'):
    glue.fine_tune(config, str(tmp_path / 'run'))
  assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize('changes, wanted', [
    ({'init_from': ''}, 'init_from is empty'),
    ({'init_from': 'nowhere'}, 'nowhere'),
    ({'data.task': 'boolq'}, "no task 'boolq'"),
    ({'data.path': ''}, 'set data.path'),
    ({'mode': 'predcit'}, "mode is 'predcit'"),
    ({'seq_length': 128}, '128.*64 positions'),
    ({'optimizer.freeze_layers': 5}, 'freeze_layers is 5.* 2 layers'),
    ({'head.layers': 'first'}, 'weighted_sum'),
    ({'head.dropout': 1.0}, r'head.dropout is 1.0'),
    ({'learning_rates': (0.0,)}, 'learning_rates'),
])
def test_settings_that_cannot_be_are_said_in_words(home, tmp_path, changes, wanted):
  with pytest.raises(errors.EXPECTED, match=wanted):
    glue.fine_tune(small.changed(settings_of(home), changes), str(tmp_path / 'run'))
  assert not (tmp_path / 'run').exists()


def test_a_head_of_another_task_with_the_same_labels_is_no_head_for_this_one(home, rte):
  """QNLI and RTE name theirs alike; texts of one's own are for any head."""
  origin = job.open_origin(str(rte))
  labels = tuple(origin.head['labels'])
  task = lambda name: Task(name, 'classification', labels, 'accuracy', None, ())
  assert job.same_head(origin, task('RTE')) and job.same_head(origin, task('custom'))
  assert not job.same_head(origin, task('QNLI'))
  unnamed = origin._replace(metadata={'head': {
      'kind': 'classification', 'labels': origin.head['labels']}})
  assert job.same_head(unnamed, task('QNLI'))  # imported: nobody says what it is


def test_a_sweep_without_a_best_run_is_not_what_it_began_with(home, rte, tmp_path):
  """Its head is of the task as well: its answers would be taken for the sweep's."""
  (tmp_path / 'lr2e-05_seed0/checkpoints').mkdir(parents=True)
  config = small.changed(settings_of(home), init_from=str(rte), mode='predict')
  with pytest.raises(errors.EXPECTED, match='several runs and no best one'):
    glue.fine_tune(config, str(tmp_path))
  assert not (tmp_path / 'predictions').exists()


def test_what_another_run_has_kept_stays_where_two_begin_in_a_new_folder(
    home, tmp_path, monkeypatch):
  (tmp_path / 'run/best').mkdir(parents=True)

  def claim(self):
    raise checkpoint.CheckpointError('another run is at work')

  monkeypatch.setattr(checkpoint.Checkpoints, 'claim', claim)
  with pytest.raises(errors.EXPECTED, match='another run'):
    glue.fine_tune(settings_of(home), str(tmp_path / 'run'))
  assert [path.name for path in (tmp_path / 'run').iterdir()] == ['best']


def test_the_home_folder_is_found_in_init_from(home, monkeypatch):
  monkeypatch.setenv('HOME', str(home))
  assert str(job.open_origin('~/encoder').path) == str(home / 'encoder')


def test_another_origin_on_resume_is_not_looked_at_and_said(home, rte, log):
  config = small.changed(settings_of(home), init_from=str(rte))
  assert glue.fine_tune(config, str(rte)) == 0
  assert f'This workdir began from {home}/encoder; init_from={rte} is not looked at' in log.text


def test_a_head_of_another_task_is_refused_in_predicting(home, rte, tmp_path):
  for task, data in (('mnli', {'test': home / 'glue/RTE/test.tsv'}),
                     ('stsb', {'test': home / 'glue/RTE/test.tsv'}),
                     ('rte', {'test': home / 'glue/RTE/test.tsv'})):
    config = small.changed(settings_of(home, task, **data), mode='predict')
    workdir = rte
    if task == 'rte':  # an encoder has no head
      workdir = tmp_path / 'run'
    with pytest.raises(errors.EXPECTED, match='fine-tune it first'):
      glue.fine_tune(config, str(workdir))
  assert not (tmp_path / 'run').exists()
