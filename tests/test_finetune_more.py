"""Fine-tuning on choices (SWAG) and on tags of words from end to end."""

import csv
import json
import random

import numpy as np
import pytest
import small_checkpoint as small
from etils import epath

from bertjax import checkpoint, errors
from bertjax.data import swag as swag_data
from bertjax.data import tagging as tagging_data
from bertjax.data.examples import Examples
from bertjax.evals.predictions import Predicted
from bertjax.finetune import job, run, swag, tagging
from bertjax.finetune import settings as settings_lib
from bertjax.finetune.task import Split
from configs.finetune import swag as swag_recipe
from configs.finetune import tagging as tagging_recipe


@pytest.fixture(scope='module', autouse=True)
def _quick_programs(tmp_path_factory):
  with small.quick_programs(tmp_path_factory.mktemp('programs')):
    yield


@pytest.fixture(scope='module')
def home(tmp_path_factory):
  folder = tmp_path_factory.mktemp('home')
  small.make(folder / 'encoder')
  draw = random.Random(0)
  for name, count in (('train', 160), ('dev', 40)):
    write_swag(folder / f'{name}.csv', draw, count)
    write_tags(folder / f'{name}.conll', draw, count)
  write_swag(folder / 'test.csv', draw, 7, labelled=False)
  write_tags(folder / 'test.conll', draw, 7, tagged=False)
  return folder


def evaluate(entry, config, workdir, capsys, **changes) -> dict:
  capsys.readouterr()
  assert entry.fine_tune(small.changed(config, changes, mode='eval'), str(workdir)) == 0
  return json.loads(capsys.readouterr().out)


def predict(entry, config, workdir, **changes) -> dict[str, str]:
  """The files that mode=predict writes."""
  assert entry.fine_tune(small.changed(config, changes, mode='predict'), str(workdir)) == 0
  return {name: content.decode() for name, content in
          small.files(workdir / 'predictions').items()}


LAYOUTS = ((1, 1), (1, 5), (2, 13), (8, 8), (8, 64))  # devices, batch size


@pytest.mark.parametrize('outputs', [
    [[0, 1], [0, np.nan], [np.inf, 0]], [[[0]], [[np.nan]], [[-np.inf]]]])
def test_predictions_that_are_not_finite_are_refused_in_every_task(outputs):
  outputs, folder, written = np.array(outputs, np.float32), epath.Path('out'), []
  split = Split('test', Examples({}, {}), None, lambda _, file: written.append(file) or [file])
  with pytest.raises(errors.EXPECTED, match='test: 2 of 3 predictions.*first of example 1; take a'):
    split.write(outputs, folder)
  assert not written
  assert split.write(outputs[:1], folder) == written == [folder]
  split = Split('dev', Examples({}, {}), lambda _: {'accuracy': 0.5}, split.writer)
  with pytest.raises(errors.EXPECTED, match='dev: 2 of 3 predictions'):  # mode=eval
    run._report(folder, split, Predicted(outputs, None))


# --- SWAG ----------------------------------------------------------------------------------------


def write_swag(path, draw, count, labelled=True):
  """The right ending is the one with a colour in it."""
  with path.open('w', encoding='utf-8', newline='') as file:
    writer = csv.writer(file)
    writer.writerow(['', 'sent1', 'sent2', *(f'ending{n}' for n in range(4))]
                    + ['label'] * labelled)
    for number in range(count):
      label = draw.randrange(4)
      endings = [small.sentence(draw, *['red'] * (n == label), length=3) for n in range(4)]
      writer.writerow([f'r{number}', small.sentence(draw, length=3), 'it is', *endings]
                      + [label] * labelled)
  return path


@pytest.fixture(scope='module')
def choices(home):
  """Configuration and workdir of a run on SWAG."""
  config = small.shrink(swag_recipe.get_config(), home / 'encoder', **{
      name: home / f'{name}.csv' for name in ('train', 'dev', 'test')})
  config.seq_length, config.seq_lengths = 16, ()
  assert swag.fine_tune(config, str(home / 'swag')) == 0
  return config, home / 'swag'


@pytest.mark.slow
def test_swag_is_learnt_and_eval_gives_the_same(choices, capsys):
  config, workdir = choices
  scores = small.best_scores(workdir)
  assert scores['accuracy'] > 0.8
  [result] = json.loads((workdir / 'results.json').read_text(encoding='utf-8'))
  assert result['baseline'] == 0.25 and not result['failed']
  small.assert_close(evaluate(swag, config, workdir, capsys), scores | {'split': 'dev'})
  assert checkpoint.restore_params(workdir / 'best')['classifier']['kernel'].shape == (32, 1)


