"""The best model of a run: which it is, when training may end, and what a kill leaves."""

import json

import numpy as np
import pytest
from etils import epath

from bertjax import best, checkpoint, step_folder

METADATA = {'config': {'model': {}}, 'head': {'kind': 'classification', 'labels': ['no', 'yes']}}


def keeper(workdir, metric='accuracy', every=10, patience=0, learned=lambda scores: {}):
  tokenizer = epath.Path(workdir) / 'tokenizer'
  tokenizer.mkdir(parents=True, exist_ok=True)
  (tokenizer / 'vocab.txt').write_text('[PAD]\n', encoding='utf-8')
  return best.Keeper(epath.Path(workdir), metric, every, patience, METADATA, tokenizer, learned)


def weights(step):
  return {'bert': {'kernel': np.full((2, 2), step, np.float32)}}


def judge(kept, *steps_and_scores):
  """Whether training may end, at each evaluation."""
  return [kept.judge(step, weights(step), {kept.metric: score, 'other': 0.5})
          for step, score in steps_and_scores]


def kept_step(workdir):
  """The step of the best model, by its metadata and by its weights."""
  step = best.read(workdir)['step']
  assert (checkpoint.restore_params(best.find(workdir))['bert']['kernel'] == step).all()
  assert list(step_folder.steps(best.find(workdir) / 'checkpoints')) == [step]
  return step


@pytest.mark.parametrize(('metric', 'score', 'than', 'better'), [
    ('accuracy', 0.7, 0.6, True), ('accuracy', 0.6, 0.6, False), ('accuracy', 0.5, 0.6, False),
    ('loss', 0.5, 0.6, True), ('loss', 0.6, 0.6, False), ('loss', 0.7, 0.6, False),
    ('dev_mismatched/loss', 0.5, 0.6, True), ('matthews', -0.1, -0.2, True),
    ('pearson', None, 0.6, False), ('pearson', -0.9, None, True), ('pearson', None, None, False),
    ('accuracy', 0.0, None, True)])
def test_higher_is_better_but_for_a_loss_and_undefined_is_worst(metric, score, than, better):
  assert best.is_better(metric, score, than) is better


def test_what_a_run_without_checkpoint_left_is_forgotten(tmp_path):
  """Else another configuration in the same workdir would end with the old run's model."""
  kept = keeper(tmp_path)
  kept.forget()  # nothing there
  judge(kept, (10, 0.9))
  keeper(tmp_path).forget()
  assert best.find(tmp_path) is None
  judge(kept, (10, 0.3))
  assert best.read(tmp_path)['scores']['accuracy'] == 0.3


def test_the_best_is_kept_with_its_scores_and_its_tokenizer(tmp_path):
  kept = keeper(tmp_path, learned=lambda scores: {'null_threshold': scores['accuracy'] - 1})
  assert best.read(tmp_path) is None and best.find(tmp_path) is None
  judge(kept, (10, 0.5), (20, 0.75), (30, 0.75), (40, 0.6))
  assert kept_step(tmp_path) == 20
  stored = best.read(tmp_path)
  assert stored['scores'] == {'accuracy': 0.75, 'other': 0.5} and stored['metric'] == 'accuracy'
  # What was learned on dev is that of the model that is kept.
  assert stored['head'] == METADATA['head'] | {'null_threshold': -0.25}
  files = checkpoint.tokenizer_folder(best.find(tmp_path))
  assert (files / 'vocab.txt').read_text(encoding='utf-8') == '[PAD]\n'
  assert METADATA['head'] == {'kind': 'classification', 'labels': ['no', 'yes']}  # as it was


def test_of_several_runs_the_best_is_found_but_only_where_they_are(tmp_path):
  """What load, export and init_from take after a sweep; a run itself knows its own best only."""
  for name, score in (('low', 0.4), ('high', 0.8)):
    judge(keeper(tmp_path / name), (10, score))
  records = [{'folder': name, 'metric': 'accuracy', 'score': score}
             for name, score in (('low', 0.4), ('high', 0.8), ('diverged', None))]
  (tmp_path / best.RESULTS).write_text(json.dumps(records), encoding='utf-8')
  assert best.find(tmp_path) == epath.Path(tmp_path / 'high/best')
  assert best.read(tmp_path) is None
  judge(keeper(tmp_path), (10, 0.1))  # a run of its own in the same folder
  assert best.find(tmp_path) == epath.Path(tmp_path / 'best')
  (tmp_path / 'low/checkpoints').mkdir()
  (tmp_path / 'low/best').rename(tmp_path / 'low/gone')
  (tmp_path / 'low' / best.RESULTS).write_text(json.dumps(records), encoding='utf-8')
  assert best.find(tmp_path / 'low') is None  # its own checkpoints come first


