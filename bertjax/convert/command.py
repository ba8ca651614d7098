"""How the two commands of this room run: on the CPU, with errors in a line."""

import os
import sys
from collections.abc import Callable

from bertjax.data import console
from bertjax.step_folder import CheckpointError


def run(name: str, convert: Callable[[], str]) -> int:
  """Prints the report of a conversion; 2 with one line on stderr if it stops.

  Args:
    name: of the command, for messages.
    convert: does it and returns the report.
  """
  console.log_plainly()
  # A conversion must not take a GPU or TPU away from a run.
  os.environ.setdefault('JAX_PLATFORMS', 'cpu')
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
  try:
    print(convert())
  except (ValueError, OSError, CheckpointError) as error:
    print(f'{name}: {error}', file=sys.stderr)
    return 2
  return 0
