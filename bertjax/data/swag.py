"""SWAG and HellaSwag: which of four endings goes on from a beginning.

Two layouts are read, told apart by the first character:

  CSV         the official SWAG files (train.csv, val.csv, test.csv); columns by their header:
              sent1, sent2, ending0 to ending3, and label where there is one
  JSON lines  HellaSwag (ctx_a, ctx_b, endings, label), or SWAG's columns as keys
"""

import csv
import dataclasses
import io
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from absl import logging
from etils import epath
from jaxtyping import Float32, Int, Int32

from bertjax.data import encoding, examples, text_file

NUM_CHOICES = 4
_ENDINGS = tuple(f'ending{number}' for number in range(NUM_CHOICES))
_COLUMNS = ('sent1', 'sent2', *_ENDINGS)
# [CLS] A [SEP] B [SEP] with one token of each.
_SHORTEST = 5


class SwagError(ValueError):
  """A file or setting that cannot be used; the message names file and line and how to mend it."""


@dataclasses.dataclass(frozen=True)
class Rows:
  """The questions of one file, in its order.

  Attributes:
    ids: SWAG's unnamed first column, HellaSwag's `ind`, else the number of the row from 0.
    first: the sentence before (sent1, ctx_a).
    second: how the sentence to be ended begins (sent2, ctx_b); may be empty.
    endings: four of each question; one may be empty.
    labels: the number of the right ending, 0 to 3; None where the file has no labels.
  """

  ids: list[str]
  first: list[str]
  second: list[str]
  endings: list[list[str]]
  labels: Int32[np.ndarray, 'N'] | None

  def __len__(self) -> int:
    return len(self.ids)


@dataclasses.dataclass(frozen=True)
class _Record:
  """One row as the file has it. `where` is 'FILE: line N'; label '' is none."""

  where: str
  index: str | None
  texts: tuple[str, str]
  endings: list[str]
  label: str


def read(path: epath.PathLike, labelled: bool = True) -> Rows:
  """Reads a file of SWAG or HellaSwag.

  An empty ending stays a choice, so that every question has four, and one warning says how many
  there are (in SWAG's files some distractors do not exist).

  Args:
    path: the file.
    labelled: False for rows that are only predicted: what is no label there (-1) stands for none,
      and one warning names the first; `labels` is None unless each row has one.

  Raises:
    SwagError: no text, no rows, columns or keys missing, a row with another number of fields or
      endings, broken quotes or JSON; if `labelled`, a label outside 0 to 3, or labels on a part of
      the rows.
  """
  name = str(path)
  text = text_file.read(path, SwagError)
  parse = _json_records if text.lstrip()[:1] in ('{', '[') else _csv_records
  records = list(parse(text, name))
  if not records:
    raise SwagError(f'{name}: no rows; name a file of SWAG (CSV) or HellaSwag (JSON lines)')
  rows = Rows(
      ids=[str(number) if record.index is None else record.index
           for number, record in enumerate(records)],
      first=[record.texts[0] for record in records],
      second=[record.texts[1] for record in records],
      endings=[record.endings for record in records],
      labels=_labels(records, labelled))
  empty = [record.where for record in records if not all(map(str.strip, record.endings))]
  if empty:
    logging.warning('%s: %d of %d rows have an empty ending, the first in %s; it is kept as a'
                    ' choice', name, len(empty), len(rows), empty[0].removeprefix(f'{name}: '))
  logging.info('%s: %d rows%s', name, len(rows), '' if rows.labels is not None else ', no labels')
  return rows


def _csv_records(text: str, name: str) -> Iterator[_Record]:
  reader = text_file.csv_reader(text)
  header: list[str] | None = None
  line = 0
  while True:
    line = reader.line_num + 1
    try:
      fields = next(reader, None)
    except csv.Error as error:
      raise SwagError(f'{name}: line {line}: {error}; a field begun with a quote must end with one,'
                      ' and quotes inside of it are doubled. Is the file cut off?') from error
    if fields is None:
      return
    if not fields:
      continue
    if header is None:
      header = fields
      _check_columns(header, f'{name}: line {line}')
      continue
    if len(fields) != len(header):
      raise SwagError(f'{name}: line {line}: {len(fields)} fields, but the header has'
                      f' {len(header)}; put fields with commas, quotes or line breaks in quotes')
    row = dict(zip(header, fields, strict=True))
    yield _Record(f'{name}: line {line}', row.get(''), (row['sent1'], row['sent2']),
                  [row[column] for column in _ENDINGS], row.get('label', '').strip())


