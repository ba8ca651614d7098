"""Fine-tunes on SQuAD v1.1 or v2.0, or files in its form.

  python -m bertjax.finetune.squad --config=configs/finetune/squad.py:version=2 \
      --config.init_from=ckpt/ --config.data.train=train-v2.0.json \
      --config.data.dev=dev-v2.0.json --workdir=runs/squad2

For v2.0 the threshold on the null odds is tuned on dev and kept with the best model;
`--config.mode=predict --config.data.test=FILE` answers with it.
"""

import dataclasses

from etils import epath

from bertjax import command
from bertjax.config import ConfigError
from bertjax.data import squad, squad_windows
from bertjax.evals import squad_answers, squad_scores
from bertjax.finetune import run as run_lib
from bertjax.finetune import settings as settings_lib
from bertjax.finetune.job import Origin
from bertjax.finetune.settings import Settings
from bertjax.finetune.task import Split, Task, asked_file


@dataclasses.dataclass(frozen=True)
class SquadData:
  """The data and how long texts are cut into windows and answers chosen.

  Attributes:
    version: 1, or 2 for questions that may have no answer.
    train, dev, test: JSON files in SQuAD's form.
    doc_stride: tokens from one window to the next.
    max_query_length: longer questions are cut.
    n_best_size: answers kept of each question.
    max_answer_length: tokens of an answer at most.
    max_train_questions: train on the first so many only; 0: all.
    strict: stop at an answer that does not stand where the file says.
  """

  version: int
  train: str = ''
  dev: str = ''
  test: str = ''
  doc_stride: int = 128
  max_query_length: int = 64
  n_best_size: int = 20
  max_answer_length: int = 30
  max_train_questions: int = 0
  strict: bool = False

  def __post_init__(self):
    if self.max_train_questions < 0:
      raise ConfigError(f'data.max_train_questions is {self.max_train_questions}; 0 takes all')
    if self.version not in (1, 2):
      raise ConfigError(f'data.version is {self.version}; it must be 1 (SQuAD v1.1) or 2 (v2.0)')


def load(settings: Settings, origin: Origin) -> Task:
  """The task with what its mode needs: train and dev, dev, or what is to be predicted."""
  data, mode = settings.data, settings.mode
  if mode != 'train' and origin.head.get('version', data.version) != data.version:
    raise ConfigError(f'{origin.path} was trained on version {origin.head["version"]}: set '
                      f'data.version={origin.head["version"]} (now {data.version})')
  threshold = float(origin.head.get('null_threshold', 0.0)) if mode != 'train' else 0.0

  def windows(questions, training):
    return squad_windows.windows(
        questions, origin.tokenizer, settings.seq_length, data.doc_stride, data.max_query_length,
        training)

  def split(name: str, path: str) -> tuple[Split, tuple[squad.Question, ...]]:
    questions = squad.read(path, data.version)
    made = windows(questions, False)
    answers = lambda outputs: squad_answers.answers(
        made, questions, outputs, data.version, data.n_best_size, data.max_answer_length,
        threshold)

    def write(outputs, folder: epath.Path) -> list[epath.Path]:
      squad_answers.write(answers(outputs), folder)
      return [folder / 'predictions.json']

    labelled = any(question.answers or question.is_impossible for question in questions)
    score = lambda outputs: _scores(questions, answers(outputs), data.version, threshold)
    return Split(name, made.examples, score if labelled else None, write), questions

  asked = asked_file(data, mode)
  found = (split(*asked),) if asked else ()
  train, baseline = None, {}
  if mode == 'train':
    if not data.train:
      raise ConfigError('no training data: set data.train to a JSON file in SQuAD form')
    questions = squad.read(data.train, data.version, training=True, strict=data.strict)
    train = windows(questions[:data.max_train_questions or None], True).examples
  if found and found[0][0].scores is not None and mode != 'predict':
    baseline = _baseline(found[0][1], data.version)
  facts = {'version': data.version, 'max_length': settings.seq_length,
           **{name: getattr(data, name) for name in (
               'doc_stride', 'max_query_length', 'n_best_size', 'max_answer_length')}}
  # The threshold that gave the score by which the model was chosen.
  tuned = 'best_exact' if settings.evaluate.metric == 'best_exact' else 'best_f1'
  learned = lambda scores: (
      {'null_threshold': scores[f'{tuned}_thresh']} if data.version == 2 else {})
  metric = 'f1' if data.version == 1 else 'best_f1'
  splits = tuple(one for one, _ in found)
  return Task(f'squad v{data.version}', 'span', (), metric, train, splits, baseline, facts, learned)


def _scores(questions, found: squad_answers.Answers, version: int, threshold: float):
  """The official numbers but for counts; for v2.0 also the best score over all thresholds."""
  if version == 1:
    scores = squad_scores.scores(questions, found.predictions, 1)
  else:
    scores = squad_scores.scores(questions, found.texts, 2, found.null_odds, threshold)
  return {name: value for name, value in scores.items() if isinstance(value, float)}


def _baseline(questions, version: int) -> dict[str, float]:
  """Of never answering, whose odds are the same for all; the names are those that pick the best."""
  ids = [question.id for question in questions]
  odds = dict.fromkeys(ids, 0.0) if version == 2 else None
  scores = squad_scores.scores(questions, dict.fromkeys(ids, ''), version, odds)
  return {name: value for name, value in scores.items()
          if isinstance(value, float) and not name.endswith('_thresh')}


def fine_tune(config, workdir: str) -> int:
  """What `--config.mode` says; returns the exit code."""
  return run_lib.run(settings_lib.from_config(config, SquadData), workdir, load)


if __name__ == '__main__':
  command.run(fine_tune)
