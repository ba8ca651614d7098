"""What is known of accelerators that their runtimes do not say."""

import re
from typing import NamedTuple

_GIB = 2**30


class Chip(NamedTuple):
  """One JAX device.

  Attributes:
    peak_flops: dense bfloat16 FLOP/s.
    memory: bytes that a program may use; 0 where the runtime says it.
    bandwidth: of the memory, bytes/s; 0 where nothing needs it.
  """

  peak_flops: float
  memory: float = 0
  bandwidth: float = 0


# By the start of device_kind; the first match counts. Sources: the vendors' data sheets (for GPUs
# half of the figure "with sparsity"), cloud.google.com/tpu/docs/system-architecture-tpu-vm. Of a
# TPU's memory XLA keeps a quarter of a GiB.
_CHIPS = (
    ('TPU v2', Chip(22.5e12)),  # a JAX device is one of the two cores of a v2 or v3 chip
    ('TPU v3', Chip(61.5e12)),
    ('TPU v4 lite', Chip(138e12, 7.75 * _GIB)),
    ('TPU v4', Chip(275e12, 31.75 * _GIB, 1228e9)),
    ('TPU v5 lite', Chip(197e12, 15.75 * _GIB, 819e9)),
    ('TPU v5e', Chip(197e12, 15.75 * _GIB, 819e9)),
    ('TPU v5', Chip(459e12, 94.75 * _GIB, 2765e9)),  # v5p
    ('TPU v6', Chip(918e12, 31.25 * _GIB, 1640e9)),  # v6e
    ('TPU7x', Chip(1153.5e12)),  # one of the two cores
    ('NVIDIA A100', Chip(312e12)),
    ('NVIDIA H100 PCIe', Chip(756e12)),
    ('NVIDIA H100 NVL', Chip(835e12)),
    ('NVIDIA H100', Chip(989e12)),
    ('NVIDIA GH200', Chip(989e12)),
    ('NVIDIA H200 NVL', Chip(835e12)),
    ('NVIDIA H200', Chip(989e12)),
    ('NVIDIA B200', Chip(2250e12)),
    ('NVIDIA GB200', Chip(2500e12)),
    ('NVIDIA L4', Chip(121e12)),
)


def find(device_kind: str) -> Chip | None:
  """The chip of a jax.Device's device_kind; None if it is not known (CPUs, slices of a GPU)."""
  if re.search(r'\bMIG\b', device_kind):
    return None
  for start, chip in _CHIPS:
    # 'NVIDIA L4' must not be taken for the start of 'NVIDIA L40S'.
    if re.match(re.escape(start) + r'(?!\d)', device_kind):
      return chip
  return None


def peak_flops(device_kind: str) -> float | None:
  """Dense bfloat16 FLOP/s of one device; None where it is not known."""
  chip = find(device_kind)
  return chip and chip.peak_flops
