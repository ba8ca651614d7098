"""Heads on the encoder, and the models that join the two."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, UInt

from bertjax import sharding
from bertjax.dropout import dropout, fold
from bertjax.model import ACTIVATIONS, Bert, BertConfig, Dense, LayerNorm

# Bias of the rows that only pad the vocabulary: exp() of it is 0, so they take no probability mass.
_NEVER = -1e30


class MaskedLM(nnx.Module):
  """Masked-LM head: dense, activation, normalisation, then the word table itself plus a bias."""

  def __init__(self, config: BertConfig, rngs: nnx.Rngs):
    self.config = config
    self.dense = Dense(config, config.hidden_size, config.hidden_size, rngs)
    self.layer_norm = LayerNorm(config)
    self.bias = nnx.Param(jnp.zeros(config.padded_vocab_size, jnp.float32))

  @jax.named_scope('masked_lm')
  def __call__(
      self, hidden: Float[Array, 'M D'], word_embeddings: Float[Array, 'V D']
  ) -> Float[Array, 'M V']:
    """Logits over the padded vocabulary in float32; a padding row can never win.

    Args:
      hidden: the hidden states at the predicted positions, rows folded.
      word_embeddings: the encoder's own table (tied).
    """
    config = self.config
    hidden = self.layer_norm(ACTIVATIONS[config.hidden_act](self.dense(hidden)))
    logits = jnp.matmul(
        hidden, word_embeddings.astype(hidden.dtype).T, preferred_element_type=jnp.float32)
    real = jnp.arange(config.padded_vocab_size) < config.vocab_size
    return _add_bias(logits, jnp.where(real, self.bias[...], _NEVER))


@jax.custom_vjp
def _add_bias(x: Float[Array, 'M V'], bias: Float[Array, 'V']) -> Float[Array, 'M V']:
  """x + bias, whose gradient is summed up by a product with ones.

  XLA's CPU backend sums the columns of a matrix as wide as a vocabulary up to 17 times slower.
  """
  return x + bias


def _sum_columns(_, grad: Float[Array, 'M V']) -> tuple[Float[Array, 'M V'], Float[Array, 'V']]:
  ones = jnp.ones(len(grad), grad.dtype)
  return grad, jnp.matmul(ones, grad, precision=jax.lax.Precision.HIGHEST)


_add_bias.defvjp(lambda x, bias: (x + bias, None), _sum_columns)


class BertForPreTraining(nnx.Module):
  """Encoder with the masked-LM and next-sentence heads (paper, section 3.1)."""

  def __init__(self, config: BertConfig, rngs: nnx.Rngs):
    self.bert = Bert(config, rngs)
    self.masked_lm = MaskedLM(config, rngs)
    self.next_sentence = Dense(config, config.hidden_size, 2, rngs)

  def __call__(
      self,
      input_ids: Int[Array, 'B T'],
      token_type_ids: Int[Array, 'B T'],
      attention_mask: Int[Array, 'B T'],
      masked_lm_positions: Int[Array, 'B P'],
      dropout_keys: UInt[Array, 'B'] | None = None,
  ) -> tuple[Float[Array, 'BP V'], Float[Array, 'B 2']]:
    """Returns masked-LM logits [B * P, V] at the positions asked for, and next-sentence logits.

    Positions are gathered before the vocabulary projection: projecting every token would cost about
    20 % more FLOPs at length 128 and most of the memory.
    """
    hidden = self.bert(input_ids, token_type_ids, attention_mask, dropout_keys)
    return self._logits(hidden, masked_lm_positions, hidden[:, 0])

  def packed(
      self,
      input_ids: Int[Array, 'B T'],
      token_type_ids: Int[Array, 'B T'],
      segment_ids: Int[Array, 'B T'],
      position_ids: Int[Array, 'B T'],
      masked_lm_positions: Int[Array, 'B P'],
      cls_positions: Int[Array, 'B E'],
      dropout_keys: UInt[Array, 'B'] | None = None,
  ) -> tuple[Float[Array, 'BP V'], Float[Array, 'BE 2']]:
    """As `__call__`, of rows that hold up to E examples each; see data/packing.py.

    Returns masked-LM logits [B * P, V], and next-sentence logits [B * E, 2] of the examples'
    [CLS]; what stands at unused places means nothing.
    """
    hidden = self.bert(
        input_ids, token_type_ids, (segment_ids > 0).astype(jnp.int32), dropout_keys, segment_ids,
        position_ids)
    first = jnp.take_along_axis(hidden, cls_positions[..., None], axis=1)
    return self._logits(hidden, masked_lm_positions, first.reshape(-1, hidden.shape[-1]))

  def _logits(self, hidden, masked_lm_positions, first):
    predicted = jnp.take_along_axis(hidden, masked_lm_positions[..., None], axis=1)
    predicted = sharding.constrain_rows(predicted.reshape(-1, hidden.shape[-1]))
    table = self.bert.embeddings.word_embeddings.embedding[...]
    pooled = self.bert.pool(sharding.constrain_rows(first))
    return self.masked_lm(predicted, table), self.next_sentence(pooled).astype(jnp.float32)


class BertEncoder(nnx.Module):
  """The encoder alone, of a checkpoint without a head; `bert` as in every other model."""

  def __init__(self, config: BertConfig, rngs: nnx.Rngs, pooler: bool = True):
    self.bert = Bert(config, rngs, pooler)


@dataclasses.dataclass(frozen=True)
class HeadConfig:
  """What a fine-tuning head is.

  Attributes:
    kind: a key of HEADS.
    num_outputs: logits of each row (or token).
    dropout: rate before the last dense layer.
    layers: 'last' reads the last layer; 'weighted_sum' a learned mixture of the embeddings' output
      and of all layers (the feature-based use of the paper's section 5.3, with learned weights).

  Raises:
    ValueError: an unknown kind or choice, or sizes that cannot be.
  """

  kind: str
  num_outputs: int
  dropout: float = 0.1
  layers: str = 'last'

  def __post_init__(self):
    if self.kind not in HEADS:
      raise ValueError(f'head kind {self.kind!r} is not one of {", ".join(HEADS)}')
    if self.num_outputs < 1:
      raise ValueError(f'a head with {self.num_outputs} outputs; there must be at least 1')
    if not 0 <= self.dropout < 1:
      raise ValueError(f'head dropout is {self.dropout}; it must be in [0, 1)')
    if self.layers not in ('last', 'weighted_sum'):
      raise ValueError(f"head layers {self.layers!r} is neither 'last' nor 'weighted_sum'")


class _FineTuned(nnx.Module):
  """The encoder and what all heads on it share: which layers are read, and the dropout."""

  pooler = True

  def __init__(self, config: BertConfig, head: HeadConfig, rngs: nnx.Rngs):
    self.head = head
    self.bert = Bert(config, rngs, pooler=self.pooler)
    if head.layers == 'weighted_sum':
      self.layer_weights = nnx.Param(jnp.zeros(config.num_hidden_layers + 1, jnp.float32))

  def _hidden(
      self,
      input_ids: Int[Array, 'B T'],
      token_type_ids: Int[Array, 'B T'],
      attention_mask: Int[Array, 'B T'],
      dropout_keys: UInt[Array, 'B'] | None,
  ) -> Float[Array, 'B T D']:
    if self.head.layers == 'last':
      return self.bert(input_ids, token_type_ids, attention_mask, dropout_keys)
    layers = self.bert.hidden_states(input_ids, token_type_ids, attention_mask, dropout_keys)
    weights = jax.nn.softmax(self.layer_weights[...]).astype(layers.dtype)
    return jnp.tensordot(weights, layers, 1)

  def _dropped(self, x, dropout_keys):
    # The encoder has folded 0 and 1 into the keys.
    return dropout(x, self.head.dropout, None if dropout_keys is None else fold(dropout_keys, 2))


def _outputs(config: BertConfig, num_outputs: int, rngs: nnx.Rngs) -> Dense:
  """The layer of a task, drawn as Transformers draws it: from the whole normal distribution.

  The encoder's truncated draw (Google's) is 12% narrower, and a short run feels it: MiniLM tagging
  WNUT17 has 10 to 20% more loss at step 50.
  """
  return Dense(config, config.hidden_size, num_outputs, rngs,
               nnx.initializers.normal(config.initializer_range))


class BertForSequenceClassification(_FineTuned):
  """One vector of logits for a row, from the pooled [CLS] (paper, section 4.1)."""

  def __init__(self, config: BertConfig, head: HeadConfig, rngs: nnx.Rngs):
    super().__init__(config, head, rngs)
    self.classifier = _outputs(config, head.num_outputs, rngs)

  def __call__(
      self,
      input_ids: Int[Array, 'B T'],
      token_type_ids: Int[Array, 'B T'],
      attention_mask: Int[Array, 'B T'],
      dropout_keys: UInt[Array, 'B'] | None = None,
  ) -> Float[Array, 'B C']:
    """Logits in float32; a regression has one, its prediction."""
    hidden = self._hidden(input_ids, token_type_ids, attention_mask, dropout_keys)
    pooled = self._dropped(self.bert.pool(hidden[:, 0]), dropout_keys)
    return self.classifier(pooled).astype(jnp.float32)


class BertForMultipleChoice(BertForSequenceClassification):
  """A score for each of C continuations of a row; softmax is over them (paper, section 4.4)."""

  def __call__(
      self,
      input_ids: Int[Array, 'B C T'],
      token_type_ids: Int[Array, 'B C T'],
      attention_mask: Int[Array, 'B C T'],
      dropout_keys: UInt[Array, 'B'] | None = None,
  ) -> Float[Array, 'B C']:
    """Scores in float32."""
    rows, choices, length = input_ids.shape
    if dropout_keys is not None:  # every choice has its own mask
      numbers = jnp.arange(choices, dtype=jnp.uint32)
      dropout_keys = fold(jnp.repeat(dropout_keys, choices), jnp.tile(numbers, rows))
    fold_rows = lambda x: sharding.constrain_rows(x.reshape(-1, length))
    scores = super().__call__(
        *map(fold_rows, (input_ids, token_type_ids, attention_mask)), dropout_keys)
    return scores.reshape(rows, choices)


class BertForTokenClassification(_FineTuned):
  """Logits for every token (paper, section 5.3)."""

  pooler = False

  def __init__(self, config: BertConfig, head: HeadConfig, rngs: nnx.Rngs):
    super().__init__(config, head, rngs)
    self.classifier = _outputs(config, head.num_outputs, rngs)

  def __call__(
      self,
      input_ids: Int[Array, 'B T'],
      token_type_ids: Int[Array, 'B T'],
      attention_mask: Int[Array, 'B T'],
      dropout_keys: UInt[Array, 'B'] | None = None,
  ) -> Float[Array, 'B T C']:
    """Logits in float32."""
    hidden = self._hidden(input_ids, token_type_ids, attention_mask, dropout_keys)
    return self.classifier(self._dropped(hidden, dropout_keys)).astype(jnp.float32)


class BertForQuestionAnswering(_FineTuned):
  """Scores of every token as start and as end of the answer (paper, section 4.2)."""

  pooler = False

  def __init__(self, config: BertConfig, head: HeadConfig, rngs: nnx.Rngs):
    super().__init__(config, head, rngs)
    self.qa_outputs = _outputs(config, 2, rngs)

  def __call__(
      self,
      input_ids: Int[Array, 'B T'],
      token_type_ids: Int[Array, 'B T'],
      attention_mask: Int[Array, 'B T'],
      dropout_keys: UInt[Array, 'B'] | None = None,
  ) -> Float[Array, 'B T 2']:
    """Start and end scores in float32; no dropout before them, as in Google's run_squad.py."""
    hidden = self._hidden(input_ids, token_type_ids, attention_mask, dropout_keys)
    return self.qa_outputs(hidden).astype(jnp.float32)


HEADS: dict[str, type[_FineTuned]] = {
    'classification': BertForSequenceClassification,
    'regression': BertForSequenceClassification,
    'multi_label': BertForSequenceClassification,
    'choice': BertForMultipleChoice,
    'tagging': BertForTokenClassification,
    'span': BertForQuestionAnswering,
}
