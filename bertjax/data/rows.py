"""Rows of one or two texts and a label: what GLUE and a person's own files are read into.

    file ── read_lines ──> Row, Row, ... ── collect ──> Rows ── encode ──> Examples
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import logging
from etils import epath
from jaxtyping import Float, Float32, Int, Int32

from bertjax.data import examples, text_file
from bertjax.data.encoding import Tokenizer

Labels = Int32[np.ndarray, 'N'] | Float32[np.ndarray, 'N'] | Float32[np.ndarray, 'N C']

_SHOWN = 20  # line numbers in a message


class RowsError(ValueError):
  """Data that cannot be used; the message names the file, where possible the line, and the mend."""


class Row(NamedTuple):
  """One example as read. `label` is a class number, a number, 0/1 for each label, or None."""

  line: int
  id: str
  text_a: str
  text_b: str | None
  label: int | float | list[float] | None


@dataclasses.dataclass(frozen=True)
class Rows:
  """The usable rows of a split, in file order.

  Attributes:
    ids: the file's index column, or the number of the row, counted from 0, bad lines included.
    text_a: the first or only texts, as they stand in the file.
    text_b: the second texts; None where the task has one text.
    labels: class numbers [N], numbers [N] or 0/1 [N, C]; None: rows that can only be predicted.
    source: the file, for messages.
    skipped: numbers of the bad lines, counted from 1, left out.
    unlabelled: numbers of the lines of a labelled split that have no label, left out.
  """

  ids: list[str]
  text_a: list[str]
  text_b: list[str] | None
  labels: Labels | None
  source: str
  skipped: tuple[int, ...] = ()
  unlabelled: tuple[int, ...] = ()

  def __len__(self) -> int:
    return len(self.ids)

  def need_labels(self) -> Labels:
    """The labels, for training and scoring.

    Raises:
      RowsError: there are none.
    """
    if self.labels is None:
      raise RowsError(
          f'{self.source}: rows without labels can only be predicted, not trained on or scored;'
          ' use mode=predict, or a file with labels'
      )
    return self.labels


# --- Reading ---------------------------------------------------------------------------------


def read_text(file: epath.PathLike) -> str:
  """A whole file of UTF-8 text, without a byte order mark.

  Raises:
    RowsError: no such file, an empty one, or one that is not UTF-8 text.
  """
  text = text_file.read(file, RowsError)
  if not text.strip():
    raise RowsError(f'{file}: empty; give a file with at least one row')
  return text


def read_lines(file: epath.PathLike) -> list[str]:
  """Lines that end in LF or CRLF and in nothing else; empty ones at the end of the file go.

  Raises:
    RowsError: as `read_text`.
  """
  # Not splitlines: U+2028, a form feed or a lone CR is part of a text.
  lines = [line.removesuffix('\r') for line in read_text(file).split('\n')]
  while not lines[-1]:
    lines.pop()
  return lines


def number(text: str) -> float:
  """A finite decimal number.

  Raises:
    ValueError: the text is something else; 'nan', 'inf' and '1_000' are.
  """
  value = float(text)
  if not math.isfinite(value) or '_' in text:
    raise ValueError(text)
  return value


def bad_line(file: str, line: int, columns: int, wanted: int, strict: bool) -> int:
  """The number of a line to skip.

  Raises:
    RowsError: if `strict`.
  """
  if strict:
    raise RowsError(
        f'{file}, line {line}: {columns} columns instead of {wanted}; mend the line, or leave out'
        ' strict to skip it'
    )
  return line


def label_or_none(
    parse: Callable[[], Any], labelled: bool, unknown: list[tuple[str, Any]], where: str, value: Any
) -> Any:
  """What `parse()` makes of a label; in rows to be predicted None, and noted, where it raises."""
  try:
    return parse()
  except RowsError:
    if labelled:
      raise
    unknown.append((where, value))
    return None


def collect(
    rows: Iterable[Row], kind: str, labelled: bool, source: str, skipped: list[int]
) -> Rows:
  """Puts rows together.

  Args:
    rows: of one file; `skipped` may grow while they come.
    kind: 'classification' (int32 labels), 'multi_label' or 'regression' (float32).
    labelled: a split to train on or to score: rows without a label are left out and counted.
      Otherwise all rows stay, and labels are there only if every row has one.
    source: the file, for messages.
    skipped: numbers of bad lines.

  Raises:
    RowsError: no usable row, or none with a label in a labelled split.
  """
  rows = list(rows)
  unlabelled = tuple(row.line for row in rows if row.label is None)
  kept = [row for row in rows if row.label is not None] if labelled else rows
  if not kept:
    what = 'no row has a label, so they can only be predicted' if rows else 'no usable row'
    raise RowsError(f'{source}: {what}{_lines(skipped, "; bad lines: ")}; check the columns')
  dtype = np.int32 if kind == 'classification' else np.float32
  with_labels = labelled or not unlabelled
  out = Rows(
      [row.id for row in kept],
      [row.text_a for row in kept],
      None if kept[0].text_b is None else [row.text_b for row in kept],
      np.array([row.label for row in kept], dtype) if with_labels else None,
      source,
      tuple(skipped),
      unlabelled if labelled else (),
  )
  _report(out)
  return out


def _report(rows: Rows) -> None:
  note = _lines(rows.skipped, f'; {len(rows.skipped)} bad lines skipped: ') + _lines(
      rows.unlabelled, f'; {len(rows.unlabelled)} without a label skipped: '
  )
  labels = '' if rows.labels is not None else ' without labels'
  logging.log(
      logging.WARNING if rows.skipped else logging.INFO,
      '%s: %d rows%s%s', rows.source, len(rows), labels, note,
  )


def _lines(numbers: Sequence[int], before: str) -> str:
  if not numbers:
    return ''
  shown = ', '.join(map(str, numbers[:_SHOWN]))
  return f'{before}line{"s" * (len(numbers) > 1)} {shown}' + ', ...' * (len(numbers) > _SHOWN)


# --- Encoding --------------------------------------------------------------------------------


def encode(rows: Rows, tokenizer: Tokenizer, max_length: int) -> examples.Examples:
  """Token ids of each row, cut to max_length, and the labels where there are any.

  Raises:
    RowsError: max_length leaves no room for a token of each text.
  """
  texts = 1 if rows.text_b is None else 2
  if max_length < 2 * texts + 1:
    raise RowsError(
        f'max_length {max_length} leaves no room for {texts} text(s) and the special tokens; give'
        f' {2 * texts + 1} or more'
    )
  first = tokenizer.encode_batch(rows.text_a)
  second = tokenizer.encode_batch(rows.text_b) if rows.text_b is not None else [None] * len(rows)
  joined = [examples.join(tokenizer, a, b, max_length) for a, b in zip(first, second, strict=True)]
  cut = sum(
      len(a) + (0 if b is None else len(b)) > max_length - texts - 1
      for a, b in zip(first, second, strict=True)
  )
  logging.info('%s: %d of %d rows cut to %d tokens', rows.source, cut, len(rows), max_length)
  tokens = {
      name: [row[name] for row in joined]
      for name in ('input_ids', 'token_type_ids', 'attention_mask')
  }
  values = {} if rows.labels is None else {'labels': rows.labels}
  return examples.Examples(tokens, values, tokenizer.pad_id)


# --- Outputs ---------------------------------------------------------------------------------


def label_order(stored: Sequence[str], wanted: Sequence[str]) -> Int[np.ndarray, 'C']:
  """Where the wanted labels stand among a model's: outputs[:, order] are in the wanted order.

  Names connect data and head, never numbers: references disagree about MNLI's order. Case counts
  only where names differ in nothing else ('A', 'a'): published checkpoints say 'ENTAILMENT'.

  Raises:
    RowsError: the names are not the same.
  """
  for spelled in (str, str.casefold):
    places = {spelled(name): place for place, name in enumerate(stored)}
    names = [spelled(name) for name in wanted]
    if len(places) == len(stored) and sorted(places) == sorted(names):
      return np.array([places[name] for name in names], np.int64)
  raise RowsError(
      f"the model's labels {', '.join(stored)} are not the task's {', '.join(wanted)}; if they"
      ' mean the same, write the names into the id2label of the model before it is imported'
  )


def check_outputs(rows: Rows, outputs: Float[np.ndarray, 'M C'], num_outputs: int) -> None:
  """Refuses outputs that are not those of the rows.

  Raises:
    RowsError: another number of rows or of outputs, or a number that is not finite.
  """
  if outputs.shape != (len(rows), num_outputs):
    raise RowsError(
        f'{rows.source}: {len(rows)} rows with {num_outputs} outputs wanted, the model gave'
        f' {outputs.shape}'
    )
  if not np.isfinite(outputs).all():
    row = int(np.argmin(np.isfinite(outputs).all(axis=1)))
    raise RowsError(
        f'{rows.source}, row {rows.ids[row]}: the prediction is not finite; take a checkpoint of a'
        ' run that did not diverge'
    )


_LINE_BREAKS = re.compile(r'[\t\n\r]')


def tsv(lines: Iterable[Sequence[str]]) -> bytes:
  """Lines of fields as TSV without quoting.

  Raises:
    RowsError: a field holds a tab or a line break.
  """
  out = []
  for fields in lines:
    bad = next((field for field in fields if _LINE_BREAKS.search(field)), None)
    if bad is not None:
      raise RowsError(f'{bad!r} has a tab or a line break, which TSV cannot hold; write .jsonl')
    out.append('\t'.join(fields) + '\n')
  return ''.join(out).encode('utf-8', 'backslashreplace')
