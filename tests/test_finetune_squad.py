"""Fine-tuning on questions and answers from end to end: the answer is the colour of the text."""

import json
import random

import numpy as np
import pytest
import small_checkpoint as small

from bertjax import checkpoint, errors
from bertjax.finetune import job, squad
from bertjax.finetune import settings as settings_lib
from configs.finetune import squad as recipe

COLOURS = ('red', 'blue', 'green')


@pytest.fixture(scope='module', autouse=True)
def _quick_programs(tmp_path_factory):
  with small.quick_programs(tmp_path_factory.mktemp('programs')):
    yield


def write(path, draw, count, impossible=0.0, answers=True, longest=20):
  """Contexts of up to two windows, with odd white space, one colour in each, or none."""
  paragraphs = []
  for number in range(count):
    words = [draw.choice(small.WORDS) for _ in range(draw.randint(5, longest))]
    entry = {'id': f'q{number}', 'question': 'What colour is it?'}
    if draw.random() < impossible:
      entry |= {'answers': [], 'is_impossible': True}
    else:
      words[draw.randrange(len(words))] = colour = draw.choice(COLOURS)
      entry |= {'answers': [{'text': colour, 'answer_start': '  '.join(words).index(colour)}]}
      if impossible:
        entry['is_impossible'] = False
    if not answers:
      entry = {name: entry[name] for name in ('id', 'question')}
    paragraphs.append({'context': '  '.join(words), 'qas': [entry]})
  content = {'version': '2.0' if impossible else '1.1',
             'data': [{'title': 'colours', 'paragraphs': paragraphs}]}
  path.write_text(json.dumps(content), encoding='utf-8')
  return path


def settings_of(home, version, **data):
  config = small.shrink(recipe.get_config(f'version={version}'), home / 'encoder', **data)
  config.data.update({'doc_stride': 6, 'max_query_length': 8, 'max_answer_length': 3})
  config.seq_length, config.seq_lengths = 24, ()
  config.num_epochs = 3
  return config


@pytest.fixture(scope='module')
def home(tmp_path_factory):
  folder = tmp_path_factory.mktemp('home')
  small.make(folder / 'encoder')
  draw = random.Random(0)
  for version, impossible in ((1, 0.0), (2, 0.4)):
    write(folder / f'train{version}.json', draw, 120, impossible)
    write(folder / f'dev{version}.json', draw, 30, impossible)
    write(folder / f'test{version}.json', draw, 9, impossible, answers=False)
  return folder


def trained(home, version):
  config = settings_of(home, version, **{
      name: home / f'{name}{version}.json' for name in ('train', 'dev', 'test')})
  assert squad.fine_tune(config, str(home / f'v{version}')) == 0
  return config, home / f'v{version}'


@pytest.fixture(scope='module')
def first(home):
  """Configuration and workdir of a run on v1.1."""
  return trained(home, 1)


@pytest.fixture(scope='module')
def second(home):
  """Configuration and workdir of a run on v2.0."""
  return trained(home, 2)


def evaluate(config, workdir, capsys, **changes) -> dict:
  capsys.readouterr()
  assert squad.fine_tune(small.changed(config, changes, mode='eval'), str(workdir)) == 0
  return json.loads(capsys.readouterr().out)


def predict(config, workdir, **changes) -> dict[str, dict]:
  """The files that mode=predict writes, as JSON."""
  assert squad.fine_tune(small.changed(config, changes, mode='predict'), str(workdir)) == 0
  return {name: json.loads(content)
          for name, content in small.files(workdir / 'predictions').items()}


def contexts(path) -> dict[str, str]:
  [article] = json.loads(path.read_text(encoding='utf-8'))['data']
  return {entry['id']: paragraph['context'] for paragraph in article['paragraphs']
          for entry in paragraph['qas']}


@pytest.mark.slow
def test_v1_is_learnt_and_eval_gives_the_same(first, capsys):
  config, workdir = first
  scores = small.best_scores(workdir)
  assert scores['f1'] > 80 and scores['f1'] == max(
      record['f1'] for record in small.records(workdir, 'dev'))
  [result] = json.loads((workdir / 'results.json').read_text(encoding='utf-8'))
  assert result['baseline'] == 0 and not result['failed']
  small.assert_close(evaluate(config, workdir, capsys), scores | {'split': 'dev'})


def test_v1_predictions_are_slices_of_the_contexts_in_their_order(home, first):
  found = predict(*first)
  texts = contexts(home / 'test1.json')
  assert list(found['predictions.json']) == list(texts)
  assert all(text and text in texts[name] for name, text in found['predictions.json'].items())
  colours = [name for name, text in found['predictions.json'].items() if text in COLOURS]
  assert len(colours) >= 7
  assert set(found['nbest_predictions.json']) == set(texts)
  assert head_of(first)['version'] == 1 and 'null_threshold' not in head_of(first)


def head_of(run) -> dict:
  return checkpoint.read_metadata(run[1] / 'best')['head']


def test_v2_keeps_its_threshold_and_predicts_with_it(second, capsys, home):
  config, workdir = second
  scores, threshold = small.best_scores(workdir), head_of(second)['null_threshold']
  assert threshold == scores['best_f1_thresh']
  [result] = json.loads((workdir / 'results.json').read_text(encoding='utf-8'))
  assert result['metric'] == 'best_f1' and result['baseline'] < 60 < 75 < result['score']
  printed = evaluate(config, workdir, capsys)
  # With the threshold that was tuned, which in training the scores did not have yet.
  np.testing.assert_allclose(printed['f1'], scores['best_f1'], rtol=1e-6)
  for name in ('best_f1', 'best_exact', 'best_f1_thresh'):
    np.testing.assert_allclose(printed[name], scores[name], rtol=1e-4)
  found = predict(config, workdir)
  odds, predictions = found['null_odds.json'], found['predictions.json']
  assert list(predictions) == list(odds) == list(contexts(home / 'test2.json'))
  for name, text in predictions.items():
    assert (text == '') == (odds[name] > threshold)
  assert 0 < sum(text == '' for text in predictions.values()) < len(predictions)


