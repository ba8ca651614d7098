"""One function, `attend`, for attention over padded or packed rows, and the choice of its kernel.

  xla      plain JAX: everywhere, and the only one that drops attention weights
  cudnn    NVIDIA's fused kernel, on a GPU
  splash   JAX's Pallas kernel, on a TPU

All three compute the same; none but `xla` holds a row's [T, T] scores in memory.
"""

import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, UInt

from bertjax import dropout as dropout_lib
from bertjax import sharding

IMPLEMENTATIONS = ('auto', 'xla', 'cudnn', 'splash')
# What a remat policy may save of the splash kernel instead of running it again.
SPLASH_RESIDUALS = 'splash_residuals'
_PLATFORM = {'cudnn': 'gpu', 'splash': 'tpu'}
_SPLASH_BLOCKS = (512, 384, 256, 128)  # rows and columns of scores that are in fast memory at once

# Large and finite: selected (never added) in float32, so a masked key weighs exactly 0, and a row
# in which every key is masked stays finite (B060, B061, B062).
_MASKED_SCORE = -1e30


class AttentionError(ValueError):
  """An implementation that cannot do what the configuration asks; the message says the mend."""


def attend(
    query: Float[Array, 'B T N H'],
    key: Float[Array, 'B T N H'],
    value: Float[Array, 'B T N H'],
    mask: Bool[Array, 'B T'],
    dropout_rate: float = 0.0,
    dropout_keys: UInt[Array, 'B'] | None = None,
    implementation: str = 'xla',
    segment_ids: Int[Array, 'B T'] | None = None,
) -> Float[Array, 'B T N H']:
  """Softmax attention of every token over the tokens of its row that it may see.

  The softmax runs in float32 whatever the compute type.

  Args:
    query: queries, one head beside the other.
    key: keys.
    value: values.
    mask: True where a token may be attended to.
    dropout_rate: share of attention weights set to zero in training.
    dropout_keys: see `dropout.dropout`; None in evaluation.
    implementation: from `choose`; 'auto', which nobody has resolved, is 'xla', which runs anywhere.
    segment_ids: of packed rows: a token sees those with its own number, and padding is 0. None
      lets every token see all that `mask` allows.

  Returns:
    The attended values, in the type of `value`.

  Raises:
    AttentionError: a kernel that cannot drop attention weights is asked to.
  """
  if segment_ids is not None:
    segment_ids = jnp.where(mask, segment_ids, 0)
  if implementation in ('auto', 'xla'):
    return _xla(query, key, value, mask, dropout_rate, dropout_keys, segment_ids)
  if dropout_rate and dropout_keys is not None:
    raise AttentionError(_no_dropout(implementation, dropout_rate))
  if implementation == 'cudnn':
    return _cudnn(query, key, value, mask, segment_ids)
  # Without packing, padding sees the real tokens, as with the others: the ids of queries are all 1.
  if segment_ids is None:
    return splash(query, key, value, jnp.ones(mask.shape, jnp.int32), mask.astype(jnp.int32))
  return splash(query, key, value, segment_ids, segment_ids)


def _visible(mask, segment_ids):
  """[B, 1, 1, T], or of packed rows [B, 1, T, T]."""
  if segment_ids is None:
    return mask[:, None, None, :]
  return segment_ids[:, None, :, None] == segment_ids[:, None, None, :]


def _xla(query, key, value, mask, dropout_rate, dropout_keys, segment_ids):
  # Explicit batched matrix products: XLA's CPU backend is slower on the equivalent einsum.
  query, key, value = (x.transpose(0, 2, 1, 3) for x in (query, key, value))  # [B, N, T, H]
  query = query * jnp.asarray(1 / math.sqrt(query.shape[-1]), query.dtype)
  scores = jnp.matmul(query, key.swapaxes(-1, -2), preferred_element_type=jnp.float32)
  scores = jnp.where(_visible(mask, segment_ids), scores, _MASKED_SCORE)
  weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
  weights = dropout_lib.dropout(weights, dropout_rate, dropout_keys)
  return jnp.matmul(weights, value).transpose(0, 2, 1, 3)


def _cudnn(query, key, value, mask, segment_ids):
  # As a mask and not as lengths: rows may hold padding anywhere, and a row of nothing but padding
  # must stay finite. cuDNN wants the query axis written out.
  rows, length = mask.shape
  visible = jnp.broadcast_to(_visible(mask, segment_ids), (rows, 1, length, length))
  return jax.nn.dot_product_attention(query, key, value, mask=visible, implementation='cudnn')


