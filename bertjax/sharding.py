"""The mesh, and one visible table that says how every parameter lies on it."""

import dataclasses
import math
import re
from collections.abc import Mapping

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int, Shaped

AXES = ('data', 'fsdp', 'model')
ROWS = ('data', 'fsdp')  # the batch axis of activations is split over both

# Path of a parameter -> the axes it is split over. The first match wins; optimizer moments have
# paths that end in their parameter's path, so the same table holds for them. Kernels of the layers
# are stacked: [layer, in, out]. The word table is split on one axis only: on two, XLA
# rematerialises the lookup.
RULES: tuple[tuple[str, PartitionSpec], ...] = (
    (r'word_embeddings/embedding$', PartitionSpec(('fsdp', 'model'), None)),
    (r'(position|token_type)_embeddings/embedding$', PartitionSpec()),
    (r'layers/attention/(query|key|value)/kernel$', PartitionSpec(None, 'fsdp', 'model')),
    (r'layers/attention/(query|key|value)/bias$', PartitionSpec(None, 'model')),
    (r'layers/attention/output/kernel$', PartitionSpec(None, 'model', 'fsdp')),
    (r'layers/intermediate/kernel$', PartitionSpec(None, 'fsdp', 'model')),
    (r'layers/intermediate/bias$', PartitionSpec(None, 'model')),
    (r'layers/output/kernel$', PartitionSpec(None, 'model', 'fsdp')),
    (r'(pooler|masked_lm/dense)/kernel$', PartitionSpec('fsdp', None)),
    (r'masked_lm/bias$', PartitionSpec(('fsdp', 'model'))),
    (r'.*', PartitionSpec()),
)


class MeshError(ValueError):
  """A mesh that the devices cannot form; the message says the mend."""


@dataclasses.dataclass(frozen=True)
class MeshSettings:
  """Devices along each axis.

  Attributes:
    data: devices that share nothing but the batch; one axis may be -1, for as many as there are.
    fsdp: devices that share parameters and optimizer state, and the batch.
    model: devices that share every layer, and every row.
    auto: all three follow from the sizes of model, batch and devices (auto_mesh.py).

  Raises:
    MeshError: `auto` and an axis are both set.
  """

  data: int = -1
  fsdp: int = 1
  model: int = 1
  auto: bool = False

  def __post_init__(self):
    if self.auto and (self.data, self.fsdp, self.model) != (-1, 1, 1):
      raise MeshError(f'mesh.auto chooses all axes, but data {self.data}, fsdp {self.fsdp}, model '
                      f'{self.model} are set; leave these out, or mesh.auto')


