"""Host batches to the devices: one global jax.Array per field, a few batches ahead."""

import collections
from collections.abc import Iterator

import jax
import numpy as np

from bertjax.sharding import batch_sharding, own_rows, row_ways


def to_devices(batch: dict[str, np.ndarray], mesh: jax.sharding.Mesh) -> dict[str, jax.Array]:
  """Joins this process's rows with those of the others to global arrays.

  Args:
    batch: arrays [b, ...], the rows `sharding.own_rows` of a global batch.
    mesh: a mesh with the axes 'data' and 'fsdp'.

  Returns:
    Arrays [B, ...], the batch axis cut over both axes.
  """
  sharding, ways = batch_sharding(mesh), row_ways(mesh.shape)
  own_ways = len(own_rows(mesh, ways))
  return {
      name: jax.make_array_from_process_local_data(
          sharding, rows, (len(rows) * ways // own_ways, *rows.shape[1:]))
      for name, rows in batch.items()
  }


def device_batches(
    batches: Iterator[dict[str, np.ndarray]], mesh: jax.sharding.Mesh, ahead: int = 2
) -> Iterator[dict[str, jax.Array]]:
  """The batches on the devices, transferred up to `ahead` batches before they are asked for.

  Transfers run in the background: JAX returns from a transfer before it is done.
  """
  queue = collections.deque()
  for number, batch in enumerate(batches):
    queue.append(to_devices(batch, mesh))
    if number == 0 or len(queue) > ahead:  # the first step need not wait for the others' batches
      yield queue.popleft()
  yield from queue


def global_shapes(
    shapes: dict[str, tuple[tuple[int, ...], type[np.generic]]], mesh: jax.sharding.Mesh
) -> dict[str, jax.ShapeDtypeStruct]:
  """The global batch without its content, to compile for it before there is one."""
  sharding = batch_sharding(mesh)
  return {
      name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
      for name, (shape, dtype) in shapes.items()
  }
