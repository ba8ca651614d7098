"""Being asked to stop: SIGTERM from a preempted machine or Ctrl-C, noticed between steps."""

import os
import signal

import jax
from absl import logging

# Exit code after a signal and a save: restart me. 0 means only that training is complete.
SAVED = 143


class StopRequest:
  """Notes SIGTERM and SIGINT; a second signal ends the process at once, with exit code 1.

  On several hosts JAX's own preemption service watches for SIGTERM on any of them, and all agree on
  one step at which to save.
  """

  def __init__(self):
    self._signal = 0
    self._previous = {}

  def __enter__(self):
    if jax.process_count() == 1:
      for number in (signal.SIGTERM, signal.SIGINT):
        self._previous[number] = signal.signal(number, self._notice)
    return self

  def __exit__(self, *unused):
    for number, handler in self._previous.items():
      signal.signal(number, handler)

  def _notice(self, number, frame):
    if self._signal:
      os._exit(1)  # not SAVED: nothing says that the save was finished
    self._signal = number
    logging.warning('%s: saving after this step, then stopping; once more ends at once',
                    signal.Signals(number).name)

  @property
  def noticed(self) -> bool:
    """Whether this process has been asked; others may not know yet."""
    return bool(self._signal)

  def due(self, step: int) -> bool:
    """Whether all processes stop before taking `step`; all must ask, at every step."""
    if jax.process_count() == 1:
      return self.noticed
    from jax.experimental import multihost_utils

    return multihost_utils.reached_preemption_sync_point(step)