def make_mesh(settings: MeshSettings, devices: list | None = None) -> Mesh:
  """The mesh over all devices (or those given).

  Args:
    settings: the sizes; `auto` must have been resolved.
    devices: of one slice or of several.

  Raises:
    MeshError: the axes do not multiply to the number of devices, or the data axis does not run
      across the slices, with the mend.
  """
  assert not settings.auto
  devices = jax.devices() if devices is None else devices
  sizes = [getattr(settings, axis) for axis in AXES]
  fixed = int(np.prod([size for size in sizes if size != -1]))
  if any(size == 0 or size < -1 for size in sizes) or sizes.count(-1) > 1:
    raise MeshError(
        f'mesh {dict(zip(AXES, sizes, strict=True))}: sizes are positive, one may be -1')
  if len(devices) % fixed or (-1 not in sizes and fixed != len(devices)):
    raise MeshError(
        f'mesh {dict(zip(AXES, sizes, strict=True))} does not fit {len(devices)} devices; '
        f'set one axis to -1 and let the others divide {len(devices)}')
  sizes = [len(devices) // fixed if size == -1 else size for size in sizes]
  return Mesh(arrange(sizes, devices), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def count_slices(devices: list) -> int:
  """Groups of devices with a fast network of their own: TPU slices, or the nodes of a cluster of
  GPUs, which JAX numbers likewise."""
  return len({getattr(device, 'slice_index', 0) for device in devices})


def arrange(sizes: list[int], devices: list) -> np.ndarray:
  """The devices [data, fsdp, model] such that neighbours are close.

  Only the data axis, which communicates once a step, runs across slices.

  Raises:
    MeshError: the slices cannot share the data axis.
  """
  slices = count_slices(devices)
  if slices == 1:
    return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
  data, *within = sizes
  if data % slices:
    raise MeshError(
        f'mesh {dict(zip(AXES, sizes, strict=True))}: the {len(devices)} devices are in {slices} '
        f'slices (or nodes), and only the data axis may run across them; set fsdp * model to a '
        f'divisor of {len(devices) // slices} and data to -1')
  try:
    return mesh_utils.create_hybrid_device_mesh(
        (data // slices, *within), (slices, 1, 1), devices, allow_split_physical_axes=True)
  except ValueError as error:  # slices of unequal size
    raise MeshError(f'{slices} slices: {error}; take slices of the same size') from error


def spec_of(path: str, shape: tuple[int, ...], mesh: Mesh | AbstractMesh) -> PartitionSpec:
  """The PartitionSpec of one array; an axis that the mesh does not divide stays whole."""
  spec = next(spec for pattern, spec in RULES if re.search(pattern, path))
  if len(spec) > len(shape):  # a scalar of the optimizer
    return PartitionSpec()
  parts = []
  for size, names in zip(shape, tuple(spec) + (None,) * (len(shape) - len(spec)), strict=True):
    names = (names,) if isinstance(names, str) else names
    ways = int(np.prod([mesh.shape[name] for name in names])) if names else 1
    parts.append(names if names and size % ways == 0 else None)
  return PartitionSpec(*parts)


def shardings(tree, mesh: Mesh):
  """NamedShardings for a tree of arrays (or shapes), by the table."""
  def one(path, leaf):
    name = jax.tree_util.keystr(path, simple=True, separator='/')
    return NamedSharding(mesh, spec_of(name, leaf.shape, mesh))

  return jax.tree_util.tree_map_with_path(one, tree)


def bytes_per_device(tree) -> int:
  """What one device holds of a tree of arrays, or of shapes with shardings."""
  return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
             for leaf in jax.tree.leaves(tree))


def batch_sharding(mesh: Mesh) -> NamedSharding:
  """Of arrays whose leading axis is the batch."""
  return NamedSharding(mesh, PartitionSpec(ROWS))


def row_ways(sizes: Mapping[str, int]) -> int:
  """Over how many groups of devices a mesh of these sizes (`mesh.shape`) splits the batch axis."""
  return math.prod(sizes[axis] for axis in ROWS)


def own_rows(mesh: Mesh, num_rows: int) -> Int[np.ndarray, 'b']:
  """Which rows of a global batch the devices of this process hold, in ascending order.

  Not simply the process's turn: where the mesh follows the wires of a TPU, the devices of a host
  lie scattered over the batch axis, and where the model axis runs across hosts, several hosts hold
  the same rows.

  Args:
    mesh: a mesh with the axes 'data' and 'fsdp'.
    num_rows: of the global batch, divisible by `row_ways(mesh.shape)`.
  """
  shares = batch_sharding(mesh).addressable_devices_indices_map((num_rows,)).values()
  blocks = sorted({rows.indices(num_rows) for (rows,) in shares})
  return np.concatenate([np.arange(*block) for block in blocks])


def constrain_rows(x: Shaped[Array, 'rows *rest']) -> Shaped[Array, 'rows *rest']:
  """Holds XLA to splitting the leading axis over the batch's mesh axes; nothing outside a mesh."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    return x
  return jax.lax.with_sharding_constraint(x, PartitionSpec(ROWS))


def gather(
    x: Shaped[Array, '*shape'] | Shaped[np.ndarray, '*shape'], path: str
) -> Shaped[Array, '*shape'] | Shaped[np.ndarray, '*shape']:
  """A parameter as it is used: its fsdp shares brought together; its gradient is shared out again.

  Left alone, XLA moves the smaller thing per product and so the wrong one in all: it passes shares
  of a kernel around while it adds up the product in pieces, which reads and writes the sum once a
  piece, and it looks every token of the global batch up in each share of the word table.

  Args:
    x: the parameter (of a layer: without the axis of layers).
    path: as in RULES.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or mesh.shape['fsdp'] == 1:
    return x
  stacked = (1,) if 'layers/' in path else ()
  shared = PartitionSpec(*spec_of(path, stacked + x.shape, mesh)[len(stacked):])
  split = [(names,) if isinstance(names, str) else names or () for names in shared]
  whole = PartitionSpec(*(tuple(name for name in names if name != 'fsdp') for names in split))

  @jax.custom_vjp
  def gathered(x):
    return jax.lax.with_sharding_constraint(x, whole)

  def backward(_, gradient):
    gradient = jax.lax.with_sharding_constraint(gradient, whole)
    return (jax.lax.with_sharding_constraint(gradient, shared),)

  gathered.defvjp(lambda x: (gathered(x), None), backward)
  return gathered(x)


def gather_layer(layer, dtype: str):
  """The kernels of a layer (a module or a tree) in the type of the computation, gathered."""
  def one(path, leaf):
    name = jax.tree_util.keystr(path, simple=True, separator='/').removesuffix('/value')
    return gather(leaf.astype(dtype), f'layers/{name}') if leaf.ndim > 1 else leaf

  return jax.tree_util.tree_map_with_path(one, layer)


def constrain_parts(x: Array) -> Array:
  """As `constrain_rows`, for [part, row, ...]: the parts of an accumulated batch are not split."""
  if jax.sharding.get_abstract_mesh().empty:
    return x
  return jax.lax.with_sharding_constraint(x, PartitionSpec(None, ROWS))
