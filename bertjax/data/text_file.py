"""Reading a whole text file of a task: UTF-8 whatever the locale, or an error that says where."""

import csv
import io
from typing import Any

from absl import logging
from etils import epath


def read(path: epath.PathLike, error: type[ValueError]) -> str:
  """The text of a file, without a byte order mark; line ends are left as they are.

  Args:
    path: a file, local or gs://.
    error: what is raised.

  Raises:
    error: no such file, a folder, or no UTF-8 text; with file, line and byte.
  """
  path = epath.Path(path)
  if not path.exists():
    raise error(f'{path}: no such file')
  if path.is_dir():
    raise error(f'{path}: is a folder; name a file in it')
  content = path.read_bytes()
  try:
    text = content.decode('utf-8-sig')
  except UnicodeDecodeError as bad:
    line = content.count(b'\n', 0, bad.start) + 1
    raise error(f'{path}: line {line}: not UTF-8 text at byte {bad.start}; unpack the file if it is'
                ' an archive, or save it as UTF-8') from bad
  nul = text.find('\0')
  if nul >= 0:
    line = text.count('\n', 0, nul) + 1
    raise error(f'{path}: line {line}: a NUL byte, so this is no text file; name the right one')
  return text


def csv_reader(text: str):
  """A strict csv.reader over a whole file; line breaks inside of quotes stay as they are."""
  # A document may be longer than the 131,072 characters that Python allows a field.
  csv.field_size_limit(max(csv.field_size_limit(), len(text)))
  return csv.reader(io.StringIO(text, newline=''), strict=True)


def tell_placeholders(labels: list[tuple[str, Any]]) -> None:
  """One warning about what stands for a label in rows that are only to be predicted.

  Args:
    labels: file and line, and what stands there; may be empty.
  """
  if labels:
    logging.warning('%s: label %.60r is none of the task; it and %d more stand for no label, and'
                    ' the rows are predicted, not scored', *labels[0], len(labels) - 1)
