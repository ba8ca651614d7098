"""A person's own data: one or two texts and a label, from TSV, CSV or JSON lines.

    task = custom.Task('classification', text_a='review', label='mood')
    task = custom.find_labels(task, 'train.tsv')           # names are those of the training file
    rows = custom.read(task, 'dev.tsv', 'dev')
    custom.write_predictions(task, rows, outputs, 'predictions.jsonl')

The name of a file says how it is read: .jsonl and .json are an object a line, .csv is real CSV, and
anything else TSV with a header and, like GLUE's, without quoting.

Labels: `classification` has one name, `multi_label` any number of them (a list in JSON lines, names
with a separator between them in TSV and CSV), `regression` a number, in JSON lines also as a
string. The kind decides, not what is found (B111): a label of another kind stops the reading. An
absent or empty label is no label, but for `multi_label` an empty one means that none applies. Case
counts only where names differ in nothing else. What stands for a label in rows that are only to be
predicted ('?', -1) stops nothing.
"""

import csv
import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from etils import epath
from jaxtyping import Float, Float64, Shaped

from bertjax.data import encoding, text_file
from bertjax.data import rows as rows_lib
from bertjax.data.rows import Row, Rows, RowsError
from bertjax.evals import scores as scores_lib

__all__ = [
    'Rows', 'Task', 'find_labels', 'probabilities', 'read', 'scores', 'write_predictions',
]  # fmt: skip

_METRICS = {
    'classification': ('accuracy', 'macro_f1'),
    'multi_label': ('micro_f1', 'macro_f1', 'accuracy'),
    'regression': ('pearson', 'spearman'),
}
Record = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Task:
  """What the columns of a person's files mean.

  Attributes:
    kind: 'classification', 'multi_label' or 'regression'.
    text_a: the column (key) of the first or only text.
    text_b: that of the second text, None where there is none.
    label: that of the label.
    index: that of the ids in the predictions; None: the rows are counted from 0.
    separator: between the names of a multi-label field of TSV or CSV.
    labels: label names in the order of the outputs; () until they are found.
  """

  kind: str = 'classification'
  text_a: str = 'text'
  text_b: str | None = None
  label: str = 'label'
  index: str | None = None
  separator: str = ','
  labels: tuple[str, ...] = ()

  def __post_init__(self):
    if self.kind not in _METRICS:
      raise RowsError(f'kind {self.kind!r} is none of {", ".join(_METRICS)}')
    if len(set(self.labels)) != len(self.labels):
      raise RowsError(f'labels {", ".join(self.labels)}: one is there twice')
    if self.kind == 'multi_label' and not self.separator:
      raise RowsError("separator is empty; give what stands between two labels, e.g. ','")

  @property
  def num_outputs(self) -> int:
    """Outputs of the head: one for each label, or the one number."""
    return 1 if self.kind == 'regression' else len(self.labels)

  @property
  def metrics(self) -> tuple[str, ...]:
    """Names of the scores; the first picks the best checkpoint."""
    return _METRICS[self.kind]


def find_labels(task: Task, path: epath.PathLike, strict: bool = False) -> Task:
  """The task with the label names of a training file, sorted; given names stay as they are.

  Raises:
    RowsError: as `read`; also fewer than two classes.
  """
  if task.kind == 'regression' or task.labels:
    return task
  names, columns = set(), []
  for line, record in _records(task, path, strict, []):
    columns = columns or list(record)
    names.update(_names(task, record.get(task.label), f'{path}, line {line}') or ())
  fewest = 1 if task.kind == 'multi_label' else 2
  if len(names) < fewest:
    raise RowsError(
        f'{path}: {len(names)} different labels in {task.label!r}, {fewest} are the fewest; the'
        f' columns are {", ".join(columns)}: name the right one (data.label), or give the labels'
        ' (data.labels)'
    )
  return dataclasses.replace(task, labels=tuple(sorted(names)))


def read(task: Task, path: epath.PathLike, split: str, strict: bool = False) -> Rows:
  """Reads a file.

  Args:
    task: its columns, and for labelled rows its label names.
    path: .jsonl, .json, .csv, or TSV.
    split: 'train' or 'dev': rows without a label are left out; anything else, e.g. 'test': all rows
      stay, and `labels` is None unless each has one that the task knows. One warning names the
      first that it does not know.
    strict: stop at a line of TSV or CSV with the wrong number of columns, instead of skipping it.

  Raises:
    RowsError: no such file, a binary or empty one, a missing column, a line that is not JSON, a
      text that is no text; in 'train' and 'dev' a label of another kind or of an unknown name.
  """
  skipped: list[int] = []
  unknown: list[tuple[str, Any]] = []
  labelled = split.startswith(('train', 'dev'))

  def label(record: Record, where: str) -> int | float | list[float] | None:
    value = record.get(task.label)
    return rows_lib.label_or_none(
        lambda: _label(task, value, where), labelled, unknown, where, value)

  def rows() -> Iterator[Row]:
    for count, (line, record) in enumerate(_records(task, path, strict, skipped)):
      where = f'{path}, line {line}'
      yield Row(
          line,
          # Bad lines count, so that the numbers are those of the file's rows.
          str(count + len(skipped)) if task.index is None else _id(record, task.index, where),
          _text(record, task.text_a, where),
          None if task.text_b is None else _text(record, task.text_b, where),
          label(record, where),
      )

  found = rows_lib.collect(rows(), task.kind, labelled, str(path), skipped)
  text_file.tell_placeholders(unknown)
  return found


