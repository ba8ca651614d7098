"""How the command-line tools speak: each log message is one plain line on standard error."""

import logging as python_logging

from absl import logging


class _Plain(python_logging.Formatter):
  """The message alone, marked where it is more than information."""

  def format(self, record: python_logging.LogRecord) -> str:
    mark = f'{record.levelname.lower()}: ' if record.levelno > python_logging.INFO else ''
    return mark + super().format(record)


def log_plainly(verbosity: int = logging.INFO) -> None:
  """Sets up logging for a tool that has no absl flags.

  absl's own handler would complain that they were not parsed, and begin each line with a thread
  number.

  Args:
    verbosity: what is shown, e.g. absl's logging.INFO.
  """
  handler = python_logging.StreamHandler()
  handler.setFormatter(_Plain('%(message)s'))
  python_logging.basicConfig(handlers=[handler])
  logging.set_verbosity(verbosity)
