"""Which mesh to take where the configuration leaves it open (`mesh.auto`), and why.

As much of the data axis as there is room for: it communicates once a step. The state is split
(fsdp) over as few devices as make it fit with ease, since every layer then has to be gathered. A
layer is split (model) only where there are fewer rows than devices: that communicates most.
"""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np
from absl import logging
from flax import nnx
from jax.experimental import multihost_utils

from bertjax import chips, optim, sharding, state
from bertjax.sharding import MeshError, MeshSettings

# Of a device's memory, for parameters and moments. Gradients take another third of that, and the
# activations of a batch that keeps the device busy most of the rest.
_STATE_SHARE = 0.2
_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Situation:
  """What a choice depends on.

  Attributes:
    devices: all of them.
    state_bytes: parameters and optimizer state, as if one device held them.
    rows: of each phase, those that are computed at a time (batch_size / accumulate).
    heads: of the attention; the model axis divides them.
    memory: bytes of a device; 0 where it is not known.
    slices: groups of devices with a fast network of their own.
  """

  devices: int
  state_bytes: int
  rows: tuple[int, ...]
  heads: int
  memory: int = 0
  slices: int = 1


def choose_mesh(here: Situation) -> tuple[MeshSettings, str]:
  """The mesh, and in words why.

  Raises:
    MeshError: the batch is smaller than the devices, and cannot be spread over them.
  """
  ways, reasons = here.devices, []
  if min(here.rows) < here.devices:
    ways = _row_ways(here)
    reasons.append(f'{min(here.rows)} rows at a time are fewer than {here.devices} devices, so '
                   f'that {here.devices // ways} devices share each row')
  model = here.devices // ways
  fsdp, reason = _state_ways(here, ways // here.slices, here.state_bytes / model)
  return MeshSettings(ways // fsdp, fsdp, model), '; '.join([*reasons, reason])


def _row_ways(here: Situation) -> int:
  """Over how many groups of devices the rows are split, where they are fewer than the devices."""
  possible = [
      ways for ways in _divisors(here.devices)
      if all(rows % ways == 0 for rows in here.rows) and ways % here.slices == 0
      and here.heads % (here.devices // ways) == 0]
  if not possible:
    raise MeshError(
        f'mesh.auto: {min(here.rows)} rows at a time cannot be spread over {here.devices} devices '
        f'in {here.slices} slice(s); take a batch_size / accumulate of {here.devices}, or fewer '
        'devices')
  return possible[-1]


def _state_ways(here: Situation, most: int, state_bytes: float) -> tuple[int, str]:
  """Over how many devices (a divisor of `most`) the state is split, and why."""
  size = f'the state of {state_bytes / _GIB:.2f} GiB'
  if not here.memory:
    return 1, f'the memory of a device is not known, so that each holds {size} whole'
  memory = f"a device's {here.memory / _GIB:.2f} GiB"
  possible = [ways for ways in _divisors(most)
              if state_bytes / ways <= _STATE_SHARE * here.memory]
  if not possible:
    return most, (f'{size} is split over all {most} devices of a slice, and still takes '
                  f'{state_bytes / most / here.memory:.0%} of {memory}')
  if possible[0] == 1:
    return 1, f'{size} is at most {_STATE_SHARE:.0%} of {memory}, so that each holds it whole'
  return possible[0], (f'{size} is more than {_STATE_SHARE:.0%} of {memory}, so that '
                       f'{possible[0]} devices share it')


def _divisors(number: int) -> list[int]:
  return [d for d in range(1, number + 1) if number % d == 0]


def resolve(
    asked: MeshSettings, build: Callable[[nnx.Rngs], nnx.Module],
    optimizer: optim.OptimizerSettings, rows: tuple[int, ...], heads: int,
) -> MeshSettings:
  """The settings as asked for, or where they say `auto` those for this model and these devices.

  Args:
    asked: of the configuration.
    build: the model.
    optimizer: whose state counts.
    rows: see Situation.
    heads: see Situation.

  Raises:
    MeshError: see `choose_mesh`.
  """
  if not asked.auto:
    return asked
  _, params = state.split(build)
  moments = jax.eval_shape(optim.make(optimizer, params).init, params)
  devices = jax.devices()
  chosen, why = choose_mesh(Situation(
      devices=len(devices), rows=rows, heads=heads, memory=_common_memory(),
      state_bytes=sum(leaf.size * leaf.dtype.itemsize
                      for leaf in jax.tree.leaves((params, moments))),
      slices=sharding.count_slices(devices)))
  if jax.process_index() == 0:
    logging.info('mesh.auto: data %d, fsdp %d, model %d: %s',
                 chosen.data, chosen.fsdp, chosen.model, why)
  return chosen


def device_memory(device) -> int:
  """Bytes that programs may use of a device of this process; 0 where it is not known."""
  said = device.memory_stats() or {}
  if 'bytes_limit' in said:
    return said['bytes_limit']
  chip = chips.find(device.device_kind)
  return int(chip.memory) if chip else 0


def _common_memory() -> int:
  """What process 0 has: hosts may differ by some bytes, and must not choose differently."""
  mebibytes = np.int32(device_memory(jax.local_devices()[0]) >> 20)
  return int(multihost_utils.broadcast_one_to_all(mebibytes)) << 20
