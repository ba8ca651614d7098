"""Host batches to the devices of a mesh."""

import jax
import numpy as np
import pytest

from bertjax.data import loader


def make_mesh(data, fsdp, model):
  devices = np.array(jax.devices()[: data * fsdp * model]).reshape(data, fsdp, model)
  return jax.sharding.Mesh(devices, ('data', 'fsdp', 'model'))


def host_batch(step, rows=16):
  return {
      'input_ids': np.arange(rows * 4, dtype=np.int32).reshape(rows, 4) + step,
      'next_sentence_weights': np.full(rows, step, np.float32),
  }


@pytest.mark.parametrize('shape', [(1, 1, 1), (8, 1, 1), (2, 4, 1), (2, 2, 2)])
def test_rows_are_cut_over_data_and_fsdp(shape):
  mesh = make_mesh(*shape)
  batch = loader.to_devices(host_batch(3), mesh)
  for name, rows in host_batch(3).items():
    np.testing.assert_array_equal(batch[name], rows)
    assert batch[name].dtype == rows.dtype
    shards = {shard.data.shape[0] for shard in batch[name].addressable_shards}
    assert shards == {16 // (shape[0] * shape[1])}
    assert batch[name].sharding.spec == jax.sharding.PartitionSpec(('data', 'fsdp'))


def test_batches_come_in_order_and_run_ahead():
  taken = []

  def source():
    for step in range(6):
      taken.append(step)
      yield host_batch(step)

  batches = loader.device_batches(source(), make_mesh(2, 2, 1), ahead=2)
  first = next(batches)
  assert taken == [0]  # the first step waits for no other batch
  second = next(batches)
  assert taken == [0, 1, 2, 3]
  rest = list(batches)
  steps = [int(b['next_sentence_weights'][0]) for b in [first, second, *rest]]
  assert steps == list(range(6))


def test_fewer_batches_than_the_queue_holds():
  assert len(list(loader.device_batches(iter([host_batch(0)]), make_mesh(1, 1, 1)))) == 1
  assert not list(loader.device_batches(iter([]), make_mesh(1, 1, 1)))