def splash(
    query: Float[Array, 'B T N H'],
    key: Float[Array, 'B T N H'],
    value: Float[Array, 'B T N H'],
    query_ids: Int[Array, 'B T'],
    key_ids: Int[Array, 'B T'],
    interpret: bool = False,
) -> Float[Array, 'B T N H']:
  """Attention with JAX's splash kernel; a key is visible where its id is that of the query.

  XLA cannot partition a kernel: under a mesh every device runs it on its rows and heads.

  Args:
    query: queries; T is a multiple of 128.
    key: keys.
    value: values.
    query_ids: a number for each query.
    key_ids: a number for each key.
    interpret: run the kernel as plain JAX, slowly and on any platform.
  """
  def local(query, key, value, query_ids, key_ids):
    query, key, value = (x.transpose(0, 2, 1, 3) for x in (query, key, value))  # [B, N, T, H]
    query = query * jnp.asarray(1 / math.sqrt(query.shape[-1]), query.dtype)
    run = _splash_kernel(*query.shape[1:3], interpret)
    return jax.vmap(run)(query, key, value, query_ids, key_ids).transpose(0, 2, 1, 3)

  if not jax.sharding.get_abstract_mesh().empty:
    heads = PartitionSpec(sharding.ROWS, None, 'model', None)
    ids = PartitionSpec(sharding.ROWS, None)
    # check_vma: a kernel's outputs do not say over which axes they vary.
    local = jax.shard_map(
        local, in_specs=(heads, heads, heads, ids, ids), out_specs=heads, check_vma=False)
  return local(query, key, value, query_ids, key_ids)


def _splash_kernel(num_heads: int, length: int, interpret: bool):
  """Attention of one row: (query, key, value [N, T, H], ids of queries, ids of keys [T])."""
  # Here, since Pallas takes most of a second to import.
  from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
  from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

  block = next(size for size in _SPLASH_BLOCKS if length % size == 0)
  # One backward kernel, not one for dq and one for dk and dv: it computes the scores once.
  sizes = kernels.BlockSizes(
      block_q=block, block_kv=block, block_kv_compute=block, block_q_dkv=block,
      block_kv_dkv=block, block_kv_dkv_compute=block, use_fused_bwd_kernel=True)
  everything = masks.MultiHeadMask([masks.FullMask((length, length))] * num_heads)
  kernel = kernels.make_splash_mha(
      everything, block_sizes=sizes, head_shards=1, q_seq_shards=1, interpret=interpret,
      residual_checkpoint_name=SPLASH_RESIDUALS)
  return lambda query, key, value, *ids: kernel(
      query, key, value, segment_ids=kernels.SegmentIds(*ids))


# --- The choice ----------------------------------------------------------------------------------


def row_multiple(implementation: str) -> int:
  """What divides the length of the rows that an implementation takes ('auto' takes any)."""
  return {'cudnn': 2, 'splash': _SPLASH_BLOCKS[-1]}.get(implementation, 1)


def choose(config, platform: str, *seq_lengths: int, model_ways: int = 1) -> str:
  """The implementation for a run: as the configuration says, or the best that can do it.

  Args:
    config: a model.BertConfig; read are `attention`, the attention dropout, sizes and type.
    platform: 'cpu', 'gpu' or 'tpu': that of the devices, not of the machine that compiles.
    seq_lengths: the lengths of rows in the run.
    model_ways: over how many devices the heads are split.

  Returns:
    'xla', 'cudnn' or 'splash'.

  Raises:
    AttentionError: the one that is asked for cannot do it, with the reason.
  """
  if config.attention == 'auto':
    kernel = _kernel_of(platform)
    can = kernel and not refusal(kernel, config, platform, *seq_lengths, model_ways=model_ways)
    return kernel if can else 'xla'
  reason = refusal(config.attention, config, platform, *seq_lengths, model_ways=model_ways)
  if reason:
    raise AttentionError(f"model.attention {config.attention}: {reason} (or take 'auto')")
  return config.attention


def describe(config, platform: str, *seq_lengths: int, model_ways: int = 1) -> str:
  """What `choose` says, and why, for the start-up block."""
  chosen = choose(config, platform, *seq_lengths, model_ways=model_ways)
  if config.attention != 'auto':
    return f'{chosen}, as asked for'
  kernel = _kernel_of(platform)
  if chosen == 'xla' and kernel:
    why = refusal(kernel, config, platform, *seq_lengths, model_ways=model_ways)
    return f'xla; not {kernel}: {why}'
  return f'{chosen}, for {platform}'


def refusal(
    implementation: str, config, platform: str, *seq_lengths: int, model_ways: int = 1
) -> str:
  """Why an implementation cannot do what the configuration asks, with the mend; '' if it can."""
  if implementation == 'xla':
    return ''
  if platform != _PLATFORM[implementation]:
    return f'it needs a {_PLATFORM[implementation].upper()}, and this is a {platform.upper()}'
  if config.attention_probs_dropout_prob:
    return _no_dropout(implementation, config.attention_probs_dropout_prob)
  if config.num_attention_heads % model_ways:
    return (f'{config.num_attention_heads} heads are not divisible by mesh.model {model_ways}; '
            'take a divisor')
  width = config.hidden_size // config.num_attention_heads
  if width % 8 or width > 128:
    return f'heads are {width} wide; it takes multiples of 8 up to 128'
  wanted = ('bfloat16', 'float16' if implementation == 'cudnn' else 'float32')
  if config.dtype not in wanted:
    return f'model.dtype is {config.dtype}; it computes in {" or ".join(wanted)}'
  step = row_multiple(implementation)
  odd = [length for length in seq_lengths if length % step]
  if odd:
    return f'rows of {odd[0]} tokens; it takes multiples of {step}'
  return ''


def _kernel_of(platform: str) -> str | None:
  return next((name for name, own in _PLATFORM.items() if own == platform), None)


def _no_dropout(implementation: str, rate: float) -> str:
  return (f'{implementation} cannot drop attention weights, and '
          f'model.attention_probs_dropout_prob is {rate}; set it to 0')
