"""Heads on the encoder, and the models that join the two."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, UInt

from bertjax import sharding
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
    return logits + jnp.where(real, self.bias[...], _NEVER)


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
    predicted = jnp.take_along_axis(hidden, masked_lm_positions[..., None], axis=1)
    predicted = sharding.constrain_rows(predicted.reshape(-1, hidden.shape[-1]))
    table = self.bert.embeddings.word_embeddings.embedding[...]
    next_sentence = self.next_sentence(self.bert.pool(hidden)).astype(jnp.float32)
    return self.masked_lm(predicted, table), next_sentence
