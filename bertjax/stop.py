"""Being asked to stop: SIGTERM from a preempted machine or Ctrl-C, noticed between steps."""

import os
import signal
import time
from collections.abc import Callable

import jax
from absl import logging

# Exit code after a signal and a save: restart me. 0 means only that training is complete.
SAVED = 143
# One request may come as several signals: a machine that shuts down, or Ctrl-C in a terminal, sends
# one to every process, and launch/supervise.sh passes its own on. So soon it is the same request.
_ONE_REQUEST = 3.0  # seconds


class StopRequest:
  """Notes SIGTERM and SIGINT; one that comes later ends the process at once, with exit code 1.

  On several hosts JAX's own preemption service watches for SIGTERM on any of them, and all agree on
  one step at which to save.

  Args:
    clock: tells the seconds.
  """

  def __init__(self, clock: Callable[[], float] = time.monotonic):
    self._clock = clock
    self._asked_at: float | None = None
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
    now = self._clock()
    if self._asked_at is None:
      self._asked_at = now
      logging.warning(
          '%s: saving after this step, then stopping; once more after %g s ends at once',
          signal.Signals(number).name, _ONE_REQUEST)
    elif now - self._asked_at >= _ONE_REQUEST:
      os._exit(1)  # not SAVED: nothing says that the save was finished

  @property
  def noticed(self) -> bool:
    """Whether this process has been asked; others may not know yet."""
    return self._asked_at is not None

  def due(self, step: int) -> bool:
    """Whether all processes stop before taking `step`; all must ask, at every step."""
    if jax.process_count() == 1:
      return self.noticed
    from jax.experimental import multihost_utils

    return multihost_utils.reached_preemption_sync_point(step)