def _check_columns(header: list[str], where: str) -> None:
  missing = [column for column in _COLUMNS if column not in header]
  if missing:
    shown = ', '.join(column[:40] for column in header[:16])
    raise SwagError(f'{where}: no column {", ".join(missing)}; the header has {shown}. Give'
                    ' train.csv, val.csv or test.csv of SWAG, or JSON lines of HellaSwag')
  twice = sorted({column for column in header if header.count(column) > 1})
  if twice:
    raise SwagError(f'{where}: column {", ".join(twice)} stands there more than once')


def _json_records(text: str, name: str) -> Iterator[_Record]:
  for number, line in enumerate(text.split('\n'), 1):
    if not line.strip():
      continue
    where = f'{name}: line {number}'
    try:
      row = json.loads(line)
    except (ValueError, RecursionError) as error:
      raise SwagError(f'{where}: not JSON ({error}); every line must hold one whole object. Is the'
                      ' file cut off?') from error
    if not isinstance(row, dict):
      raise SwagError(f'{where}: a JSON {type(row).__name__}; every line must hold one object')
    yield _json_record(row, where)


def _json_record(row: Mapping[str, Any], where: str) -> _Record:
  def text(key: str) -> str:
    if not isinstance(row.get(key), str):
      raise SwagError(f'{where}: {key!r} must be a text, and is {_shown(row, key)}')
    return row[key]

  texts = _json_texts(row, text, where)
  if 'endings' in row:
    endings = row['endings']
    if not isinstance(endings, list) or not all(isinstance(ending, str) for ending in endings):
      raise SwagError(f"{where}: 'endings' must be a list of texts")
    if len(endings) != NUM_CHOICES:
      raise SwagError(f'{where}: {len(endings)} endings; there must be {NUM_CHOICES}')
  else:
    endings = [text(key) for key in _ENDINGS]
  label, index = row.get('label'), row.get('ind')
  return _Record(where, None if index is None else str(index), texts, endings,
                 '' if label is None else str(label).strip())


def _json_texts(
    row: Mapping[str, Any], text: Callable[[str], str], where: str
) -> tuple[str, str]:
  """The two texts before the endings, whichever keys hold them."""
  if 'sent1' in row:
    return text('sent1'), text('sent2')
  if 'ctx_a' in row:
    return text('ctx_a'), text('ctx_b')
  if 'ctx' in row:
    return text('ctx'), ''
  raise SwagError(f'{where}: none of the keys ctx_a and ctx_b, ctx, sent1 and sent2; it has'
                  f' {", ".join(map(str, list(row)[:16])) or "no keys"}')


def _shown(row: Mapping[str, Any], key: str) -> str:
  return repr(row[key])[:60] if key in row else 'not there'


def _labels(records: list[_Record], labelled: bool) -> Int32[np.ndarray, 'N'] | None:
  with_label = [record for record in records if record.label]
  if not with_label:
    return None
  bare = next((record for record in records if not record.label), None)
  wrong = [record for record in with_label if record.label not in ('0', '1', '2', '3')]
  if labelled and bare:
    raise SwagError(f'{bare.where}: no label, but other rows have one; give all rows one, or none')
  if labelled and wrong:
    raise SwagError(f'{wrong[0].where}: label {wrong[0].label[:40]!r}; it must be 0, 1, 2 or 3 (a'
                    ' file without labels can only be predicted: data.test, mode=predict)')
  text_file.tell_placeholders([(record.where, record.label) for record in wrong])
  if bare or wrong:
    return None
  return np.array([int(record.label) for record in records], np.int32)


