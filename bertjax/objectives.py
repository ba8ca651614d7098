"""What a model is trained for: which losses are computed on a batch, and what divides them.

An objective is the last part of the triple corruption (data/), attention pattern (the encoder),
head and loss (here). The trainer knows only this shape, so another objective changes nothing else.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from bertjax import losses

Batch = dict[str, jax.Array]


class Objective(NamedTuple):
  """Named losses of one batch.

  Attributes:
    terms: (model, batch, dropout keys or None) -> sums of each loss over the rows given.
    weights: batch -> the weight of each loss. Known before the forward pass, so that every part
      of an accumulated batch divides by the weight of the whole.
    counts: batch -> further sums worth reporting, e.g. how many labels are positive.
  """

  terms: Callable[[nnx.Module, Batch, Array | None], dict[str, losses.Sums]]
  weights: Callable[[Batch], dict[str, Float[Array, '']]]
  counts: Callable[[Batch], dict[str, Float[Array, '']]]


def _pretraining_terms(model, batch, dropout_keys):
  masked_lm_logits, next_sentence_logits = model(
      batch['input_ids'], batch['token_type_ids'], batch['attention_mask'],
      batch['masked_lm_positions'], dropout_keys)
  return {
      'masked_lm': losses.masked_lm(
          masked_lm_logits, batch['masked_lm_ids'].reshape(-1),
          batch['masked_lm_weights'].reshape(-1)),
      'next_sentence': losses.next_sentence(
          next_sentence_logits, batch['next_sentence_labels'], batch['next_sentence_weights']),
  }


def _pretraining_weights(batch):
  return {
      'masked_lm': jnp.sum(batch['masked_lm_weights']),
      'next_sentence': jnp.sum(batch['next_sentence_weights']),
  }


def _pretraining_counts(batch):
  labels = batch['next_sentence_labels'].astype(jnp.float32)
  return {'next_sentence_positive_sum': jnp.sum(labels * batch['next_sentence_weights'])}


# Masked LM plus next sentence (paper, section 3.1). Without pairs every next-sentence weight is 0,
# and the second term vanishes from loss and gradient.
PRETRAINING = Objective(_pretraining_terms, _pretraining_weights, _pretraining_counts)
