"""Dropout whose bits are a hash of (seed, step, layer, site, row, position in the row).

The same mask comes out on any mesh: a bit depends on where its element is in the *global* array,
never on the device that computes it. A counter hash is five times cheaper on a CPU than threefry,
and under auto-sharded `jit` no chip draws the mask of the whole batch, as it does with `rbg`.

The row of the batch and the position within the row are separate words of the hash: one 32-bit
counter over a whole attention tensor would wrap at large batches and repeat masks.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt

_GOLDEN = 0x9E3779B9  # 2**32 / golden ratio: consecutive counters land far apart


def mix(x: UInt[Array, '*s']) -> UInt[Array, '*s']:
  """A bijection of 32-bit words in which every input bit reaches every output bit
  (xorshift-multiply)."""
  x ^= x >> 16
  x *= jnp.uint32(0x7FEB352D)
  x ^= x >> 15
  x *= jnp.uint32(0x846CA68B)
  return x ^ (x >> 16)


def fold(
    key: UInt[Array, '*s'], data: int | Int[Array, '*d'] | UInt[Array, '*d']
) -> UInt[Array, '*s']:
  """A new key from `key` and a word, as `jax.random.fold_in` does for JAX's keys."""
  return mix(key ^ mix(jnp.asarray(data).astype(jnp.uint32) + jnp.uint32(_GOLDEN)))


def row_keys(
    seed: int | np.uint32 | UInt[Array, ''], step: Int[Array, ''], rows: int
) -> UInt[Array, '{rows}']:
  """A key for each row of the global batch of a step, into which layers and sites are folded."""
  key = fold(mix(jnp.asarray(seed).astype(jnp.uint32) + jnp.uint32(_GOLDEN)), step)
  return fold(jnp.broadcast_to(key, (rows,)), jnp.arange(rows, dtype=jnp.uint32))


def dropout(
    x: Float[Array, 'N *rest'], rate: float, keys: UInt[Array, 'B'] | None
) -> Float[Array, 'N *rest']:
  """Zeroes elements with probability `rate` and scales the others by 1 / (1 - rate).

  Args:
    x: activations; the leading axis is the batch, or the batch folded with tokens (N = B or B * T).
    rate: probability of a zero, in [0, 1).
    keys: a word for each row of the batch; None means no dropout (evaluation).

  Returns:
    An array like `x`.
  """
  if keys is None or rate == 0.0:
    return x
  size = math.prod(x.shape) // keys.shape[0]
  # Mixed before the two words meet, or a row whose key is a few counters away would repeat the mask
  # of another, shifted. The inner hash has no row axis and costs next to nothing.
  position = mix(jax.lax.iota(jnp.uint32, size) + jnp.uint32(_GOLDEN))
  bits = mix(keys[:, None] ^ position[None, :]).reshape(x.shape)
  keep_share = 1.0 - rate
  threshold = min(round(keep_share * 2**32), 2**32 - 1)
  return jnp.where(bits < jnp.uint32(threshold), x / jnp.asarray(keep_share, x.dtype), 0)
