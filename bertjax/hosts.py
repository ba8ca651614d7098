"""The platform that was asked for, and several processes as one run: start, same workdir, end.

    request_platform ─> start (roll call, then JAX) ─> announce ─> check_workdir ─> ... ─> leave
"""

import logging as python_logging
import os
import secrets
import sys
import time

import jax
import numpy as np
from absl import logging
from etils import epath

from bertjax.roll_call import HostError, RollCall

__all__ = ['HostError', 'PLATFORMS', 'agreed', 'announce', 'check_workdir', 'leave',
           'let_the_cause_be_told', 'request_platform', 'start']

# JAX's own net, for a process that hangs: the roll call sees at once when one is gone.
_HEARTBEAT_SECONDS = 50
# A file system of many hosts may show a new file late.
_PATIENCE = 20.0
# What JAX calls them; the CPU is always there, below the accelerator.
PLATFORMS = {'auto': None, 'cpu': 'cpu', 'gpu': 'cuda,cpu', 'tpu': 'tpu,cpu'}
_MENDS = {
    'gpu': 'is .[cuda] installed, does nvidia-smi show the GPU, does another process hold it?',
    'tpu': 'is .[tpu] installed, is this a TPU VM, does another process hold the TPU?',
    'cpu': 'JAX was started before --platform was read',
}


def request_platform(name: str) -> None:
  """Holds JAX to a platform; 'auto' leaves the choice to JAX (and to JAX_PLATFORMS)."""
  if PLATFORMS[name]:
    jax.config.update('jax_platforms', PLATFORMS[name])


def announce(requested: str) -> None:
  """Logs platform and devices, the first line of every process's log.

  Raises:
    HostError: the platform that was requested is not there. JAX alone would take the CPU.
  """
  # It tells of every platform that is not there, as if that were a fault; this says which one is.
  python_logging.getLogger('jax._src.xla_bridge').setLevel(python_logging.WARNING)
  try:
    devices, platform, reason = jax.devices(), jax.default_backend(), ''
  except (RuntimeError, AssertionError) as error:  # the latter for a plugin that is not installed
    devices, platform, reason = [], 'nothing', f' ({str(error).strip()})' if str(error) else ''
  if not devices or requested not in ('auto', platform):
    mend = _MENDS.get(requested, '--platform=cpu runs anywhere')
    raise HostError(f'--platform={requested}, but JAX finds {platform}{reason}: {mend}')
  logging.info(
      'Platform %s: %d device(s), %s; process %d of %d has %d of them', platform, len(devices),
      devices[0].device_kind, jax.process_index(), jax.process_count(), jax.local_device_count())


def start(
    address: str | None, count: int | None, number: int | None, *, find_out: bool, timeout: int
) -> RollCall | None:
  """Starts JAX for several processes; None where this one is alone.

  Args:
    address: HOST:PORT of process 0, or None.
    count: how many processes there are, or None.
    number: which of them this is, or None.
    find_out: ask Cloud TPU, Slurm or GKE for those that are None.
    timeout: seconds within which all must be there.

  Raises:
    HostError: they are not there, or cannot be found out.
  """
  devices = None
  if find_out:
    address, count, number, devices = _found_out(address, count, number, timeout)
  if count is None:
    return None
  party = RollCall(address, count, number)
  party.meet(timeout)
  party.watch(_give_up)
  # Two lines that say less than `announce`, which comes first.
  python_logging.getLogger('jax._src.distributed').setLevel(python_logging.WARNING)
  jax.distributed.initialize(
      address, count, number, devices, initialization_timeout=timeout,
      heartbeat_timeout_seconds=_HEARTBEAT_SECONDS)
  return party


def _found_out(address, count, number, timeout: int):
  # JAX has no public way to ask without starting; tests/test_hosts.py holds this one.
  from jax._src.clusters import ClusterEnv

  try:
    found = ClusterEnv.auto_detect_unset_distributed_params(
        address, count, number, None, None, timeout)
  except (RuntimeError, OSError) as error:  # a metadata server or a Kubernetes API is silent
    raise HostError(f'--distributed: {error}') from error
  if None in found[:3]:
    raise HostError(
        '--distributed, but this is no Cloud TPU, Slurm or GKE job: give --coordinator_address, '
        '--num_processes and --process_id, or leave --distributed out to train in one process')
  return found


def agreed(value: int) -> int:
  """Process 0's value on every process: only one looks at what the run itself is changing."""
  if jax.process_count() == 1:
    return value
  from jax.experimental import multihost_utils

  return int(multihost_utils.broadcast_one_to_all(np.int32(value)))


def check_workdir(workdir: epath.PathLike) -> None:
  """Checks that what process 0 writes into the workdir is there for all processes.

  Raises:
    HostError: it is not, on every process; or it cannot be a folder.
  """
  folder = epath.Path(workdir)
  # Asked by one only: a host that finds nothing on NFS would remember that for a while.
  if agreed(jax.process_index() == 0 and folder.exists() and not folder.is_dir()):
    raise HostError(f'--workdir={workdir} is a file; give a folder')
  if jax.process_count() == 1:
    return
  from jax.experimental import multihost_utils

  token = int(multihost_utils.broadcast_one_to_all(np.int32(secrets.randbits(31))))
  mark = folder / f'.same-workdir-{token:08x}'
  if jax.process_index() == 0:
    try:
      mark.parent.mkdir(parents=True, exist_ok=True)
      mark.write_text('All processes of a run must see this file.\n')
    except Exception as error:  # gs:// raises TensorFlow's kinds
      logging.error('Process 0 cannot write into %s: %s', workdir, error)
  multihost_utils.sync_global_devices('workdir')
  seen = multihost_utils.process_allgather(np.array(_appears(mark)))
  if jax.process_index() == 0:
    mark.unlink(missing_ok=True)
  blind = np.flatnonzero(~seen)
  if len(blind):
    raise HostError(
        f'--workdir={workdir}: what process 0 wrote into its workdir is not there for process(es) '
        f'{", ".join(map(str, blind[:10]))} of {len(seen)}. Checkpoints would be in parts: give '
        'all the same --workdir, on gs:// or on a disk that all hosts share')


def _appears(mark: epath.Path) -> bool:
  deadline = time.monotonic() + _PATIENCE
  while True:
    try:
      if mark.exists():
        return True
    except Exception:  # gs:// raises TensorFlow's kinds
      logging.log_first_n(logging.WARNING, 'Cannot look into %s', 1, mark.parent, exc_info=True)
    if time.monotonic() > deadline:
      return False
    time.sleep(0.5)


def leave(party: RollCall | None, code: int) -> int:
  """Tells the other processes of this one's end; returns the exit code.

  Ends the process at once where others are still at work after an error: JAX would wait for them
  for minutes at its exit.
  """
  if party is not None and not party.leave(code):
    _exit(code)
  return code


def let_the_cause_be_told(party: RollCall | None) -> None:
  """Waits a little: an error may be the echo of a lost process, which the roll call then names."""
  if party is not None:
    time.sleep(2)


def _give_up(reason: str, code: int) -> None:
  logging.error('%s. This process ends as well, since training needs all of them; the same command '
                'on all hosts resumes from the last checkpoint', reason)
  _exit(code)


def _exit(code: int) -> None:
  logging.flush()
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(code)