def swag_lines(text: str) -> tuple[list[list[str]], np.ndarray]:
  """Names and choices, and probabilities."""
  rows = list(csv.reader(text.splitlines()))
  assert rows[0][:2] == ['id', 'prediction']
  return [row[:2] for row in rows[1:]], np.array([row[2:] for row in rows[1:]], float)


def test_b113_a_test_file_without_labels_is_predicted_and_not_scored(home, choices):
  config, workdir = choices
  names, probabilities = swag_lines(predict(swag, config, workdir)['test.csv'])
  assert [name for name, _ in names] == [f'r{number}' for number in range(7)]
  assert [int(choice) for _, choice in names] == probabilities.argmax(1).tolist()
  np.testing.assert_allclose(probabilities.sum(1), 1, atol=1e-5)
  rows = swag_data.read(home / 'test.csv')
  right = [['red' in ending for ending in endings].index(True) for endings in rows.endings]
  assert sum(int(choice) == label for (_, choice), label in zip(names, right, strict=True)) >= 5
  before = small.files(workdir)
  with pytest.raises(errors.EXPECTED, match=r'no labels.*mode=predict'):
    swag.fine_tune(small.changed(config, {'data.dev': str(home / 'test.csv')}, mode='eval'),
                   str(workdir))
  with pytest.raises(errors.EXPECTED, match=r'test.csv: no labels'):
    swag.fine_tune(small.changed(config, {'data.train': str(home / 'test.csv')}),
                   str(home / 'none'))
  assert small.files(workdir) == before and not (home / 'none').exists()


def test_placeholders_for_labels_stop_training_and_scoring_but_not_predicting(home, tmp_path):
  text = (home / 'test.csv').read_text(encoding='utf-8')
  head, *rows = text.splitlines()
  file = tmp_path / 'test.csv'
  file.write_text('\n'.join([f'{head},label', *(f'{row},-1' for row in rows)]), encoding='utf-8')
  config = small.shrink(swag_recipe.get_config(), home / 'encoder', train=home / 'train.csv',
                        dev=file, test=file)
  origin = job.open_origin(str(home / 'encoder'))
  load = lambda mode: swag.load(
      settings_lib.from_config(small.changed(config, mode=mode), swag.SwagData), origin)
  [split] = load('predict').splits
  assert len(split.examples) == 7 and split.scores is None
  for mode in ('train', 'eval'):
    with pytest.raises(errors.EXPECTED, match=r"test.csv: line 2: label '-1'"):
      load(mode)


def test_b113_the_reported_test_file(bugs, choices):
  config, workdir = choices
  config = small.changed(config, {'data.test': str(bugs / 'swag/test.csv')},
                         seq_length=64, seq_lengths=())
  names, _ = swag_lines(predict(swag, config, workdir)['test.csv'])
  assert [name for name, _ in names] == swag_data.read(bugs / 'swag/test.csv').ids


def test_b133_one_question_and_one_sentence(choices, tags, tmp_path):
  one = write_swag(tmp_path / 'one.csv', random.Random(1), 1, labelled=False)
  assert len(predict(swag, *choices, **{'data.test': str(one)})['one.csv'].splitlines()) == 2
  one = write_tags(tmp_path / 'one.conll', random.Random(1), 1, tagged=False)
  words, tagged = (text.split('\n') for text in (
      one.read_text(encoding='utf-8'), predict(tagging, *tags, **{
          'data.test': str(one)})['one.conll']))
  assert [line.split()[0] for line in tagged if line] == [word for word in words if word]


@pytest.mark.slow
def test_b132_swag_on_any_batch_size_and_number_of_devices(choices, tmp_path, capsys):
  config, workdir = choices
  dev = str(write_swag(tmp_path / 'dev.csv', random.Random(2), 13))
  config = small.changed(config, {'data.dev': dev, 'data.test': dev})
  scores = evaluate(swag, config, workdir, capsys)
  names, probabilities = swag_lines(predict(swag, config, workdir)['dev.csv'])
  for devices, size in LAYOUTS:
    with small.devices(devices):
      changes = {'evaluate.batch_size': size}
      small.assert_close(evaluate(swag, config, workdir, capsys, **changes), scores)
      found = swag_lines(predict(swag, config, workdir, **changes)['dev.csv'])
      assert found[0] == names
      np.testing.assert_allclose(found[1], probabilities, atol=2e-6)  # six digits are written


