"""Losses and accuracies of all heads, as sums and weights.

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
    correct: sum of weight over the examples whose highest logit is the label's; None where hits
      make no sense.
    weight: sum of the weights.
  """

  loss: Float[Array, '']
  correct: Float[Array, ''] | None
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


def classification(
    logits: Float[Array, 'N C'], labels: Int[Array, 'N'], weights: Float[Array, 'N']
) -> Sums:
  """Cross entropy of rows, of tokens side by side, or over the choices of a row.

  Args:
    logits: scores of the C classes.
    labels: in [0, C).
    weights: 0 for filler rows and for tokens without a label.

  Returns:
    The sums over the N rows. Of tied scores the first counts as the answer.
  """
  loss, _ = _cross_entropy(logits, labels)
  return _sums(loss, jnp.argmax(logits, axis=-1) == labels, weights)


def regression(
    predictions: Float[Array, 'N 1'], labels: Float[Array, 'N'], weights: Float[Array, 'N']
) -> Sums:
  """Squared error."""
  error = jnp.square(predictions[:, 0] - labels)
  return Sums(jnp.sum(error * weights), None, jnp.sum(weights))


def multi_label(
    logits: Float[Array, 'N C'], labels: Float[Array, 'N C'], weights: Float[Array, 'N']
) -> Sums:
  """Binary cross entropy, the mean over the C labels of a row; a hit has all of them right."""
  # log(1 + exp(x)) - x * label, without overflow.
  loss = (jax.nn.softplus(logits) - logits * labels).mean(-1)
  correct = jnp.all((logits > 0) == (labels > 0.5), axis=-1)
  return _sums(loss, correct, weights)


def span(
    logits: Float[Array, 'B T 2'], starts: Int[Array, 'B'], ends: Int[Array, 'B'],
    weights: Float[Array, 'B'],
) -> Sums:
  """The mean of the cross entropies of start and end over the T positions of a row.

  As in Google's code and in Transformers the padding positions take part. A row whose answer lies
  outside [0, T) is left out, which is what `span_weights` says.

  Args:
    logits: start and end scores.
    starts: position of the answer's first token; that of [CLS] for no answer.
    ends: position of its last token.
    weights: from `span_weights`.
  """
  inside = lambda positions: jnp.clip(positions, 0, logits.shape[1] - 1)
  start_loss, _ = _cross_entropy(logits[..., 0], inside(starts))
  end_loss, _ = _cross_entropy(logits[..., 1], inside(ends))
  correct = ((jnp.argmax(logits[..., 0], -1) == starts)
             & (jnp.argmax(logits[..., 1], -1) == ends))
  return _sums((start_loss + end_loss) / 2, correct, weights)


def span_weights(
    starts: Int[Array, 'B'], ends: Int[Array, 'B'], weights: Float[Array, 'B'], length: int
) -> Float[Array, 'B']:
  """The weights, with 0 where the answer is outside the row's `length` positions."""
  return jnp.where((starts < length) & (ends < length), weights, 0)


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