def test_the_threshold_of_the_checkpoint_decides(second, home, tmp_path):
  config, workdir = second
  metadata = checkpoint.read_metadata(workdir / 'best')
  metadata['head']['null_threshold'] = -1e9
  checkpoint.save_params(tmp_path / 'best', 1, checkpoint.restore_params(workdir / 'best'),
                         metadata, checkpoint.tokenizer_folder(workdir / 'best'))
  assert set(predict(config, tmp_path)['predictions.json'].values()) == {''}


@pytest.mark.parametrize('metric', ['best_exact', 'best_f1', ''])
def test_the_threshold_is_that_of_the_score_that_picks_the_model(home, second, metric):
  config = small.changed(second[0], {'evaluate.metric': metric})
  task = squad.load(settings_lib.from_config(config, squad.SquadData),
                    job.open_origin(str(home / 'encoder')))
  scores = {'best_exact_thresh': 1.0, 'best_f1_thresh': 2.0}
  assert task.learned(scores) == {'null_threshold': scores[f'{metric or "best_f1"}_thresh']}


@pytest.mark.slow
def test_b132_any_batch_size_and_number_of_devices(home, second, capsys, tmp_path):
  config, workdir = second
  dev = write(tmp_path / 'dev.json', random.Random(2), 7, 0.4, longest=26)  # 13 windows
  config = small.changed(config, {'data.dev': str(dev), 'data.test': str(dev)})
  scores, wanted = evaluate(config, workdir, capsys), predict(config, workdir)
  for devices, size in ((1, 1), (1, 5), (2, 13), (8, 8), (8, 64)):
    with small.devices(devices):
      changes = {'evaluate.batch_size': size}
      small.assert_close(evaluate(config, workdir, capsys, **changes), scores)
      found = predict(config, workdir, **changes)
      assert found['predictions.json'] == wanted['predictions.json']
      np.testing.assert_allclose(list(found['null_odds.json'].values()),
                                 list(wanted['null_odds.json'].values()), atol=1e-4)


def test_b133_one_question_has_one_answer(first, tmp_path):
  one = write(tmp_path / 'one.json', random.Random(3), 1, answers=False)
  found = predict(*first, **{'data.test': str(one)})
  assert list(found['predictions.json']) == ['q0'] and found['predictions.json']['q0']


def test_b109_questions_without_answers_are_not_scored(first, home):
  config, workdir = first
  before = small.files(workdir)
  with pytest.raises(errors.EXPECTED, match=r'no labels.*mode=predict'):
    squad.fine_tune(small.changed(config, {'data.dev': str(home / 'test1.json')}, mode='eval'),
                    str(workdir))
  assert small.files(workdir) == before


def damaged(path, change):
  content = json.loads(path.read_text(encoding='utf-8'))
  change(content['data'][0]['paragraphs'][3])
  return json.dumps(content).encode()


def wrong_start(paragraph):
  paragraph['qas'][0]['answers'][0] |= {'text': 'yellow', 'answer_start': 1}


def no_context(paragraph):
  del paragraph['context']


@pytest.mark.parametrize('make, wanted', [
    (lambda path: b'\x89PNG\r\n\x1a\n\x00\xff', r'bad.json: not UTF-8'),
    (lambda path: path.read_bytes()[:-40], r'bad.json, line 1, column \d+: not JSON'),
    (lambda path: damaged(path, no_context), r'bad.json: data\[0\].paragraphs\[3\]: no "context"'),
    (lambda path: damaged(path, wrong_start), r'bad.json: .*1 questions.*\(q3\)'),
])
def test_hostile_files_are_refused_and_leave_nothing(home, tmp_path, make, wanted):
  (tmp_path / 'bad.json').write_bytes(make(home / 'train1.json'))
  config = settings_of(home, 1, train=tmp_path / 'bad.json', strict=True)
  with pytest.raises(errors.EXPECTED, match=wanted):
    squad.fine_tune(config, str(tmp_path / 'run'))
  assert not (tmp_path / 'run').exists()


def test_versions_and_settings_that_cannot_be(home, first, second, tmp_path):
  with pytest.raises(errors.EXPECTED, match='version=2'):
    squad.fine_tune(settings_of(home, 1, train=home / 'train2.json'), str(tmp_path / 'run'))
  with pytest.raises(errors.EXPECTED, match=r'set data.version=2 .now 1'):
    squad.fine_tune(small.changed(second[0], {'data.version': 1}, mode='predict'), str(second[1]))
  with pytest.raises(errors.EXPECTED, match=r'data.version is 3'):
    squad.fine_tune(settings_of(home, 3), str(tmp_path / 'run'))
  with pytest.raises(errors.EXPECTED, match='stride'):
    squad.fine_tune(small.changed(first[0], {'data.doc_stride': 0}), str(tmp_path / 'run'))
  with pytest.raises(errors.EXPECTED, match=r'evaluate.metric.*exact_mach'):
    squad.fine_tune(small.changed(first[0], {'evaluate.metric': 'exact_mach'}),
                    str(tmp_path / 'run'))
  with pytest.raises(errors.EXPECTED, match='fine-tune it first'):
    squad.fine_tune(small.changed(first[0], mode='predict'), str(tmp_path / 'run'))
  assert not (tmp_path / 'run').exists()