def encode(rows: Rows, tokenizer: encoding.Tokenizer, max_length: int) -> examples.Examples:
  """[CLS] first [SEP] second ending [SEP], four times a question.

  The longer of the two parts is cut from its end (google-research/bert, _truncate_seq_pair, as
  NVIDIA's run_swag); how many questions were cut, and where an ending lost tokens, is logged.

  Args:
    rows: N questions.
    tokenizer: text to ids.
    max_length: tokens of a choice at most, specials included.

  Returns:
    N examples of tokens [4, L], L the longest choice, and `labels` where the rows have them.

  Raises:
    SwagError: a max_length that cannot hold a pair.
  """
  if max_length < _SHORTEST:
    raise SwagError(f'max_length {max_length} cannot hold a pair; it must be at least {_SHORTEST}')
  firsts = tokenizer.encode_batch(rows.first)
  seconds = tokenizer.encode_batch([
      f'{second} {ending}' for second, endings in zip(rows.second, rows.endings, strict=True)
      for ending in endings])
  tokens: dict[str, list[Int32[np.ndarray, 'C L']]] = {}
  for number, first in enumerate(firsts):
    choices = [examples.join(tokenizer, first, second, max_length)
               for second in seconds[NUM_CHOICES * number:NUM_CHOICES * (number + 1)]]
    for field, stacked in _stack(choices, tokenizer.pad_id).items():
      tokens.setdefault(field, []).append(stacked)
  _report_cuts(rows, tokenizer, firsts, seconds, max_length)
  values = {} if rows.labels is None else {'labels': rows.labels}
  return examples.Examples(tokens, values, tokenizer.pad_id)


def _stack(
    choices: list[dict[str, Int[np.ndarray, '_']]], pad_id: int
) -> dict[str, Int32[np.ndarray, 'C L']]:
  """The choices of one question as rows of equal length."""
  stacked = {}
  length = max(len(choice['input_ids']) for choice in choices)
  for field in choices[0]:
    fill = pad_id if field == 'input_ids' else 0
    stacked[field] = np.full((len(choices), length), fill, np.int32)
    for row, choice in zip(stacked[field], choices, strict=True):
      row[:len(choice[field])] = choice[field]
  return stacked


def _report_cuts(
    rows: Rows, tokenizer: encoding.Tokenizer, firsts: list[Int[np.ndarray, '_']],
    seconds: list[Int[np.ndarray, '_']], max_length: int,
) -> None:
  """Says how many questions were cut, and in how many an ending lost tokens or all of them."""
  cut, shortened, gone = set(), set(), set()
  for number, second in enumerate(seconds):
    row = number // NUM_CHOICES
    _, kept = examples.truncate_pair(firsts[row], second, max_length - 3)
    if len(firsts[row]) + len(second) > max_length - 3:
      cut.add(row)
    if len(kept) < len(second):
      shortened.add(row)
      [begin] = tokenizer.encode_batch([rows.second[row]])
      if len(begin) >= len(kept):
        gone.add(row)
  if not cut:
    return
  say = logging.warning if gone else logging.info
  say('%d of %d rows were cut to max_length %d, %d of them in an ending; in %d nothing is left of'
      ' an ending%s', len(cut), len(rows), max_length, len(shortened), len(gone),
      '; raise max_length' if gone else '')


def scores(
    outputs: Float32[np.ndarray, 'N C'], labels: Int32[np.ndarray, 'N'] | None
) -> dict[str, float]:
  """Accuracy of the choice with the largest output; of equal ones the first counts.

  Raises:
    SwagError: there are no labels.
  """
  if labels is None:
    raise SwagError('there are no labels to score against: evaluate a file with a label column, or'
                    ' predict')
  return {'accuracy': float(np.mean(outputs.argmax(axis=-1) == labels))}


def write_predictions(
    rows: Rows, outputs: Float32[np.ndarray, 'N C'], path: epath.PathLike
) -> None:
  """Writes id, prediction and the four probabilities as CSV, one line a row, whole or not at all.

  Args:
    rows: what was predicted on.
    outputs: logits in the order of the rows.
    path: the file to write.
  """
  logits = outputs.astype(np.float64)
  weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
  probabilities = weights / weights.sum(axis=-1, keepdims=True)
  text = io.StringIO(newline='')
  writer = csv.writer(text, lineterminator='\n')
  writer.writerow(['id', 'prediction', *(f'probability{n}' for n in range(NUM_CHOICES))])
  for index, choice, row in zip(rows.ids, outputs.argmax(axis=-1), probabilities, strict=True):
    writer.writerow([index, int(choice), *(f'{probability:.6f}' for probability in row)])
  path = epath.Path(path)
  encoding.write_files(path.parent, {path.name: text.getvalue().encode(errors='replace')})
