"""The nine GLUE tasks: their files, labels, scores and submissions.

    found = glue.read('rte', 'glue_data', 'train')     # or 'glue_data/RTE', a file, 'tfds:glue/rte'
    examples = rows.encode(found, tokenizer, max_length=128)
    glue.scores('rte', outputs, found.labels)
    glue.write_submission('rte', 'test', test_rows, test_outputs, 'submission')

The files are TSV without quoting: TAB and LF separate, and a quotation mark is text. Columns are
found by their names, so a file that has them in another layout (few-shot draws of MNLI's training
rows as dev_matched.tsv) works as well.

WNLI: its dev rows are chosen against its training rows (same sentence, other label), and models of
BERT's size do worse than the majority class. BERT's paper leaves WNLI out; on the leaderboard one
submits the majority class. Here it is trained and predicted like the other tasks, and
`write_submission` says how many rows the prediction gives the majority class.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from absl import logging
from etils import epath
from jaxtyping import Float, Shaped

from bertjax.data import encoding, text_file
from bertjax.data import rows as rows_lib
from bertjax.data.glue_tasks import TASKS, Split, Task, find_split, find_task, plain
from bertjax.data.rows import Row, Rows, RowsError
from bertjax.evals import scores as scores_lib

__all__ = [
    'TASKS', 'RowsError', 'Rows', 'Split', 'Task', 'find_split', 'find_task', 'predicted_splits',
    'read', 'scores', 'write_submission',
]  # fmt: skip

_UNLABELLED = ('-', '-1', '')  # '-': MNLI's annotators did not agree; -1: hidden by GLUE and tfds
_INDEX = ('index', 'id')  # the latter in QQP


def read(task: str, path: epath.PathLike, split: str, strict: bool = False) -> Rows:
  """Reads a split.

  Rows of train and dev splits without a label are left out; of other splits all rows stay, and
  `labels` is None unless each has one that the task knows. One warning names the first that it does
  not know.

  Args:
    task: e.g. 'rte'.
    path: the folder glue_data or the task's own folder in it; or a file with the task's columns;
      or `tfds:glue/rte`, a tensorflow-datasets data set.
    split: e.g. 'train', 'dev', 'test'; for MNLI 'dev_matched', 'test_mismatched', ... With a file
      it only says what the rows are for.
    strict: stop at a line with the wrong number of columns, instead of skipping it. Other splits
      than train and dev always do: every row has its prediction (B104).

  Raises:
    RowsError: no such file or split, a binary or empty file, wrong columns; in train and dev an
      unknown label.
  """
  spec = find_task(task)
  if str(path).startswith('tfds:'):
    return _read_tfds(spec, str(path), split)
  path = epath.Path(path)
  if not path.exists():
    raise RowsError(f'{path}: no such file or folder')
  if path.is_dir():
    file, layout = _find_file(spec, path, split), _official_split(spec, split)
  else:
    file, layout = path, next(
        (s for name, s in spec.splits.items() if name.startswith(split)), spec.splits['train'])
  return _read_file(spec, layout, file, _is_labelled(split), strict)


def predicted_splits(task: str, path: epath.PathLike) -> tuple[str, ...]:
  """The splits whose predictions the leaderboard takes, as far as the data have them.

  They are those of test, and with MNLI the diagnostic set where its file is there or
  tensorflow-datasets gives it; 'tfds:glue/ax' is the latter alone.

  Raises:
    RowsError: there is no such task.
  """
  spec = find_task(task)
  more = [name for name, split in spec.splits.items()
          if split.submission and name not in spec.test_splits]
  if str(path).startswith('tfds:'):
    data_set, _ = _tfds_name(str(path))
    alone = [name for name in more if data_set == f'glue/{spec.splits[name].tfds_config}']
    return tuple(alone) or (*spec.test_splits, *(n for n in more if _in_tfds(spec, str(path), n)))
  folder = epath.Path(path)
  return (*spec.test_splits, *(n for n in more if folder.is_dir() and _is_there(spec, folder, n)))


def _is_there(spec: Task, folder: epath.Path, split: str) -> bool:
  """Whether there is a file of a split, and not our own predictions, which have the same name."""
  files = _files(spec, folder, split)
  if not files:
    return False
  columns = rows_lib.read_lines(files[0])[0].split('\t')
  if set(spec.texts) <= set(columns):
    return True
  logging.warning(
      '%s is not written: %s has the columns %s, and not %s', spec.splits[split].submission,
      files[0], ', '.join(columns), ', '.join(spec.texts))
  return False


def _is_labelled(split: str) -> bool:
  return split.startswith(('train', 'dev'))


def _official_split(spec: Task, split: str) -> Split:
  if split not in spec.splits:
    raise RowsError(f'{spec.folder} has no split {split!r}; there are {", ".join(spec.splits)}')
  return spec.splits[split]


# --- Official files --------------------------------------------------------------------------


def _find_file(spec: Task, path: epath.Path, split: str) -> epath.Path:
  found = _files(spec, path, split)
  if not found:
    folder, names = _folder(spec, path), _official_split(spec, split).files
    there = ', '.join(sorted(p.name for p in folder.iterdir())) or 'nothing'
    raise RowsError(
        f'{folder}: no {" or ".join(names)} of {spec.folder}; there is {there}. Get the files from'
        f' gluebenchmark.com, take tfds:glue/{plain(spec.folder)}, or name a file of your own'
    )
  return found[0]


def _files(spec: Task, path: epath.Path, split: str) -> list[epath.Path]:
  """What there is of a split, the official name first."""
  folder = _folder(spec, path)
  return [folder / name for name in _official_split(spec, split).files if (folder / name).exists()]


def _folder(spec: Task, path: epath.Path) -> epath.Path:
  """The task's own folder in glue_data, or the folder itself."""
  return next(
      (p for p in sorted(path.iterdir()) if plain(p.name) == plain(spec.folder) and p.is_dir()),
      path,
  )


