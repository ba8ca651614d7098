"""One function, `attend`, for attention over padded rows."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, UInt

from bertjax import dropout as dropout_lib

# Large and finite: selected (never added) in float32, so a masked key weighs exactly 0, and a row
# in which every key is masked stays finite (B060, B061, B062).
_MASKED_SCORE = -1e30


def attend(
    query: Float[Array, 'B T N H'],
    key: Float[Array, 'B T N H'],
    value: Float[Array, 'B T N H'],
    mask: Bool[Array, 'B T'],
    dropout_rate: float = 0.0,
    dropout_keys: UInt[Array, 'B'] | None = None,
) -> Float[Array, 'B T N H']:
  """Softmax attention of every token over the tokens of its row that `mask` allows.

  The softmax runs in float32 whatever the compute type. Explicit batched matrix products: XLA's CPU
  backend is slower on the equivalent einsum.

  Args:
    query: queries, one head beside the other.
    key: keys.
    value: values.
    mask: True where a token may be attended to.
    dropout_rate: share of attention weights set to zero in training.
    dropout_keys: see `dropout.dropout`; None in evaluation.

  Returns:
    The attended values, in the type of `value`.
  """
  query, key, value = (x.transpose(0, 2, 1, 3) for x in (query, key, value))  # [B, N, T, H]
  query = query * jnp.asarray(1 / math.sqrt(query.shape[-1]), query.dtype)
  scores = jnp.matmul(query, key.swapaxes(-1, -2), preferred_element_type=jnp.float32)
  scores = jnp.where(mask[:, None, None, :], scores, _MASKED_SCORE)
  weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
  weights = dropout_lib.dropout(weights, dropout_rate, dropout_keys)
  return jnp.matmul(weights, value).transpose(0, 2, 1, 3)
