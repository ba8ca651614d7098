"""One of two processes, of two devices each, whose devices lie scattered over the mesh.

    python tests/scattered_rows.py PORT PROCESS_ID    # by test_hosts.py

On a TPU the mesh follows the wires, so that a process holds neither neighbouring rows nor its turn
of them; and where the model axis runs across processes, both hold the same rows.
"""

import sys

import jax
import numpy as np
from jax.experimental import multihost_utils

from bertjax import sharding
from bertjax.data import loader
from bertjax.data.examples import EpochBatches, Examples
from bertjax.evals import predictions

LAYOUTS = (  # shape of the mesh, order of the devices: 0 and 1 are those of process 0
    ((4, 1, 1), [0, 2, 3, 1]), ((2, 2, 1), [3, 0, 1, 2]), ((2, 1, 2), [0, 2, 1, 3]),
    ((1, 2, 2), [2, 0, 3, 1]), ((4, 1, 1), [0, 1, 2, 3]))
LENGTHS = np.array([3, 9, 2, 5, 8, 7, 1, 4, 6, 2, 3])


def check(mesh: jax.sharding.Mesh) -> None:
  made = Examples(
      {name: [np.full(length, number + 1, np.int32) for number, length in enumerate(LENGTHS)]
       for name in ('input_ids', 'token_type_ids', 'attention_mask')},
      {'labels': np.arange(len(LENGTHS), dtype=np.int32)})
  # Training: the global batch is what one process makes.
  whole = EpochBatches(made, (4, 16), 4, seed=3).batches(0, 7)
  own = EpochBatches(made, (4, 16), 4, 3, sharding.own_rows(mesh, 4)).batches(0, 7)
  for expected, share in zip(whole, own, strict=True):
    got = loader.to_devices(share, mesh)
    for name, rows in expected.items():
      np.testing.assert_array_equal(
          multihost_utils.process_allgather(got[name], tiled=True), rows)
  # Predictions: of each example its own, in order.
  step = jax.jit(lambda params, batch: (
      params * batch['input_ids'][:, :1].astype('float32'), batch['labels'].sum(), 1.0))
  found = predictions.Predictor(step, made, (4, 16), 4, mesh).run(np.float32(2))
  np.testing.assert_array_equal(found.outputs[:, 0], 2 * np.arange(1, len(LENGTHS) + 1))


def main():
  port, process = sys.argv[1:]
  jax.distributed.initialize(f'localhost:{port}', 2, int(process))
  devices = jax.devices()
  assert [device.process_index for device in devices] == [0, 0, 1, 1]
  for shape, order in LAYOUTS:
    here = np.array([devices[number] for number in order]).reshape(shape)
    mesh = jax.sharding.Mesh(here, sharding.AXES)
    with jax.set_mesh(mesh):
      check(mesh)


if __name__ == '__main__':
  main()