# --- Formats ---------------------------------------------------------------------------------


def _records(
    task: Task, path: epath.PathLike, strict: bool, skipped: list[int]
) -> Iterator[tuple[int, Record]]:
  """(line number, record) of each row; numbers of bad lines go into `skipped`."""
  file = epath.Path(path)
  if file.suffix.lower() in ('.jsonl', '.json'):
    yield from _json_records(file)
    return
  lines = _csv_lines(file) if file.suffix.lower() == '.csv' else _tsv_lines(file)
  first, columns = next(lines)
  wanted = [name for name in (task.text_a, task.text_b, task.index) if name is not None]
  missing = [name for name in wanted if name not in columns]
  if missing:
    raise RowsError(
        f'{file}, line {first}: no column {", ".join(missing)}; there are {", ".join(columns)}:'
        ' name one of them, or put a header line at the top'
    )
  twice = {name for name in columns if columns.count(name) > 1}
  if twice & {task.text_a, task.text_b, task.index, task.label}:
    raise RowsError(f'{file}, line {first}: column {min(twice)} is there twice; rename one')
  for line, fields in lines:
    if len(fields) == len(columns):
      yield line, dict(zip(columns, fields, strict=True))
    else:
      skipped.append(rows_lib.bad_line(str(file), line, len(fields), len(columns), strict))


def _json_records(file: epath.Path) -> Iterator[tuple[int, Record]]:
  for line, text in enumerate(rows_lib.read_lines(file), 1):
    if not text.strip():
      continue
    try:
      record = json.loads(text)
    except (ValueError, RecursionError) as error:
      raise RowsError(
          f'{file}, line {line}: not JSON: {error}; one object a line is wanted, and the last line'
          ' may be cut off'
      ) from error
    if not isinstance(record, dict):
      raise RowsError(f'{file}, line {line}: not a JSON object, as {{"text": ..., "label": ...}}')
    yield line, record


def _tsv_lines(file: epath.Path) -> Iterator[tuple[int, list[str]]]:
  for line, text in enumerate(rows_lib.read_lines(file), 1):
    yield line, text.split('\t')


def _csv_lines(file: epath.Path) -> Iterator[tuple[int, list[str]]]:
  """(line, fields); a record may run over several lines, and is known by its first."""
  reader = text_file.csv_reader(rows_lib.read_text(file))
  line = 1
  try:
    for fields in reader:
      if fields:  # An empty line is no record.
        yield line, fields
      line = reader.line_num + 1
  except csv.Error as error:
    raise RowsError(
        f'{file}, line {line}: not CSV: {error}; write a quotation mark in a quoted field twice, or'
        ' name the file .tsv if nothing is quoted'
    ) from error


# --- Fields ----------------------------------------------------------------------------------


def _text(record: Record, key: str, where: str) -> str:
  if not isinstance(record.get(key), str):
    found = f'is {record[key]!r}' if key in record else f'is missing among {", ".join(record)}'
    raise RowsError(f'{where}: the text {key!r} {found:.200}; a string is wanted')
  return record[key]


def _id(record: Record, key: str, where: str) -> str:
  if isinstance(record.get(key), bool) or not isinstance(record.get(key), (str, int)):
    raise RowsError(f'{where}: the index {key!r} is {record.get(key)!r}; a name or an integer is'
                    ' wanted')
  return str(record[key])


def _label(task: Task, value: Any, where: str) -> int | float | list[float] | None:
  """As rows.Row holds it; None where there is none."""
  if task.kind == 'regression':
    return _number(value, where)
  names = _names(task, value, where)
  if names is None:
    return None
  places = [_place(task.labels, name) for name in names]
  if None in places:
    unknown = names[places.index(None)]
    known = ', '.join(task.labels) or 'none yet: find them in a training file'
    raise RowsError(f'{where}: unknown label {unknown!r}; known: {known}; mend the line, or name'
                    ' all labels in data.labels and train')
  if task.kind == 'classification':
    return places[0]
  return [float(place in places) for place in range(len(task.labels))]


def _place(labels: tuple[str, ...], name: str) -> int | None:
  """Where a label is; in another case if there is just one such, as in rows.label_order."""
  if name in labels:
    return labels.index(name)
  folded = [label.casefold() for label in labels]
  return folded.index(name.casefold()) if folded.count(name.casefold()) == 1 else None


def _number(value: Any, where: str) -> float | None:
  if value is None or value == '':
    return None
  try:
    if isinstance(value, bool):
      raise ValueError(value)
    return rows_lib.number(str(value))
  except ValueError as error:
    raise RowsError(f'{where}: label {value!r} is not a number, as regression needs; mend the line,'
                    ' or set kind to classification') from error


