"""Fine-tunes on a GLUE task, or on a person's own texts with labels.

  python -m bertjax.finetune.glue --config=configs/finetune/glue.py:task=rte \
      --config.init_from=ckpt/ --config.data.path=glue_data/ --workdir=runs/rte

`--config.mode=predict` on the same workdir writes submission files of the test splits (or of
`--config.data.test`), `--config.mode=eval` prints the scores on dev.
"""

import dataclasses

from absl import logging
from etils import epath

from bertjax import command, hosts
from bertjax.config import ConfigError
from bertjax.data import custom, glue, glue_tasks
from bertjax.data import rows as rows_lib
from bertjax.data.rows import Rows
from bertjax.evals import scores as scores_lib
from bertjax.finetune import run as run_lib
from bertjax.finetune import settings as settings_lib
from bertjax.finetune.job import Origin, need_kind
from bertjax.finetune.settings import Settings
from bertjax.finetune.task import CUSTOM, Split, Task, asked_file


@dataclasses.dataclass(frozen=True)
class GlueData:
  """The data of a task.

  Attributes:
    task: 'rte', 'mnli', ..., or 'custom' for files of one's own.
    path: GLUE: the folder with the official files, or 'tfds:glue/rte'.
    train, dev, test: single files; they take the place of those in `path`. For 'custom' there are
      only these: .tsv, .csv or .jsonl.
    kind: custom: 'classification', 'multi_label' or 'regression'.
    text_a, text_b, label, index: custom: the columns; text_b '' where there is one text, index ''
      where rows are counted; only files to predict need it.
    separator: custom: between the labels of a multi-label field.
    labels: custom: label names in the order of the outputs; () takes those of the training file.
    max_train_rows: train on the first so many rows only; 0: all.
    strict: stop at a line with the wrong number of columns instead of skipping it; GLUE's test
      files always do.
  """

  task: str
  path: str = ''
  train: str = ''
  dev: str = ''
  test: str = ''
  kind: str = 'classification'
  text_a: str = 'text'
  text_b: str = ''
  label: str = 'label'
  index: str = ''
  separator: str = ','
  labels: tuple[str, ...] = ()
  max_train_rows: int = 0
  strict: bool = False

  def __post_init__(self):
    if self.max_train_rows < 0:
      raise ConfigError(f'data.max_train_rows is {self.max_train_rows}; 0 takes all')
    if len(self.labels) == 1 and ',' in self.labels[0]:  # how --config.data.labels=a,b arrives
      object.__setattr__(self, 'labels', tuple(self.labels[0].split(',')))


def load(settings: Settings, origin: Origin) -> Task:
  """The task with what its mode needs: train and dev, dev, or what is to be predicted."""
  if settings.data.task == CUSTOM:
    return _load_custom(settings, origin)
  return _load_glue(settings, origin)


def _load_glue(settings: Settings, origin: Origin) -> Task:
  data, mode = settings.data, settings.mode
  spec = glue_tasks.find_task(data.task)
  stored = _known_labels(origin, spec.kind, spec.labels, mode)
  encode = lambda rows: rows_lib.encode(rows, origin.tokenizer, settings.seq_length)

  def split(name: str, path: str, submitted: str = '') -> tuple[Split, Rows]:
    rows = glue.read(data.task, path, name, data.strict)
    ordered = lambda outputs: _in_order(outputs, stored, spec.labels)
    score = None if rows.labels is None else (
        lambda outputs: glue.scores(data.task, ordered(outputs), rows.labels))
    return Split(
        name, encode(_with_labels_of(rows, spec.labels, stored)), score,
        lambda outputs, folder: [glue.write_submission(
            data.task, submitted or name, rows, ordered(outputs), folder)]), rows

  single = data.test if mode == 'predict' else data.dev
  if single and mode == 'predict':
    # Its name says which split it is. A file of one's own is read as a test file, and its
    # predictions must not take the place of a submission.
    name = glue_tasks.find_split(data.task, single)
    found = (split(name or 'test', single, name or f'file-{epath.Path(single).stem}'),)
  elif single:
    found = (split(spec.dev_splits[0], single),)
  elif data.path:
    names = spec.dev_splits
    if mode == 'predict':
      names = glue.predicted_splits(data.task, data.path)
      # Each split is work for all processes together.
      if hosts.agreed(len(names)) != len(names):
        raise ConfigError(f'{data.path}: process 0 finds other splits to predict there; give all '
                          'processes the same files')
    found = tuple(split(name, data.path) for name in names)
  else:
    found = ()
  splits = tuple(one for one, _ in found)
  train, baseline = None, {}
  if mode == 'train':
    if not (data.train or data.path):
      raise ConfigError('no data: set data.path to the folder of the official files (or '
                        f'tfds:glue/{data.task}), or data.train and data.dev to files')
    rows = _first(glue.read(data.task, data.train or data.path, 'train', data.strict),
                  data.max_train_rows)
    train = encode(_with_labels_of(rows, spec.labels, stored))
  if splits and mode != 'predict':
    baseline = scores_lib.majority(spec.kind, spec.metrics, found[0][1].need_labels())
  return Task(spec.folder, spec.kind, stored, spec.metrics[0], train, splits, baseline)