def _read_file(
    spec: Task, layout: Split, file: epath.Path, labelled: bool, strict: bool
) -> Rows:
  lines = rows_lib.read_lines(file)
  columns, first = _columns(spec, layout, lines[0].split('\t'), str(file))
  if labelled and spec.label not in columns:
    raise RowsError(
        f'{file}, line 1: no column {spec.label!r}, so these rows can only be predicted; there are'
        f' {", ".join(columns)}'
    )
  skipped: list[int] = []
  unknown: list[tuple[str, str]] = []

  def parse(text: str, where: str) -> int | float | None:
    return rows_lib.label_or_none(
        lambda: _parse_label(spec, text, where), labelled, unknown, where, text)

  def rows() -> Iterator[Row]:
    texts = [columns.index(name) for name in spec.texts]
    index = next((columns.index(name) for name in _INDEX if name in columns), None)
    label = columns.index(spec.label) if spec.label in columns else None
    for line, text in enumerate(lines[first:], first + 1):
      fields = text.split('\t')
      if len(fields) != len(columns):
        _need_whole(labelled, f'{file}, line {line}', len(fields), len(columns))
        skipped.append(
            rows_lib.bad_line(str(file), line, len(fields), len(columns), strict))
        continue
      yield Row(
          line,
          str(line - first - 1) if index is None else fields[index],
          fields[texts[0]],
          fields[texts[1]] if len(texts) > 1 else None,
          None if label is None else parse(fields[label], f'{file}, line {line}'),
      )

  found = rows_lib.collect(rows(), spec.kind, labelled, str(file), skipped)
  text_file.tell_placeholders(unknown)
  return found


def _need_whole(labelled: bool, where: str, columns: int, wanted: int) -> None:
  """Refuses a bad line where every row needs its prediction."""
  if not labelled:
    raise RowsError(f'{where}: {columns} columns instead of {wanted}; mend the line, as each row of'
                    ' a test file must have its prediction')


def _columns(
    spec: Task, layout: Split, first_line: list[str], file: str
) -> tuple[list[str], int]:
  """The names of the columns and how many lines the header takes.

  Whether there is a header shows in the line itself, not in the name of the file: copies of CoLA
  with one are about, and of the others without.
  """
  if set(spec.texts) <= set(first_line):
    return first_line, 1
  for split in spec.splits.values():
    columns = split.header.split('\t')
    if not split.has_header and len(first_line) == len(columns):
      label = first_line[columns.index(spec.label)]
      if label in spec.codes + _UNLABELLED:
        return columns, 0
  wanted = layout.header.replace('\t', ', ')
  kind = 'a header' if layout.has_header else 'columns'
  raise RowsError(
      f'{file}, line 1: wrong columns: {", ".join(first_line)[:200]!r}; {spec.folder} has {kind} '
      f'{wanted}, separated by tabs, of which {", ".join(spec.texts)} are needed'
  )


def _parse_label(spec: Task, text: str, where: str) -> int | float | None:
  """The class number or the score; None where the row has no label."""
  if text in _UNLABELLED:
    return None
  if spec.kind == 'regression':
    try:
      value = rows_lib.number(text)
    except ValueError:
      value = -1.0
    if not 0 <= value <= 5:
      raise RowsError(f'{where}: {text!r} is no {spec.label} from 0 to 5; mend or drop the line')
    return value
  for names in (spec.codes, spec.labels):
    if text in names:
      return names.index(text)
  raise RowsError(
      f'{where}: unknown label {text!r}; {spec.folder} has {", ".join(spec.codes)}; mend or drop'
      ' the line'
  )


# --- tensorflow-datasets ---------------------------------------------------------------------