def _names(task: Task, value: Any, where: str) -> list[str] | None:
  """The label names of a row, without looking whether they are known."""
  if value is None:
    return None
  value = value.strip() if isinstance(value, str) else value
  if task.kind == 'classification':
    return [_name(value, where)] if value != '' else None
  if isinstance(value, str):
    parts = (part.strip() for part in value.split(task.separator))
    return [part for part in parts if part]
  if isinstance(value, list):
    return [_name(part, where) for part in value]
  raise RowsError(f'{where}: label {value!r} is neither a list nor a string of names')


def _name(value: Any, where: str) -> str:
  if isinstance(value, bool):
    return str(value).lower()  # as JSON spells it
  if not isinstance(value, (str, int)):
    raise RowsError(
        f'{where}: label {value!r} is not a name; write it as a string, or set kind to'
        ' multi_label for a list, to regression for a number'
    )
  return str(value)


# --- Scores and predictions ------------------------------------------------------------------


def scores(
    task: Task, outputs: Float[np.ndarray, 'N C'], labels: Shaped[np.ndarray, 'N ...']
) -> dict[str, float | None]:
  """The scores in `task.metrics`; an undefined correlation is None.

  Raises:
    ValueError: outputs and labels that do not fit.
  """
  return scores_lib.compute(task.kind, task.metrics, outputs, labels)


def probabilities(
    kind: str, outputs: Float[np.ndarray, 'N C']
) -> Float64[np.ndarray, 'N C'] | None:
  """Of each label; over the labels they sum to 1 for classification. None for regression."""
  outputs = outputs.astype(np.float64)
  if kind == 'regression':
    return None
  if kind == 'multi_label':
    return 0.5 * (1 + np.tanh(outputs / 2))  # the logistic function, without overflow
  powers = np.exp(outputs - outputs.max(axis=1, keepdims=True))
  return powers / powers.sum(axis=1, keepdims=True)


def write_predictions(
    task: Task, rows: Rows, outputs: Float[np.ndarray, 'N C'], path: epath.PathLike
) -> epath.Path:
  """Writes id, prediction and the probability of each label for each row, in file order.

  Args:
    task: with its label names.
    rows: the rows predicted.
    outputs: logits in the order of task.labels, or the predicted number [N, 1].
    path: .jsonl, or .tsv. The file is there whole or not at all.

  Raises:
    RowsError: another name, outputs that are not those of the rows, a name TSV cannot hold.
  """
  path = epath.Path(path)
  formats: dict[str, Callable] = {'.jsonl': _json_lines, '.tsv': _tsv}
  if path.suffix not in formats:
    raise RowsError(f'{path}: predictions are written as {" or ".join(formats)}')
  rows_lib.check_outputs(rows, outputs, task.num_outputs)
  content = formats[path.suffix](task, rows, _predicted(task, outputs),
                                 probabilities(task.kind, outputs))
  encoding.write_files(path.parent, {path.name: content})
  return path


def _predicted(task: Task, outputs: Float[np.ndarray, 'N C']) -> list[str | list[str] | float]:
  if task.kind == 'regression':
    # Seven digits are what a float32 has.
    return [float(f'{value:.7g}') for value in outputs[:, 0]]
  found = scores_lib.predict(task.kind, outputs)
  if task.kind == 'classification':
    return [task.labels[label] for label in found]
  return [[name for name, on in zip(task.labels, row, strict=True) if on] for row in found]


def _json_lines(
    task: Task, rows: Rows, predicted: list, probability: Float64[np.ndarray, 'N C'] | None
) -> bytes:
  out = []
  for number, (name, prediction) in enumerate(zip(rows.ids, predicted, strict=True)):
    record = {'id': name, 'prediction': prediction}
    if probability is not None:
      record['probabilities'] = {
          label: round(p, 6) for label, p in zip(task.labels, probability[number].tolist(),
                                                 strict=True)
      }
    out.append(json.dumps(record, ensure_ascii=False) + '\n')
  return ''.join(out).encode('utf-8', 'backslashreplace')


def _tsv(
    task: Task, rows: Rows, predicted: list, probability: Float64[np.ndarray, 'N C'] | None
) -> bytes:
  if task.kind == 'multi_label':
    bad = next((name for name in task.labels if task.separator in name), None)
    if bad is not None:
      raise RowsError(f'label {bad!r} holds the separator {task.separator!r}; write .jsonl')
    predicted = [task.separator.join(names) for names in predicted]
  columns = [] if probability is None else [f'probability_{name}' for name in task.labels]
  lines = [['id', 'prediction', *columns]]
  for number, (name, prediction) in enumerate(zip(rows.ids, predicted, strict=True)):
    shares = [] if probability is None else [f'{p:.6f}' for p in probability[number]]
    lines.append([name, str(prediction), *shares])
  return rows_lib.tsv(lines)
