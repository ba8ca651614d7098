"""The BERT encoder (Devlin et al. 2018, section 3) in Flax NNX.

Modules declare parameters and nothing else: no dropout state, no train/eval switch. Everything that
trains is plain JAX over the nested dict of arrays that `init` returns.

Shapes: B batch, T tokens, D hidden_size, N heads, H = D / N, F intermediate_size, V padded
vocabulary, L layers, P predictions. Inside the encoder tokens are folded, [B * T, D]: a dense layer
is then one matrix product, and its weight gradient contracts one axis, which XLA does fast on every
backend.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, UInt

from bertjax import attention, sharding
from bertjax.dropout import dropout, fold

ACTIVATIONS: dict[str, Callable] = {
    'gelu': lambda x: jax.nn.gelu(x, approximate=False),  # the exact erf form, as Transformers
    'gelu_tanh': lambda x: jax.nn.gelu(x, approximate=True),  # Google's code
    'relu': jax.nn.relu,
    'silu': jax.nn.silu,
}
_DENSE = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
# What is kept of a layer for its backward pass; the rest is computed again.
REMAT_POLICIES = {
    'none': None,  # everything is kept
    # Outputs of dense layers and of the splash kernel: nothing but elementwise work is repeated.
    'dense_attention': jax.checkpoint_policies.save_from_both_policies(
        _DENSE, jax.checkpoint_policies.save_only_these_names(attention.SPLASH_RESIDUALS)),
    'dense': _DENSE,  # attention is repeated: 8 % of a layer of BERT-large at length 512
    'dots': jax.checkpoint_policies.dots_saveable,  # also the scores of `xla` attention
    'full': jax.checkpoint_policies.nothing_saveable,
}
DTYPES = ('float32', 'bfloat16', 'float16')
VOCAB_MULTIPLE = 128  # rows of the word table are padded to a multiple of this, for matrix units


@dataclasses.dataclass(frozen=True)
class BertConfig:
  """Sizes and rates of the encoder; the field names are those of Google's bert_config.json.

  `dtype`, `remat`, `scan_unroll` and `attention` are speed settings, which never change a
  checkpoint. `attention` is 'auto' or an implementation; jobs resolve it with `attention.choose`.

  Raises:
    ValueError: sizes that do not fit together, with the mend.
  """

  vocab_size: int
  hidden_size: int = 768
  num_hidden_layers: int = 12
  num_attention_heads: int = 12
  intermediate_size: int = 3072
  hidden_act: str = 'gelu'
  hidden_dropout_prob: float = 0.1
  attention_probs_dropout_prob: float = 0.1
  max_position_embeddings: int = 512
  type_vocab_size: int = 2
  initializer_range: float = 0.02
  layer_norm_eps: float = 1e-12
  dtype: str = 'float32'
  remat: str = 'none'
  scan_unroll: int = 1
  attention: str = 'auto'

  def __post_init__(self):
    for name in ('vocab_size', 'hidden_size', 'num_hidden_layers', 'num_attention_heads',
                 'intermediate_size', 'max_position_embeddings', 'type_vocab_size', 'scan_unroll'):
      if getattr(self, name) < 1:
        raise ValueError(f'model.{name} is {getattr(self, name)}; it must be at least 1')
    if self.hidden_size % self.num_attention_heads:
      raise ValueError(
          f'model.hidden_size {self.hidden_size} is not divisible by model.num_attention_heads '
          f'{self.num_attention_heads}; try hidden_size '
          f'{-(-self.hidden_size // self.num_attention_heads) * self.num_attention_heads}')
    for name, known in (('hidden_act', ACTIVATIONS), ('remat', REMAT_POLICIES),
                        ('dtype', DTYPES), ('attention', attention.IMPLEMENTATIONS)):
      if getattr(self, name) not in known:
        raise ValueError(f'model.{name} {getattr(self, name)!r} is not one of {", ".join(known)}')
    for name in ('hidden_dropout_prob', 'attention_probs_dropout_prob'):
      if not 0 <= getattr(self, name) < 1:
        raise ValueError(f'model.{name} is {getattr(self, name)}; it must be in [0, 1)')

  @property
  def padded_vocab_size(self) -> int:
    return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def to_store(config: BertConfig) -> dict[str, Any]:
  """As checkpoints hold it. Which attention kernel trained a model is no part of it: the next
  machine may not have it."""
  return dataclasses.asdict(config) | {'attention': 'auto'}


def _normal(config: BertConfig):
  # Truncated at two standard deviations, not rescaled: TensorFlow's truncated_normal_initializer.
  return nnx.initializers.truncated_normal(config.initializer_range)


class Dense(nnx.Module):
  """x @ kernel + bias in the type of `x`; the parameters stay float32."""

  def __init__(
      self, config: BertConfig, inputs: int, outputs: int, rngs: nnx.Rngs, initializer=None
  ):
    draw = initializer or _normal(config)
    self.kernel = nnx.Param(draw(rngs.params(), (inputs, outputs), jnp.float32))
    self.bias = nnx.Param(jnp.zeros(outputs, jnp.float32))

  def __call__(self, x: Float[Array, '*rows I']) -> Float[Array, '*rows O']:
    return x @ self.kernel[...].astype(x.dtype) + self.bias[...].astype(x.dtype)


class LayerNorm(nnx.Module):
  """Layer normalisation over the last axis. Statistics in float32: eps 1e-12 vanishes below
  (B063)."""

  def __init__(self, config: BertConfig):
    self.scale = nnx.Param(jnp.ones(config.hidden_size, jnp.float32))
    self.bias = nnx.Param(jnp.zeros(config.hidden_size, jnp.float32))
    self.eps = config.layer_norm_eps

  def __call__(self, x: Float[Array, '*rows D']) -> Float[Array, '*rows D']:
    wide = x.astype(jnp.float32)
    wide -= wide.mean(-1, keepdims=True)
    variance = jnp.square(wide).mean(-1, keepdims=True)
    normal = wide * jax.lax.rsqrt(variance + self.eps)
    return (normal * self.scale[...] + self.bias[...]).astype(x.dtype)


class Embedding(nnx.Module):
  """A table of vectors, one a row; rows above `used` only pad it and are zero for ever."""

  def __init__(self, config: BertConfig, rows: int, rngs: nnx.Rngs, used: int | None = None):
    table = _normal(config)(rngs.params(), (rows, config.hidden_size), jnp.float32)
    if used is not None:
      table = jnp.where(jnp.arange(rows)[:, None] < used, table, 0)
    self.embedding = nnx.Param(table)


class Embeddings(nnx.Module):
  """Word + position + segment, normalised (paper, figure 2)."""

  def __init__(self, config: BertConfig, rngs: nnx.Rngs):
    self.config = config
    self.word_embeddings = Embedding(config, config.padded_vocab_size, rngs, config.vocab_size)
    self.position_embeddings = Embedding(config, config.max_position_embeddings, rngs)
    self.token_type_embeddings = Embedding(config, config.type_vocab_size, rngs)
    self.layer_norm = LayerNorm(config)

  @jax.named_scope('embeddings')
  def __call__(
      self,
      input_ids: Int[Array, 'B T'],
      token_type_ids: Int[Array, 'B T'],
      dropout_keys: UInt[Array, 'B'] | None,
      position_ids: Int[Array, 'B T'] | None = None,
  ) -> Float[Array, 'BT D']:
    dtype, (rows, length) = self.config.dtype, input_ids.shape
    table = self.word_embeddings.embedding[...]
    words = sharding.gather(table, 'word_embeddings/embedding')[input_ids]
    positions = self.position_embeddings.embedding[...]
    positions = positions[:length] if position_ids is None else positions[position_ids]
    # A product with one-hot rows: the table is tiny, and its gradient needs no scatter.
    types = jax.nn.one_hot(token_type_ids, self.config.type_vocab_size, dtype=jnp.float32)
    types = types @ self.token_type_embeddings.embedding[...]
    x = self.layer_norm(words + positions + types).astype(dtype)
    x = dropout(x, self.config.hidden_dropout_prob, dropout_keys)
    return x.reshape(rows * length, -1)


class Attention(nnx.Module):
  """Multi-head self-attention with its residual and normalisation (post-LN)."""

  def __init__(self, config: BertConfig, rngs: nnx.Rngs):
    self.config = config
    width = config.hidden_size
    self.query = Dense(config, width, width, rngs)
    self.key = Dense(config, width, width, rngs)
    self.value = Dense(config, width, width, rngs)
    self.output = Dense(config, width, width, rngs)
    self.layer_norm = LayerNorm(config)

  @jax.named_scope('attention')
  def __call__(
      self,
      x: Float[Array, 'BT D'],
      mask: Bool[Array, 'B T'],
      dropout_keys: UInt[Array, 'B'] | None,
      segment_ids: Int[Array, 'B T'] | None = None,
  ) -> Float[Array, 'BT D']:
    config, (rows, length) = self.config, mask.shape
    keys = (None, None) if dropout_keys is None else (fold(dropout_keys, 0), fold(dropout_keys, 1))
    heads = (rows, length, config.num_attention_heads, -1)
    attended = attention.attend(
        self.query(x).reshape(heads), self.key(x).reshape(heads), self.value(x).reshape(heads),
        mask, config.attention_probs_dropout_prob, keys[0], config.attention, segment_ids)
    out = self.output(attended.reshape(x.shape))
    return self.layer_norm(x + dropout(out, config.hidden_dropout_prob, keys[1]))


class Layer(nnx.Module):
  """Attention, then the feed-forward network; each with residual and normalisation after it."""

  def __init__(self, config: BertConfig, rngs: nnx.Rngs):
    self.config = config
    self.attention = Attention(config, rngs)
    self.intermediate = Dense(config, config.hidden_size, config.intermediate_size, rngs)
    self.output = Dense(config, config.intermediate_size, config.hidden_size, rngs)
    self.output_layer_norm = LayerNorm(config)

  @jax.named_scope('layer')
  def __call__(
      self,
      x: Float[Array, 'BT D'],
      mask: Bool[Array, 'B T'],
      dropout_keys: UInt[Array, 'B'] | None,
      segment_ids: Int[Array, 'B T'] | None = None,
  ) -> Float[Array, 'BT D']:
    keys = (None, None) if dropout_keys is None else (fold(dropout_keys, 0), fold(dropout_keys, 1))
    x = self.attention(x, mask, keys[0], segment_ids)
    hidden = ACTIVATIONS[self.config.hidden_act](self.intermediate(x))
    out = dropout(self.output(hidden), self.config.hidden_dropout_prob, keys[1])
    return self.output_layer_norm(x + out)


class Encoder(nnx.Module):
  """The layers, stacked on a leading axis and run with `lax.scan`: they are compiled once."""

  def __init__(self, config: BertConfig, rngs: nnx.Rngs):
    self.config = config
    keys = jax.random.split(rngs.params(), config.num_hidden_layers)
    self.layers = jax.vmap(lambda key: Layer(config, rngs=nnx.Rngs(params=key)))(keys)

  def __call__(
      self,
      x: Float[Array, 'BT D'],
      mask: Bool[Array, 'B T'],
      dropout_keys: UInt[Array, 'B'] | None,
      every_layer: bool = False,
      segment_ids: Int[Array, 'B T'] | None = None,
  ) -> tuple[Float[Array, 'BT D'], Float[Array, 'L BT D'] | None]:
    """Returns the last layer's output and, on request, the output of every layer."""
    config = self.config

    def body(x, scanned):
      layer, index = scanned
      layer = sharding.gather_layer(layer, config.dtype)
      key = None if dropout_keys is None else fold(dropout_keys, index)
      x = sharding.constrain_rows(layer(x, mask, key, segment_ids))
      return x, (x if every_layer else None)

    if config.remat != 'none':
      policy = REMAT_POLICIES[config.remat]
      body = jax.checkpoint(body, policy=policy, prevent_cse=False)
    indices = jnp.arange(config.num_hidden_layers, dtype=jnp.uint32)
    unroll = min(config.scan_unroll, config.num_hidden_layers)
    return jax.lax.scan(body, x, (self.layers, indices), unroll=unroll)


