"""Alarms in words: what a person who watched the curves would have said.

A state machine over the metrics of each step, on the host. It writes nothing itself.
"""

import dataclasses
import math
from collections.abc import Mapping


class NonFiniteError(ArithmeticError):
  """A loss or the gradient norm is NaN or infinite; the weights after this step are worthless.

  Attributes:
    ruined_step: the first step after which the weights are known to be worthless.
  """

  def __init__(self, message: str, ruined_step: int):
    super().__init__(message)
    self.ruined_step = ruined_step


@dataclasses.dataclass
class Alarms:
  """Reads every step's metrics once, in order; each warning is said once until it recovers.

  Attributes:
    unigram_entropy: of the training tokens, in nats per token: the loss that guessing by frequency
      alone reaches. None where it is not known: no such alarm then.
    warmup_steps: the masked LM loss is judged in windows that begin after these.
    window_steps: steps that are judged together.
  """

  unigram_entropy: int | float | None = None
  warmup_steps: int = 0
  window_steps: int = 2000
  _window: dict[str, int | float] = dataclasses.field(default_factory=dict, init=False, repr=False)
  _steps: int = dataclasses.field(default=0, init=False, repr=False)
  _said: set[str] = dataclasses.field(default_factory=set, init=False, repr=False)

  def update(self, step: int, metrics: Mapping[str, int | float]) -> list[str]:
    """Takes the metrics of one step and returns the warnings that are new.

    Args:
      step: updates made, this one included.
      metrics: the sums of the step (`masked_lm_loss_sum`, `next_sentence_weight`, ...) and
        `grad_norm`, as plain numbers.

    Raises:
      NonFiniteError: one of them is NaN or infinite.
    """
    check_finite(step, metrics)
    for name, value in metrics.items():
      self._window[name] = self._window.get(name, 0.0) + value
    self._steps += 1
    if self._steps < self.window_steps:
      return []
    sums, self._window, self._steps = self._window, {}, 0
    return [
        message
        for message in (self._next_sentence(step, sums), self._masked_lm(step, sums))
        if message
    ]

  def _next_sentence(self, step: int, sums: Mapping[str, int | float]) -> str | None:
    pairs = sums.get('next_sentence_weight', 0.0)
    if not pairs or 'next_sentence_positive_sum' not in sums:
      return None  # trained without pairs
    accuracy = sums['next_sentence_correct_sum'] / pairs
    share = sums['next_sentence_positive_sum'] / pairs
    majority = max(share, 1 - share)
    over = f'over the {self.window_steps} steps up to {step} ({pairs:,.0f} pairs)'
    leak = self._once('leak', accuracy == 1, (
        f'next_sentence accuracy is exactly 1 {over}. Nothing real is learned without an error: '
        'the label leaks into the input. Likely causes: all pairs have one label; the second '
        'segment is marked by its length, its padding or its position in the batch; the random '
        'partners come from files that look different.'))
    # Three standard errors of a coin, and at least one point.
    margin = max(0.01, 1.5 / math.sqrt(pairs))
    stuck = self._once('stuck', accuracy < min(1, majority + margin), (
        f'next_sentence accuracy is {accuracy:.3f} {over}; always giving the more common answer '
        f'reaches {majority:.3f}, so nothing was learned about pairs. Likely causes: the learning '
        'rate is too high or its warm-up too short; documents of one sentence, whose neighbours '
        'say nothing about each other; documents glued together or cut at random when the data '
        'were built. Early in a long run it can also be just too soon.'))
    return leak or stuck

  def _masked_lm(self, step: int, sums: Mapping[str, int | float]) -> str | None:
    predictions = sums.get('masked_lm_weight', 0.0)
    began = step - self.window_steps
    if not predictions or self.unigram_entropy is None or began < self.warmup_steps:
      return None
    loss = sums['masked_lm_loss_sum'] / predictions
    return self._once('unigram', loss > self.unigram_entropy, (
        f'masked_lm loss is {loss:.3f} over the {self.window_steps} steps up to {step}, above the '
        f'unigram entropy of the data, {self.unigram_entropy:.3f} nats: guessing by word frequency '
        'alone, without any context, is better. Likely causes: the learning rate is too high '
        '(look at grad_norm) or far too low; the shards were built with another tokenizer than '
        'the labels are read with. Early in a long run it can also be just too soon.'))

  def _once(self, name: str, bad: bool, message: str) -> str | None:
    """The message, if the trouble has just begun."""
    if not bad:
      self._said.discard(name)
      return None
    if name in self._said:
      return None
    self._said.add(name)
    return message


def check_finite(
    step: int, metrics: Mapping[str, int | float], weights_of: int | None = None
) -> None:
  """Raises NonFiniteError, naming the step and the metrics, unless all are finite.

  Args:
    step: the step that the metrics are reported for.
    metrics: sums and norms.
    weights_of: the step whose weights the losses were computed with; of a training step those are
      the weights before its own update.
  """
  weights_of = step - 1 if weights_of is None else weights_of
  broken = [f'{name} is {value}' for name, value in metrics.items() if not math.isfinite(value)]
  if broken:
    raise NonFiniteError(
        f'step {step}: {", ".join(broken)}. Training stops here and this state is not saved. Go '
        'on from the last checkpoint with a lower learning rate, a longer warm-up or a smaller '
        'clip_norm; if it happens at this very step again, look at the data of the step.',
        weights_of if any('loss' in text for text in broken) else step,
    )