def _load_custom(settings: Settings, origin: Origin) -> Task:
  data, mode = settings.data, settings.mode
  index = data.index if mode == 'predict' else ''  # predictions have ids, and nothing else has
  spec = custom.Task(data.kind, data.text_a, data.text_b or None, data.label, index or None,
                     data.separator, tuple(data.labels))
  if mode == 'train':
    if not data.train:
      raise ConfigError('task=custom: set data.train to a .tsv, .csv or .jsonl file')
    spec = custom.find_labels(spec, data.train, data.strict)
    spec = dataclasses.replace(
        spec, labels=_known_labels(origin, spec.kind, spec.labels, mode))
  else:  # the names are those of the model
    need_kind(origin, spec.kind)
    spec = dataclasses.replace(spec, labels=tuple(origin.head.get('labels', ())))
  encode = lambda rows: rows_lib.encode(rows, origin.tokenizer, settings.seq_length)

  def split(name: str, path: str) -> tuple[Split, Rows]:
    rows = custom.read(spec, path, name, data.strict)
    score = None if rows.labels is None else (
        lambda outputs: custom.scores(spec, outputs, rows.labels))
    suffix = '.jsonl' if path.endswith(('.jsonl', '.json')) else '.tsv'
    return Split(
        name, encode(rows), score,
        lambda outputs, folder: [custom.write_predictions(
            spec, rows, outputs, folder / f'{epath.Path(path).stem}{suffix}')]), rows

  asked = asked_file(data, mode)
  found = (split(*asked),) if asked else ()
  splits = tuple(one for one, _ in found)
  train, baseline = None, {}
  if mode == 'train':
    train = encode(_first(custom.read(spec, data.train, 'train', data.strict),
                          data.max_train_rows))
  if splits and mode != 'predict':
    baseline = scores_lib.majority(spec.kind, spec.metrics, found[0][1].need_labels())
  return Task(CUSTOM, spec.kind, spec.labels, spec.metrics[0], train, splits, baseline)


# --- Labels go by name, never by number ---------------------------------------------------------


def _known_labels(
    origin: Origin, kind: str, labels: tuple[str, ...], mode: str
) -> tuple[str, ...]:
  """The labels in the order of the checkpoint's head if it has just these, else as given."""
  stored = tuple(origin.head.get('labels', ()))
  if origin.head['kind'] != kind or not stored or not labels:
    return labels
  try:
    rows_lib.label_order(stored, labels)
  except rows_lib.RowsError as error:
    if mode == 'train':
      logging.warning('The head of %s is replaced: %s', origin.path, error)
    return labels
  return stored


def _in_order(outputs, stored: tuple[str, ...], wanted: tuple[str, ...]):
  return outputs[:, rows_lib.label_order(stored, wanted)] if wanted else outputs


def _with_labels_of(rows, wanted: tuple[str, ...], stored: tuple[str, ...]):
  """The rows with class numbers in the order of the head."""
  if rows.labels is None or not wanted:
    return rows
  return dataclasses.replace(
      rows, labels=rows_lib.label_order(stored, wanted)[rows.labels].astype(rows.labels.dtype))


def _first(rows: Rows, limit: int) -> Rows:
  if not limit or limit >= len(rows):
    return rows
  return dataclasses.replace(
      rows, ids=rows.ids[:limit], text_a=rows.text_a[:limit],
      text_b=None if rows.text_b is None else rows.text_b[:limit],
      labels=None if rows.labels is None else rows.labels[:limit])


def fine_tune(config, workdir: str) -> int:
  """What `--config.mode` says; returns the exit code."""
  return run_lib.run(settings_lib.from_config(config, GlueData), workdir, load)


if __name__ == '__main__':
  command.run(fine_tune)