@pytest.mark.parametrize('content, wanted', [
    (b'PK\x03\x04\xff\xfe', r'bad.csv: line 1'),
    (b'sent1,sent2,ending0\na,b,c\n', r'bad.csv: line 1: no column ending1'),
    (b'sent1,sent2,ending0,ending1,ending2,ending3,label\na,b,c,d,e,f,4\n', r"line 2: label '4'"),
    (b'{"ctx": "a", "endings": ["b", "c", "d", "e"], "label": 1}\n{"ctx": "a", "end',
     r'bad.csv: line 2: not JSON'),
])
def test_hostile_questions_are_refused_and_leave_nothing(home, tmp_path, content, wanted):
  (tmp_path / 'bad.csv').write_bytes(content)
  config = small.shrink(swag_recipe.get_config(), home / 'encoder', train=tmp_path / 'bad.csv')
  with pytest.raises(errors.EXPECTED, match=wanted):
    swag.fine_tune(config, str(tmp_path / 'run'))
  assert not (tmp_path / 'run').exists()


# --- Tagging -------------------------------------------------------------------------------------


def write_tags(path, draw, count, tagged=True):
  """Sentences of up to three windows; names of one or two words, and a place."""
  text = ''
  for _ in range(count):
    rows = [(draw.choice(small.WORDS), 'O') for _ in range(draw.randint(3, 30))]
    for entity in ([('anna', 'B-PER'), ('smith', 'I-PER')], [('anna', 'B-PER')],
                   [('rome', 'B-LOC')]):
      place = draw.randrange(len(rows))
      if draw.random() < 0.6 and rows[place][1] == 'O':
        rows[place:place] = entity + [(draw.choice(small.WORDS), 'O')]
    text += ''.join(f'{word}\t{tag}\n' if tagged else f'{word}\n' for word, tag in rows) + '\n'
  path.write_text(text, encoding='utf-8')
  return path


@pytest.fixture(scope='module')
def tags(home):
  """Configuration and workdir of a run of tagging."""
  config = small.shrink(tagging_recipe.get_config(), home / 'encoder', **{
      name: home / f'{name}.conll' for name in ('train', 'dev', 'test')})
  config.seq_length, config.seq_lengths = 16, ()
  config.num_epochs = 2
  assert tagging.fine_tune(config, str(home / 'tags')) == 0
  return config, home / 'tags'


def test_tags_are_learnt_and_eval_gives_the_same(tags, capsys):
  config, workdir = tags
  best = checkpoint.read_metadata(workdir / 'best')
  assert best['head']['labels'] == ['O', 'B-LOC', 'B-PER', 'I-PER']
  assert best['metric'] == 'f1' and best['scores']['f1'] > 0.8
  assert 'pooler' not in checkpoint.restore_params(workdir / 'best')['bert']
  [result] = json.loads((workdir / 'results.json').read_text(encoding='utf-8'))
  assert result['baseline'] == 0 and not result['failed']
  small.assert_close(evaluate(tagging, config, workdir, capsys),
                     best['scores'] | {'split': 'dev'})


def test_every_word_of_long_sentences_is_tagged_in_its_order(home, tags):
  written = predict(tagging, *tags)['test.conll']
  sentences = tagging_data.read(home / 'test.conll')
  assert max(map(len, sentences.tokens)) > 16
  groups = [[line.split() for line in group.split('\n')]
            for group in written.strip('\n').split('\n\n')]
  assert [[row[0] for row in group] for group in groups] == sentences.tokens
  right = {'anna': 'B-PER', 'smith': 'I-PER', 'rome': 'B-LOC'}
  hits = [row[-1] == right.get(row[0], 'O') for group in groups for row in group]
  assert np.mean(hits) > 0.95


@pytest.mark.slow
def test_b132_tags_on_any_batch_size_and_number_of_devices(tags, tmp_path, capsys):
  config, workdir = tags
  dev = str(write_tags(tmp_path / 'dev.conll', random.Random(5), 7))
  config = small.changed(config, {'data.dev': dev, 'data.test': dev})
  scores = evaluate(tagging, config, workdir, capsys)
  written = predict(tagging, config, workdir)
  for devices, size in LAYOUTS:
    with small.devices(devices):
      changes = {'evaluate.batch_size': size}
      small.assert_close(evaluate(tagging, config, workdir, capsys, **changes), scores)
      assert predict(tagging, config, workdir, **changes) == written


