"""Meshes over slices, the mesh that chooses itself and why, and what a device holds."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import logging
from test_model import TINY

from bertjax import auto_mesh, heads, optim, sharding, state
from bertjax.auto_mesh import Situation
from bertjax.sharding import MeshError, MeshSettings

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Device:
  """Stands in for a device of a TPU slice of 2 x 2, or with platform 'gpu' of a node."""

  id: int
  slice_index: int
  coords: tuple[int, int, int] = (0, 0, 0)
  platform: str = 'tpu'
  device_kind: str = 'TPU v4'
  core_on_chip: int = 0
  process_index: int = 0


def slices(count, platform='tpu'):
  kind = 'TPU v4' if platform == 'tpu' else 'NVIDIA H200'
  return [Device(4 * s + 2 * x + y, s, (x, y, 0), platform, kind)
          for s in range(count) for x in range(2) for y in range(2)]


# --- Several slices ------------------------------------------------------------------------------


@pytest.mark.parametrize('platform', ['tpu', 'gpu'])
@pytest.mark.parametrize('sizes', [[2, 4, 1], [2, 1, 4], [2, 2, 2], [4, 2, 1], [8, 1, 1]])
def test_only_the_data_axis_runs_across_slices(platform, sizes):
  devices = slices(2, platform)
  # JAX may list devices in any order; slices are told apart by their number alone.
  placed = sharding.arrange(sizes, devices[::-1])
  assert placed.shape == tuple(sizes)
  assert {device.id for device in placed.flat} == set(range(8))
  number = np.vectorize(lambda device: device.slice_index)(placed)
  assert (number == number[:, :1, :1]).all()  # fsdp and model stay within one
  assert (np.diff(number[:, 0, 0]) >= 0).all() and set(number.flat) == {0, 1}


def test_the_data_axis_of_three_slices():
  number = np.vectorize(lambda device: device.slice_index)(sharding.arrange([6, 2, 1], slices(3)))
  assert number[:, 0, 0].tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize('settings', [
    MeshSettings(1, 8, 1), MeshSettings(1, 2, 4), MeshSettings(-1, 8, 1)])
def test_a_data_axis_that_the_slices_do_not_divide_is_refused_with_the_mend(settings):
  with pytest.raises(MeshError, match=r'in 2 slices .*fsdp \* model to a divisor of 4 and data'):
    sharding.make_mesh(settings, slices(2))


def test_slices_of_unequal_size_are_refused():
  with pytest.raises(MeshError, match='take slices of the same size'):
    sharding.make_mesh(MeshSettings(), slices(2)[:-2])


def test_one_slice_and_devices_without_a_slice():
  assert sharding.arrange([1, 4, 1], slices(1)).shape == (1, 4, 1)
  assert sharding.count_slices(jax.devices()) == 1
  mesh = sharding.make_mesh(MeshSettings(2, 2, 2))
  assert mesh.devices.flatten().tolist() == jax.devices()
  assert dict(mesh.shape) == {'data': 2, 'fsdp': 2, 'model': 2}


# --- mesh.auto -----------------------------------------------------------------------------------

LARGE = 4 * GIB  # 336 M parameters and two moments
V5E = {'devices': 16, 'heads': 16, 'memory': round(15.75 * GIB)}


@pytest.mark.parametrize('here, sizes, why', [
    (Situation(**V5E, state_bytes=GIB, rows=(256,)), (16, 1, 1),
     "the state of 1.00 GiB is at most 20% of a device's 15.75 GiB"),
    (Situation(**V5E, state_bytes=LARGE, rows=(256, 512)), (8, 2, 1),
     'more than 20% .* so that 2 devices share it'),
    (Situation(**V5E, state_bytes=8 * LARGE, rows=(256,)), (1, 16, 1), '16 devices share it'),
    (Situation(**V5E, state_bytes=100 * LARGE, rows=(256,)), (1, 16, 1), 'still takes 159%'),
    # Within a slice there are but 8 to share a state.
    (Situation(**V5E, state_bytes=8 * LARGE, rows=(256,), slices=2), (2, 8, 1),
     'over all 8 devices of a slice'),
    (Situation(devices=8, heads=12, state_bytes=LARGE, rows=(64,)), (8, 1, 1),
     'memory of a device is not known'),
    # Fewer rows than devices.
    (Situation(**V5E, state_bytes=GIB, rows=(256, 4)), (4, 1, 4),
     '4 rows at a time are fewer than 16 devices, so that 4 devices share each row'),
    (Situation(**V5E, state_bytes=4 * LARGE, rows=(8,)), (2, 4, 2),
     '2 devices share each row; .*4 devices share it'),
    (Situation(devices=8, heads=4, state_bytes=GIB, rows=(6,)), (2, 1, 4), '6 rows'),
    (Situation(devices=1, heads=4, state_bytes=LARGE, rows=(1,)), (1, 1, 1), 'not known'),
    # The number of rows that does not divide is for check_batches, which knows the phase.
    (Situation(**V5E, state_bytes=GIB, rows=(100,)), (16, 1, 1), 'whole'),
])
def test_what_is_chosen_and_why(here, sizes, why):
  settings, words = auto_mesh.choose_mesh(here)
  assert (settings.data, settings.fsdp, settings.model) == sizes and not settings.auto
  assert re.search(why, words), words


@pytest.mark.parametrize('changes', [
    {'rows': (2,), 'slices': 4}, {'rows': (1,), 'heads': 12}])
def test_a_batch_that_cannot_be_spread_is_refused_with_the_mend(changes):
  here = dataclasses.replace(Situation(**V5E, state_bytes=GIB, rows=(16,)), **changes)
  with pytest.raises(MeshError, match='take a batch_size / accumulate of 16, or fewer devices'):
    auto_mesh.choose_mesh(here)


def build(rngs):
  return heads.BertForPreTraining(TINY, rngs)


def test_the_choice_reads_model_optimizer_and_devices_and_is_logged_once(monkeypatch):
  said = []
  monkeypatch.setattr(logging, 'info', lambda text, *values: said.append(text % values))
  _, shapes = state.split(build)
  nbytes = 12 * state.count_parameters(shapes)
  optimizer = optim.OptimizerSettings()
  resolve = lambda: auto_mesh.resolve(MeshSettings(auto=True), build, optimizer, (16,), 2)
  assert resolve() == MeshSettings(8, 1, 1) and 'not known' in said[0]
  # In memory of which the state is 60 %: a fifth, or less, where four share it.
  monkeypatch.setattr(auto_mesh, 'device_memory', lambda device: 2**20)
  monkeypatch.setattr(auto_mesh, '_STATE_SHARE', nbytes / 2**20 / 3)
  assert resolve() == MeshSettings(2, 4, 1)
  assert len(said) == 2 and said[1].startswith('mesh.auto: data 2, fsdp 4, model 1: the state of')
  asked = MeshSettings(1, 2, 4)
  assert auto_mesh.resolve(asked, build, optimizer, (16,), 2) is asked and len(said) == 2


def test_auto_and_sizes_of_ones_own_do_not_go_together():
  with pytest.raises(MeshError, match='leave these out, or mesh.auto'):
    MeshSettings(fsdp=2, auto=True)


@pytest.mark.parametrize('kind, stats, nbytes', [
    ('TPU v5 lite', {'bytes_limit': 5, 'bytes_in_use': 1}, 5),
    ('TPU v5 lite', None, int(15.75 * GIB)), ('TPU v5', {}, int(94.75 * GIB)),
    ('TPU v6 lite', None, int(31.25 * GIB)), ('TPU v4', None, int(31.75 * GIB)), ('cpu', None, 0)])
def test_memory_of_a_device(kind, stats, nbytes):
  device = type('Device', (), {'device_kind': kind, 'memory_stats': lambda self: stats})()
  assert auto_mesh.device_memory(device) == nbytes


# --- What a device holds -------------------------------------------------------------------------


@pytest.mark.parametrize('dtype, width', [('float32', 4), ('bfloat16', 2)])
@pytest.mark.parametrize('axes', [(8, 1, 1), (1, 8, 1), (2, 2, 2)])
def test_bytes_of_a_device_follow_from_the_shardings(axes, dtype, width):
  _, shapes = state.split(build)
  optimizer = optim.make(optim.OptimizerSettings(moments_dtype=dtype), shapes)
  like = state.abstract(shapes, optimizer, sharding.make_mesh(MeshSettings(*axes)))
  parameters = sharding.bytes_per_device(like.params)
  # Two moments laid out as the parameters, and two counts.
  assert sharding.bytes_per_device(like.opt_state) == parameters * 2 * width // 4 + 2 * 4
  whole = 4 * state.count_parameters(shapes)
  assert parameters == whole if axes == (8, 1, 1) else parameters < whole / 3


def test_bytes_are_those_that_are_there():
  mesh = sharding.make_mesh(MeshSettings(2, 2, 2))
  names = {'layers/output/kernel': (2, 64, 32), 'masked_lm/bias': (256,),
           'odd/masked_lm/bias': (7,)}
  tree = {name: jnp.ones(shape) for name, shape in names.items()}
  tree = jax.device_put(tree, sharding.shardings(tree, mesh))
  there = sum(shard.data.nbytes for leaf in jax.tree.leaves(tree)
              for shard in leaf.addressable_shards if shard.device == jax.devices()[0])
  assert sharding.bytes_per_device(tree) == there == 4 * (2 * 64 * 32 // 4 + 256 // 4 + 7)
