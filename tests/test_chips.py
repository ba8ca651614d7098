"""What is known of accelerators, by what JAX calls them."""

import pytest

from bertjax import chips


@pytest.mark.parametrize(('kind', 'tera'), [
    ('TPU v2', 22.5), ('TPU v3', 61.5), ('TPU v4', 275), ('TPU v4 lite', 138),
    ('TPU v5 lite', 197), ('TPU v5p', 459), ('TPU v5', 459), ('TPU v6 lite', 918),
    ('NVIDIA A100-SXM4-80GB', 312), ('NVIDIA H100 80GB HBM3', 989), ('NVIDIA H100 PCIe', 756),
    ('NVIDIA H200', 989), ('NVIDIA B200', 2250), ('NVIDIA L4', 121),
    ('cpu', None), ('NVIDIA L40S', None), ('NVIDIA H200 MIG 1g.18gb', None), ('TPU v9', None),
])
def test_peak_flops(kind, tera):
  assert chips.peak_flops(kind) == (tera and tera * 1e12)


@pytest.mark.parametrize(('kind', 'gib'), [
    ('TPU v4', 31.75), ('TPU v4 lite', 7.75), ('TPU v5 lite', 15.75), ('TPU v5p', 94.75),
    ('TPU v6 lite', 31.25), ('NVIDIA H200', 0)])
def test_memory_that_programs_may_use(kind, gib):
  assert chips.find(kind).memory == gib * 2**30