@pytest.mark.parametrize('text', [
    '{"accuracy": 0.9}', '[1, 2]', '[{"folder": "a", "score": 1}]', 'no JSON', '[]'])
def test_results_of_somebody_else_say_nothing(tmp_path, text):
  (tmp_path / best.RESULTS).write_text(text, encoding='utf-8')
  assert best.find(tmp_path) is None


def test_all_processes_go_by_what_process_0_finds(tmp_path, monkeypatch):
  """Another may see an older disk, and would wait for ever in a save that is not made."""
  said = []
  monkeypatch.setattr(best.hosts, 'agreed', lambda value: said.append(value) or said_by_0.pop(0))
  monkeypatch.setattr(best.jax, 'process_index', lambda: 1)
  monkeypatch.setattr(best, 'read', lambda workdir: pytest.fail('process 1 looked itself'))
  kept, saved = keeper(tmp_path, patience=2), []
  monkeypatch.setattr(best.checkpoint, 'save_params', lambda *args: saved.append(args[1]))
  said_by_0 = [True, False, 10, False, 10]
  assert judge(kept, (10, 0.5), (20, 0.9), (30, 0.9)) == [False, False, True]
  assert saved == [10] and not (tmp_path / 'best').exists()
  said_by_0 = [True]
  assert kept.is_over(30)


def test_of_losses_the_lowest_is_kept(tmp_path):
  judge(keeper(tmp_path, 'loss'), (10, 0.9), (20, 0.4), (30, 0.5))
  assert kept_step(tmp_path) == 20


def test_an_undefined_score_is_kept_until_there_is_another(tmp_path):
  kept = keeper(tmp_path, 'pearson')
  judge(kept, (10, None), (20, None))
  assert kept_step(tmp_path) == 10
  judge(kept, (30, -0.5), (40, None))
  assert kept_step(tmp_path) == 30


def test_patience_counts_evaluations_without_a_better_score(tmp_path):
  kept = keeper(tmp_path, patience=2)
  assert judge(kept, (10, 0.5), (20, 0.4), (30, 0.6), (40, 0.6)) == [False] * 4
  assert judge(kept, (50, 0.1)) == [True]
  assert kept.is_over(50)
  # What a rerun asks: nothing but the disk says so.
  assert keeper(tmp_path, patience=2).is_over(50)
  assert not any(keeper(tmp_path, patience=2).is_over(step) for step in (30, 40, 60))


def test_without_patience_training_never_ends_early(tmp_path):
  kept = keeper(tmp_path)
  assert not any(judge(kept, (10, 0.9), *((step, 0.1) for step in range(20, 200, 10))))
  assert not kept.is_over(190)


def test_a_run_stopped_before_its_evaluation_is_not_over(tmp_path):
  """A signal may cut the evaluation at step 30 short; its score, unknown yet, may be the best."""
  judge(keeper(tmp_path, patience=2), (10, 0.5), (20, 0.4))
  resumed = keeper(tmp_path, patience=2)
  assert not resumed.is_over(30)
  assert judge(resumed, (30, 0.8), (40, 0.7), (50, 0.7)) == [False, False, True]
  assert kept_step(tmp_path) == 30


def test_resumed_at_an_earlier_step_it_ends_as_a_run_that_was_never_killed(tmp_path):
  scores = [(10, 0.5), (20, 0.6), (30, 0.9), (40, 0.7), (50, 0.8)]
  straight = judge(keeper(tmp_path, patience=2), *scores)
  assert straight == [False] * 4 + [True] and kept_step(tmp_path) == 30
  # Killed after the model of step 30 was kept, with a checkpoint of step 10 only.
  judge(keeper(tmp_path / 'killed', patience=2), *scores[:3])
  resumed = keeper(tmp_path / 'killed', patience=2)
  assert judge(resumed, *scores[1:3]) == [False, False]
  assert kept_step(tmp_path / 'killed') == 30
  assert judge(resumed, *scores[3:]) == straight[3:]
  assert kept_step(tmp_path / 'killed') == 30


@pytest.mark.parametrize('left', ['checkpoints/10.orbax-checkpoint-tmp-0/state', 'checkpoints/10',
                                  'checkpoints', ''])
def test_a_kill_in_the_first_save_does_not_end_the_run_for_good(tmp_path, left):
  (tmp_path / 'best' / left).mkdir(parents=True)
  assert best.find(tmp_path) is None and best.read(tmp_path) is None
  kept = keeper(tmp_path, patience=1)
  assert not kept.is_over(10)
  assert judge(kept, (10, 0.5), (20, 0.4)) == [False, True]
  assert kept_step(tmp_path) == 10
