"""Losses and accuracies of the pre-training heads, as sums and weights.

Nothing here divides: a mean of means is wrong as soon as devices, hosts or accumulation steps hold
different numbers of labels. Sums and weights add up over all of them, and `mean` divides once.

Shapes: N predictions of the whole batch side by side, V vocabulary, B sentence pairs.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class Sums(NamedTuple):
  """Weighted sums over examples; all of them float32 scalars.

  Attributes:
    loss: sum of weight * cross entropy, in nats.
    correct: sum of weight over the examples whose highest logit is the label's.
    weight: sum of the weights.
  """

  loss: Float[Array, '']
  correct: Float[Array, '']
  weight: Float[Array, '']


def masked_lm(
    logits: Float[Array, 'N V'], ids: Int[Array, 'N'], weights: Float[Array, 'N']
) -> Sums:
  """Masked LM cross entropy and hits at the predicted positions (BERT paper, section 3.1).

  Args:
    logits: scores of the vocabulary at the gathered positions. Rows of the vocabulary that are
      padding may be -inf or very negative.
    ids: the original tokens, in [0, V), in unused slots as well; one beyond it makes the loss NaN.
    weights: 1 for a prediction, 0 for an unused slot, which then counts nowhere.

  Returns:
    The sums over the N slots. A tie for the highest score counts as a hit.
  """
  return _sums(*_cross_entropy(logits, ids), weights)


def next_sentence(
    logits: Float[Array, 'B 2'], labels: Int[Array, 'B'], weights: Float[Array, 'B']
) -> Sums:
  """Next sentence (or sentence order) cross entropy and hits; the labels are 0 and 1.

  Args:
    logits: the two scores of each pair.
    labels: 0 where the second segment follows the first, 1 where it does not.
    weights: 0 for rows without such a label and for the filler rows of a last evaluation batch.

  Returns:
    The sums over the B rows. A tie is an answer of 0, so that a head of zeros is not always right.
  """
  loss, _ = _cross_entropy(logits, labels)
  return _sums(loss, jnp.argmax(logits, axis=-1) == labels, weights)


def mean(total: Float[Array, ''], weight: Float[Array, '']) -> Float[Array, '']:
  """`total / weight`; 0 with a gradient of exactly 0 where the weight is 0 (nothing was masked)."""
  # Both branches of a where are differentiated, so the division itself must never see a zero.
  some = weight > 0
  return jnp.where(some, total / jnp.where(some, weight, 1), 0)


def _sums(loss, correct, weights) -> Sums:
  weights = weights.astype(jnp.float32)
  return Sums(jnp.sum(loss * weights), jnp.sum(correct * weights), jnp.sum(weights))


# The rule that jax would derive scatters into the logits, which XLA does one element after the
# other on a CPU, and keeps exp(logits) for the backward pass: a second array of the size of the
# logits, the largest of the step. This one compares with the label and takes the exponential again.
@jax.custom_vjp
def _cross_entropy(logits, labels):
  """[N, V] scores and [N] labels -> [N] nats and [N] hits, in float32."""
  return _cross_entropy_forward(logits, labels)[0]


def _cross_entropy_forward(logits, labels):
  scores = logits.astype(jnp.float32)
  highest = jnp.max(scores, axis=-1)
  log_sum = jnp.log(jnp.sum(jnp.exp(scores - highest[:, None]), axis=-1))
  # A gather of N numbers; the partitioner keeps it local where V is sharded. (A select over the
  # iota that is summed would write one more array of the size of the logits on a CPU.)
  label_score = jnp.take_along_axis(scores, labels[:, None], axis=-1)[:, 0]
  correct = (label_score >= highest).astype(jnp.float32)
  # The difference first: a large common part of the scores cancels exactly.
  return ((highest - label_score) + log_sum, correct), (logits, labels, highest + log_sum)


def _cross_entropy_backward(residuals, cotangents):
  logits, labels, log_normaliser = residuals
  loss_cotangent, _ = cotangents  # hits are steps: no gradient
  probabilities = jnp.exp(logits.astype(jnp.float32) - log_normaliser[:, None])
  is_label = jax.lax.broadcasted_iota(labels.dtype, logits.shape, 1) == labels[:, None]
  gradient = (probabilities - is_label) * loss_cotangent[:, None]
  return gradient.astype(logits.dtype), None


_cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)