def test_tags_without_labels_are_not_scored(home, tags):
  config, workdir = tags
  before = small.files(workdir)
  with pytest.raises(errors.EXPECTED, match=r'no labels.*mode=predict'):
    tagging.fine_tune(small.changed(
        config, {'data.dev': str(home / 'test.conll')}, mode='eval'), str(workdir))
  assert small.files(workdir) == before
  with pytest.raises(errors.EXPECTED, match='dev has no labels'):
    tagging.fine_tune(small.changed(
        config, {'data.dev': str(home / 'test.conll'), 'evaluate.patience': 3}), f'{workdir}2')
  assert not workdir.with_name(f'{workdir.name}2').exists()


def test_windows_and_scheme_are_those_of_training(tags, tmp_path):
  config, workdir = tags
  origin = job.open_origin(str(workdir))
  assert (origin.head['scheme'], origin.head['stride']) == ('bio', 0)
  # By itself this file would be IOB1, and its tag B-PER.
  (tmp_path / 'dev.conll').write_text('\n'.join(['anna I-PER', *['river O'] * 40]) + '\n',
                                      encoding='utf-8')
  settings = settings_lib.from_config(small.changed(
      config, {'data.dev': str(tmp_path / 'dev.conll')}, mode='eval'), tagging.TaggingData)
  task = tagging.load(settings, origin)
  [dev] = task.splits
  outputs = np.zeros((len(dev.examples), 16, 4), np.float32)
  outputs[..., task.labels.index('O')] = 1
  outputs[0, 1, task.labels.index('I-PER')] = 2  # behind [CLS]
  assert dev.scores(outputs)['token_accuracy'] == 1
  denser = tagging.load(settings, origin._replace(metadata=origin.metadata | {
      'head': origin.head | {'stride': 2}}))
  assert len(denser.splits[0].examples) > len(dev.examples) and denser.facts['stride'] == 2


@pytest.mark.parametrize('which, content, wanted', [
    ('train', b'\x00\x01\x02', r'bad.conll: line 1'),
    ('train', b'anna B-PER\nsmith\n', r'bad.conll: line 2: 1 columns'),
    ('train', b'anna B-PER\nsmith PER\n', r"bad.conll: line 2: tag 'PER'"),
])
def test_hostile_tags_are_refused_and_leave_nothing(home, tmp_path, which, content, wanted):
  (tmp_path / 'bad.conll').write_bytes(content)
  config = small.shrink(tagging_recipe.get_config(), home / 'encoder', **{
      'train': home / 'train.conll', which: tmp_path / 'bad.conll'})
  with pytest.raises(errors.EXPECTED, match=wanted):
    tagging.fine_tune(config, str(tmp_path / 'run'))
  assert not (tmp_path / 'run').exists()


def test_a_tag_that_training_lacks_counts_as_missed_and_does_not_stop_predicting(
    home, tags, tmp_path, caplog, capsys):
  config, workdir = tags
  (tmp_path / 'new.conll').write_text('anna B-PER\n\nsmith B-NEW\n', encoding='utf-8')
  changes = {'data.dev': str(tmp_path / 'new.conll'), 'data.test': str(tmp_path / 'new.conll')}
  assert tagging.fine_tune(small.changed(config, changes, mode='eval'), str(workdir)) == 0
  assert json.loads(capsys.readouterr().out.splitlines()[-1])['recall'] <= 0.5
  assert "new.conll: line 3: tag 'B-NEW' is not among the labels" in caplog.text
  assert tagging.fine_tune(small.changed(config, changes, mode='predict'), str(workdir)) == 0
  lines = (workdir / 'predictions/new.conll').read_text(encoding='utf-8').split('\n')
  assert [line.split('\t')[:2] for line in lines if line] == [['anna', 'B-PER'], ['smith', 'B-NEW']]


def test_a_head_of_another_task_is_refused_in_predicting(home, choices, tags):
  """The files of the one with the model of the other."""
  for entry, config, workdir in ((swag, choices[0], tags[1]), (tagging, tags[0], choices[1])):
    before = small.files(workdir)
    with pytest.raises(errors.EXPECTED, match='fine-tune it first'):
      entry.fine_tune(small.changed(config, mode='predict'), str(workdir))
    assert small.files(workdir) == before
