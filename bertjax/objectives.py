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
  logits = model(
      batch['input_ids'], batch['token_type_ids'], batch['attention_mask'],
      batch['masked_lm_positions'], dropout_keys)
  return _pretraining_losses(*logits, batch)


def _packed_terms(model, batch, dropout_keys):
  logits = model.packed(
      batch['input_ids'], batch['token_type_ids'], batch['segment_ids'], batch['position_ids'],
      batch['masked_lm_positions'], batch['cls_positions'], dropout_keys)
  return _pretraining_losses(*logits, batch)


def _pretraining_losses(masked_lm_logits, next_sentence_logits, batch):
  return {
      'masked_lm': losses.masked_lm(
          masked_lm_logits, batch['masked_lm_ids'].reshape(-1),
          batch['masked_lm_weights'].reshape(-1)),
      'next_sentence': losses.next_sentence(
          next_sentence_logits, batch['next_sentence_labels'].reshape(-1),
          batch['next_sentence_weights'].reshape(-1)),
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
# The same losses of rows that hold several examples each (data/packing.py).
PACKED_PRETRAINING = Objective(_packed_terms, _pretraining_weights, _pretraining_counts)


def pretraining(packed: bool) -> Objective:
  """The objective of rows that hold one example or several."""
  return PACKED_PRETRAINING if packed else PRETRAINING


class FineTuning(NamedTuple):
  """A head's outputs, their loss and its weight, all of one batch.

  Attributes:
    outputs: (model, batch, dropout keys or None) -> what the head computes.
    sums: (outputs, batch) -> loss and hits.
    weight: batch -> the weight of the loss.
  """

  outputs: Callable[[nnx.Module, Batch, Array | None], Array]
  sums: Callable[[Array, Batch], losses.Sums]
  weight: Callable[[Batch], Float[Array, '']]


def fine_tuning(kind: str) -> Objective:
  """The loss of a head of that kind as an objective of the trainer, under the name of the kind."""
  head = FINE_TUNING[kind]
  return Objective(
      terms=lambda model, batch, keys: {kind: head.sums(head.outputs(model, batch, keys), batch)},
      weights=lambda batch: {kind: head.weight(batch)},
      counts=lambda batch: {})


def _outputs(model, batch, dropout_keys):
  return model(
      batch['input_ids'], batch['token_type_ids'], batch['attention_mask'], dropout_keys)


def _row_weight(batch):
  return jnp.sum(batch['weights'])


def _of_rows(loss):
  return FineTuning(
      _outputs, lambda outputs, batch: loss(outputs, batch['labels'], batch['weights']),
      _row_weight)


def _tagging_sums(outputs, batch):
  return losses.classification(
      outputs.reshape(-1, outputs.shape[-1]), batch['labels'].reshape(-1),
      batch['label_weights'].reshape(-1))


def _span_weights(batch):
  return losses.span_weights(batch['start_positions'], batch['end_positions'], batch['weights'],
                             batch['input_ids'].shape[1])


def _span_sums(outputs, batch):
  return losses.span(
      outputs, batch['start_positions'], batch['end_positions'], _span_weights(batch))


# The kinds of bertjax.heads.HEADS. A batch holds, besides the tokens: `labels`, or start_positions
# and end_positions; `weights` [B], 0 for filler rows; for tagging `label_weights` [B, T].
FINE_TUNING = {
    'classification': _of_rows(losses.classification),
    'regression': _of_rows(losses.regression),
    'multi_label': _of_rows(losses.multi_label),
    'choice': _of_rows(losses.classification),
    'tagging': FineTuning(
        _outputs, _tagging_sums, lambda batch: jnp.sum(batch['label_weights'])),
    'span': FineTuning(_outputs, _span_sums, lambda batch: jnp.sum(_span_weights(batch))),
}
