"""Chips to compile for that are nowhere near: TPUs by libtpu, NVIDIA GPUs by JAX's CUDA plugin.

A topology is written `v5e:4x4` (chips) or `h200:8` (GPUs of a host; `h200:2x8` of two hosts).
"""

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import os
import sys
import tempfile

from bertjax import chips

# libtpu reads these when it is loaded. One process is no reason to lock out the next, and there is
# no metadata server to ask what machine this is.
_ENVIRONMENT = {'ALLOW_MULTIPLE_LIBTPU_LOAD': '1', 'TPU_SKIP_MDS_QUERY': '1',
                'TPU_ACCELERATOR_TYPE': 'v5litepod-4', 'TPU_WORKER_HOSTNAMES': 'localhost',
                'TPU_STDERR_LOG_LEVEL': '1', 'JAX_PLATFORMS': 'cpu'}
_KIB, _GIB = 2**10, 2**30
_TPUS = {'v4': 'TPU v4', 'v5e': 'TPU v5e', 'v5p': 'TPU v5', 'v6e': 'TPU v6'}  # see chips.py


class AotError(ValueError):
  """What cannot be tried; the message says the mend."""


@dataclasses.dataclass(frozen=True)
class _Gpu:
  """What XLA must know of a GPU. Source: NVIDIA's data sheets (SXM modules).

  Attributes:
    name: as the driver reports it.
    capability: major and minor; with it go the sizes in `_target_config`.
    cores: multiprocessors.
    lanes: float32 units of a multiprocessor.
    shared: fast memory of a multiprocessor (KiB), of which a block gets all but one.
    clock: GHz, at most.
    cache: of the second level (MiB).
    memory: GiB that the driver leaves to programs.
    bandwidth: of the memory, bytes/s.
  """

  name: str
  capability: tuple[int, int]
  cores: int
  lanes: int
  shared: int
  clock: float
  cache: int
  memory: int
  bandwidth: float


_GPUS = {
    'a100': _Gpu('NVIDIA A100-SXM4-80GB', (8, 0), 108, 64, 164, 1.41, 40, 79, 2039e9),
    'h100': _Gpu('NVIDIA H100 80GB HBM3', (9, 0), 132, 128, 228, 1.98, 50, 79, 3350e9),
    'h200': _Gpu('NVIDIA H200', (9, 0), 132, 128, 228, 1.98, 50, 139, 4800e9),
}
KNOWN = (*_TPUS, *_GPUS)


@dataclasses.dataclass(frozen=True)
class Chip:
  """One JAX device.

  Attributes:
    generation: the first part of a topology.
    platform: 'tpu' or 'gpu'.
    memory: bytes that a program may use.
    bandwidth: of the memory, bytes/s.
  """

  generation: str
  platform: str
  memory: float
  bandwidth: float


def chip(topology: str) -> Chip:
  """The chip of a topology.

  Raises:
    AotError: an unknown one.
  """
  generation = topology.split(':')[0]
  if generation in _TPUS:
    known = chips.find(_TPUS[generation])
    return Chip(generation, 'tpu', known.memory, known.bandwidth)
  if generation in _GPUS:
    gpu = _GPUS[generation]
    return Chip(generation, 'gpu', gpu.memory * _GIB * memory_fraction(), gpu.bandwidth)
  raise AotError(f'--topology {topology}: known are {", ".join(KNOWN)}, e.g. v5e:4x4, h200:8')


def memory_fraction() -> float:
  """The share of a GPU's memory that JAX takes."""
  return float(os.environ.get('XLA_PYTHON_CLIENT_MEM_FRACTION', 0.75))


def prepare(topology: str):
  """Sets what the compilers read from the environment; to be called before JAX is used.

  Raises:
    AotError: an unknown topology, or its compiler is not installed.
  """
  if chip(topology).platform == 'tpu':
    if importlib.util.find_spec('libtpu') is None:
      raise AotError('libtpu is not installed; it compiles for TPUs on any Linux machine: '
                     "pip install -e '.[tpu]'")
  elif not any(importlib.util.find_spec(f'jax_cuda{major}_plugin') for major in (12, 13)):
    version = importlib.metadata.version('jaxlib')
    raise AotError("JAX's CUDA plugin is not installed; it compiles for GPUs on any Linux machine: "
                   f'pip install jax-cuda13-plugin=={version}')
  for name, value in _ENVIRONMENT.items():
    os.environ.setdefault(name, value)


def devices(topology: str) -> list:
  """The devices of a topology.

  Raises:
    AotError: no such topology.
  """
  from jax.experimental import topologies

  generation, _, shape = topology.partition(':')
  if chip(topology).platform == 'tpu':
    # Both cores of a v4 chip are one device, as on Cloud TPU; libtpu's default is one for each.
    options = {'chip_config_name': 'megacore'} if generation == 'v4' else {}
    asked = {'platform': 'tpu', 'topology_name': topology, **options}
  else:
    sizes = ['1', '1', *shape.split('x')][-3:]  # slices, hosts, GPUs of a host
    asked = {'platform': 'cuda', 'topology_name': '', 'topology': 'x'.join(sizes),
             'target_config': _target_config(_GPUS[generation])}
  try:
    with captured_stderr():
      return list(topologies.get_topology_desc(**asked).devices)
  except Exception as error:  # the compilers raise what they like
    raise AotError(f'--topology {topology}: {str(error).splitlines()[0]}') from error


def _target_config(gpu: _Gpu) -> str:
  """A GPU in XLA's words (the text of a GpuTargetConfigProto): it asks the driver otherwise.

  Source of the sizes that are no data of a GPU: the table of compute capabilities in NVIDIA's CUDA
  C++ Programming Guide.
  """
  (major, minor), shared = gpu.capability, gpu.shared * _KIB
  values = {
      'threads_per_block_limit': 1024, 'threads_per_warp': 32, 'threads_per_core_limit': 2048,
      'registers_per_core_limit': 65536, 'registers_per_block_limit': 65536,
      'block_dim_limit_x': 2**31 - 1, 'block_dim_limit_y': 65535, 'block_dim_limit_z': 65535,
      'shared_memory_per_block': 48 * _KIB, 'shared_memory_per_core': shared,
      'shared_memory_per_block_optin': shared - _KIB, 'core_count': gpu.cores,
      'fpus_per_core': gpu.lanes, 'clock_rate_ghz': gpu.clock, 'l2_cache_size': gpu.cache * 2**20,
      'memory_bandwidth': round(gpu.bandwidth), 'device_memory_size': round(gpu.memory * _GIB)}
  described = ' '.join(f'{name}: {value}' for name, value in values.items())
  return (f'gpu_device_info {{ {described} '
          f'cuda_compute_capability {{ major: {major} minor: {minor} }} }} '
          f'platform_name: "CUDA" device_description_str: "{gpu.name}"')


@contextlib.contextmanager
def captured_stderr():
  """What C++ writes to stderr meanwhile, in a list that is filled at the end."""
  said: list[str] = []
  sys.stderr.flush()
  with tempfile.TemporaryFile() as file:
    saved = os.dup(2)
    os.dup2(file.fileno(), 2)
    try:
      yield said
    finally:
      os.dup2(saved, 2)
      os.close(saved)
      file.seek(0)
      said.append(file.read().decode('utf-8', 'replace'))
