"""Keeping the memory that a step on the CPU frees, for the next step.

XLA takes the temporary arrays of a step from the C library and frees them when the step ends. glibc
returns blocks of that size to the kernel, which must hand out zeroed pages again, one fault for
each 4 KiB: of a CPU step of a small model that is a third of the time. To be called before JAX is
imported, since threads choose their arenas when they start.
"""

import ctypes
import os
import pathlib

_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8  # from glibc's malloc.h
_ACCELERATORS = ('nvidia0', 'accel0', 'vfio/0', 'kfd')


def keep_freed_memory() -> bool:
  """Tells glibc to keep freed blocks if JAX will compute on the CPU; returns whether it does so.

  The process then stays as large as its largest step. On other C libraries, and where JAX has an
  accelerator, nothing is changed.
  """
  platforms = os.environ.get('JAX_PLATFORMS', '')
  accelerated = any(pathlib.Path('/dev', name).exists() for name in _ACCELERATORS)
  if platforms != 'cpu' and (platforms or accelerated):
    return False
  mallopt = getattr(ctypes.CDLL(None), 'mallopt', None)
  if mallopt is None:
    return False
  # One arena: the others are limited to 64 MiB heaps and would map larger blocks one by one.
  return all((mallopt(_M_MMAP_MAX, 0), mallopt(_M_TRIM_THRESHOLD, -1), mallopt(_M_ARENA_MAX, 1)))