class Bert(nnx.Module):
  """The encoder with its embeddings and, unless its head reads tokens only, its pooler."""

  def __init__(self, config: BertConfig, rngs: nnx.Rngs, pooler: bool = True):
    self.config = config
    self.embeddings = Embeddings(config, rngs)
    self.encoder = Encoder(config, rngs)
    if pooler:
      self.pooler = Dense(config, config.hidden_size, config.hidden_size, rngs)

  def __call__(
      self,
      input_ids: Int[Array, 'B T'],
      token_type_ids: Int[Array, 'B T'],
      attention_mask: Int[Array, 'B T'],
      dropout_keys: UInt[Array, 'B'] | None = None,
      segment_ids: Int[Array, 'B T'] | None = None,
      position_ids: Int[Array, 'B T'] | None = None,
  ) -> Float[Array, 'B T D']:
    """Encodes rows of tokens.

    Args:
      input_ids: ids below `vocab_size`; T at most `max_position_embeddings`.
      token_type_ids: segment of each token.
      attention_mask: 1 for real tokens, 0 for padding.
      dropout_keys: from `dropout.row_keys` in training; None in evaluation.
      segment_ids: of packed rows: which of a row's texts a token belongs to, from 1; 0 for padding.
        A token sees those of its own text.
      position_ids: of packed rows: the position of a token in its text; None counts along the row.

    Returns:
      The last hidden states.

    Raises:
      ValueError: rows longer than the position table.
    """
    hidden, _ = self._encode(
        input_ids, token_type_ids, attention_mask, dropout_keys, segment_ids=segment_ids,
        position_ids=position_ids)
    return hidden.reshape(*input_ids.shape, -1)

  def hidden_states(
      self,
      input_ids: Int[Array, 'B T'],
      token_type_ids: Int[Array, 'B T'],
      attention_mask: Int[Array, 'B T'],
      dropout_keys: UInt[Array, 'B'] | None = None,
  ) -> Float[Array, 'layers B T D']:
    """The embeddings' output and that of every layer, [L + 1, B, T, D]."""
    embedded, layers = self._encode(input_ids, token_type_ids, attention_mask, dropout_keys, True)
    every = jnp.concatenate([embedded[None], layers])
    return every.reshape(-1, *input_ids.shape, embedded.shape[-1])

  def pool(self, first: Float[Array, 'N D']) -> Float[Array, 'N D']:
    """The pooled vectors: tanh of a dense layer on the last hidden states at [CLS]."""
    return jnp.tanh(self.pooler(first))

  def _encode(self, input_ids, token_type_ids, attention_mask, dropout_keys, every_layer=False,
              segment_ids=None, position_ids=None):
    if input_ids.shape[1] > self.config.max_position_embeddings:
      raise ValueError(
          f'rows of {input_ids.shape[1]} tokens, but model.max_position_embeddings is '
          f'{self.config.max_position_embeddings}; shorten the rows or raise it')
    keys = (None, None) if dropout_keys is None else (fold(dropout_keys, 0), fold(dropout_keys, 1))
    embedded = self.embeddings(input_ids, token_type_ids, keys[0], position_ids)
    embedded = sharding.constrain_rows(embedded)
    hidden, layers = self.encoder(
        embedded, attention_mask > 0, keys[1], every_layer, segment_ids)
    return (embedded, layers) if every_layer else (hidden, None)
