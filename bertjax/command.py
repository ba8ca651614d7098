"""The command line that training commands share: flags, logging, several processes, exit codes."""

import logging as python_logging
import os
import sys
from collections.abc import Callable, Sequence

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')  # before anything loads TensorFlow

import ml_collections
from absl import app, flags, logging
from ml_collections import config_flags

from bertjax import host_memory

_CONFIG = config_flags.DEFINE_config_file('config', None, 'configs/NAME.py')
_WORKDIR = flags.DEFINE_string('workdir', None, 'folder of checkpoints and logs, local or gs://')
_COORDINATOR = flags.DEFINE_string('coordinator_address', None, 'HOST:PORT of process 0')
_PROCESSES = flags.DEFINE_integer('num_processes', None, 'how many processes train together')
_PROCESS = flags.DEFINE_integer('process_id', None, 'which of them this is')
_DISTRIBUTED = flags.DEFINE_boolean(
    'distributed', False, 'several processes, found out from Cloud TPU, Slurm or GKE')
_TIMEOUT = flags.DEFINE_integer(
    'init_timeout', 300, 'seconds within which all processes must have started', lower_bound=1)
_PLATFORM = flags.DEFINE_enum(
    'platform', 'auto', ['auto', 'cpu', 'gpu', 'tpu'], 'a platform that is absent is an error')


def run(entry: Callable[[ml_collections.ConfigDict, str], int]) -> None:
  """Reads the flags and exits with what `entry(config, workdir)` returns.

  Exit codes besides: 1 an error, in words; 2 input or a configuration that cannot be used.
  """
  flags.mark_flags_as_required(['config', 'workdir'])
  app.run(lambda argv: sys.exit(_main(argv, entry)), flags_parser=_parse)


def _parse(argv: Sequence[str]) -> list[str]:
  """The flags; a key that the configuration lacks, or no such file, ends in words and with 2."""
  # A string cannot take the place of a group of keys.
  argv = ['--config.mesh.auto=True' if text == '--config.mesh=auto' else text for text in argv]
  try:
    rest = flags.FLAGS(argv)
    if _CONFIG.value is not None:
      _CONFIG.value.keys()  # a file that cannot be loaded is told of when it is looked at
    return rest
  except (AttributeError, IndexError, KeyError, OSError, TypeError, ValueError,
          flags.Error) as error:
    cause = error
    while cause.args and isinstance(cause.args[0], Exception):  # config_flags wraps them
      cause = cause.args[0]
    text = str(cause.args[0] if isinstance(cause, KeyError) else cause)
    if 'Traceback' in text:  # what get_config(...) raised
      text = text.strip().split('\n')[-1]
    if ' ' not in text:  # a KeyError's bare key
      text = f'there is no {text} in the configuration'
    where = '' if isinstance(error, flags.Error) else '--config: '
    print(f'error: {where}{" ".join(text.split())}', file=sys.stderr)
    sys.exit(2)


def _main(argv: Sequence[str], entry) -> int:
  if len(argv) > 1:
    raise app.UsageError(f'unknown arguments: {" ".join(argv[1:])}', exitcode=2)
  given = [flag.value is not None for flag in (_COORDINATOR, _PROCESSES, _PROCESS)]
  if any(given) and not all(given):
    raise app.UsageError(
        '--coordinator_address, --num_processes and --process_id go together: without one of them '
        'each process would train alone, into one workdir', exitcode=2)
  logging.set_verbosity(logging.INFO)
  logging.get_absl_handler().setFormatter(
      python_logging.Formatter('%(asctime)s %(levelname).1s %(message)s', '%H:%M:%S'))
  host_memory.keep_freed_memory()
  workdir = os.path.expanduser(_WORKDIR.value)  # the shell leaves the ~ of --workdir=~/runs alone
  from bertjax import errors, hosts  # with JAX, after the flags: a wrong one is answered at once

  party = None
  try:
    hosts.request_platform(_PLATFORM.value)
    party = hosts.start(
        _COORDINATOR.value, _PROCESSES.value, _PROCESS.value, find_out=_DISTRIBUTED.value,
        timeout=_TIMEOUT.value)
    hosts.announce(_PLATFORM.value)
    hosts.check_workdir(workdir)
    code = entry(_CONFIG.value, workdir)
  except errors.EXPECTED as error:  # known by name and said in words: no trace
    hosts.let_the_cause_be_told(party)
    logging.error('%s', error)
    code = 2 if isinstance(error, ValueError) else 1
  except KeyboardInterrupt:
    hosts.let_the_cause_be_told(party)
    logging.error('Interrupted')
    code = 130
  except Exception:
    if party is None:
      raise
    hosts.let_the_cause_be_told(party)
    logging.exception('Unexpected')
    code = 1
  return hosts.leave(party, code)