def _read_tfds(spec: Task, path: str, split: str) -> Rows:
  """Rows in the order of the official file, by their idx: tfds shuffles as it stores."""
  layout = _official_split(spec, split)
  builder = _tfds_builder(_tfds_config(spec, path, split))
  import tensorflow_datasets as tfds

  examples = builder.as_dataset(split=layout.tfds, shuffle_files=False)
  found = sorted(tfds.as_numpy(examples), key=lambda example: int(example['idx']))
  label_names = getattr(builder.info.features['label'], 'names', None)
  texts = spec.tfds_texts or spec.texts
  rows = [
      Row(
          number,
          str(int(example['idx'])),
          example[texts[0]].decode('utf-8'),
          example[texts[1]].decode('utf-8') if len(texts) > 1 else None,
          _tfds_label(spec, example['label'].item(), label_names, path),
      )
      for number, example in enumerate(found, 1)
  ]
  return rows_lib.collect(rows, spec.kind, _is_labelled(split), f'{path}:{layout.tfds}', [])


def _tfds_name(path: str) -> tuple[str, str]:
  """The data set and what follows it: ('glue/rte', ':2.0.0')."""
  data_set, colon, version = path.removeprefix('tfds:').partition(':')
  return data_set, colon + version


def _tfds_config(spec: Task, path: str, split: str) -> str:
  """What tensorflow-datasets calls the data that have a split."""
  config = _official_split(spec, split).tfds_config or plain(spec.folder)
  data_set, version = _tfds_name(path)
  if data_set not in ('glue', f'glue/{plain(spec.folder)}', f'glue/{config}'):
    raise RowsError(f'{path}: is not {spec.folder}; give tfds:glue/{plain(spec.folder)}')
  return f'glue/{config}{version}'


def _in_tfds(spec: Task, path: str, split: str) -> bool:
  """Whether a further split can be had: without it the others are predicted all the same."""
  try:
    _tfds_builder(_tfds_config(spec, path, split))
  except RowsError as error:
    logging.warning('%s is not written: %s', spec.splits[split].submission, error)
    return False
  return True


def _tfds_builder(name: str) -> Any:
  import tensorflow_datasets as tfds  # Seconds and 300 MB: only for those who ask for it.

  try:
    builder = tfds.builder(name)
    builder.download_and_prepare()
  except Exception as error:  # Whatever a builder does: network, disk, versions.
    why = str(error).partition('\n')[0]
    raise RowsError(
        f'tfds:{name}: tensorflow-datasets cannot give it: {why}; give a folder with the official'
        ' files instead'
    ) from error
  return builder


def _tfds_label(
    spec: Task, label: int | float, names: list[str] | None, path: str
) -> int | float | None:
  """Our number of a label, found by its name: the orders differ (MNLI)."""
  if label == -1:
    return None
  if names is None:
    return float(label)
  if names[int(label)] not in spec.labels:
    raise RowsError(
        f'{path}: unknown label {names[int(label)]!r}; {spec.folder} has {", ".join(spec.labels)}')
  return spec.labels.index(names[int(label)])


# --- Scores and submissions ------------------------------------------------------------------


def scores(
    task: str, outputs: Float[np.ndarray, 'N C'], labels: Shaped[np.ndarray, 'N']
) -> dict[str, float | None]:
  """The task's official scores; an undefined correlation is None.

  Args:
    task: e.g. 'rte'.
    outputs: logits in the order of the task's labels, or the predicted number [N, 1].
    labels: of rows read here.

  Raises:
    ValueError: outputs and labels that do not fit.
  """
  spec = find_task(task)
  return scores_lib.compute(spec.kind, spec.metrics, outputs, labels)


def write_submission(
    task: str, split: str, rows: Rows, outputs: Float[np.ndarray, 'N C'], folder: epath.PathLike
) -> epath.Path:
  """Writes predictions in the leaderboard's format: 'index', 'prediction', one line for each row.

  Args:
    task: e.g. 'mnli'.
    split: e.g. 'test_matched', which gives MNLI-m.tsv; what is not for the leaderboard gets a name
      with the split in it, RTE-dev.tsv.
    rows: the rows predicted.
    outputs: as for `scores`.
    folder: made if need be; the file in it is there whole or not at all.

  Raises:
    RowsError: outputs that are not those of the rows, or are not finite.
  """
  spec = find_task(task)
  rows_lib.check_outputs(rows, outputs, spec.num_outputs)
  if spec.kind == 'regression':
    values = [f'{value:.3f}' for value in np.clip(outputs[:, 0], 0, 5) + 0.0]
  else:
    values = [spec.codes[label] for label in scores_lib.predict(spec.kind, outputs)]
  official = spec.splits.get(split)
  name = f'{spec.folder}-{split}.tsv'
  if official is not None and official.submission:
    name = official.submission
    if len(rows) != official.num_rows:
      logging.warning('%s: %d rows; the leaderboard expects %d', name, len(rows), official.num_rows)
  if spec is TASKS['wnli']:
    logging.info(
        'WNLI: %d of %d rows get the majority class %s; models of this size seldom beat it',
        values.count('0'), len(values), spec.labels[0])
  content = rows_lib.tsv([('index', 'prediction'), *zip(rows.ids, values, strict=True)])
  encoding.write_files(folder, {name: content})
  return epath.Path(folder) / name
