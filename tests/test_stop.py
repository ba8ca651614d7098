"""Being asked to stop: noticed, not obeyed at once; the second time it is."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest

from bertjax import stop

SCRIPT = '''
import os, signal, sys
from bertjax import stop
times = iter([0.0, 3.0])
with stop.StopRequest(lambda: next(times)):
  for number in sys.argv[1:]:
    os.kill(os.getpid(), int(number))
print('went on')
'''


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_noticed_and_the_program_goes_on(number):
  before = signal.getsignal(number)
  with stop.StopRequest() as request:
    assert not request.noticed and not request.due(0)
    os.kill(os.getpid(), number)
    assert request.noticed and request.due(1) and request.due(2)
  assert signal.getsignal(number) is before  # Ctrl-C ends Python again


def test_handlers_come_back_after_an_error():
  before = signal.getsignal(signal.SIGTERM)
  with pytest.raises(ZeroDivisionError), stop.StopRequest():
    assert signal.getsignal(signal.SIGTERM) is not before
    _ = 1 / 0
  assert signal.getsignal(signal.SIGTERM) is before


def test_each_request_begins_unasked():
  with stop.StopRequest():
    os.kill(os.getpid(), signal.SIGTERM)
  with stop.StopRequest() as request:
    assert not request.noticed


def test_signals_that_come_together_are_one_request(monkeypatch):
  """A process group's signal comes once directly, and once from the supervisor."""
  ended = []
  monkeypatch.setattr(os, '_exit', ended.append)
  times = iter([50.0, 50.01, 52.9, 53.0])
  with stop.StopRequest(lambda: next(times)) as request:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTERM):
      os.kill(os.getpid(), number)
    assert request.noticed and not ended
    os.kill(os.getpid(), signal.SIGTERM)
    assert ended == [1]


@pytest.mark.parametrize(('signals', 'code', 'out'), [
    ([signal.SIGTERM], 0, 'went on\n'),
    # Not 143: nothing says that a save was finished.
    ([signal.SIGTERM, signal.SIGTERM], 1, ''),
    ([signal.SIGINT, signal.SIGTERM], 1, ''),
])
def test_b129_a_second_signal_later_ends_the_process_at_once(signals, code, out):
  done = subprocess.run(
      [sys.executable, '-c', SCRIPT, *(str(int(number)) for number in signals)], text=True,
      capture_output=True, cwd=pathlib.Path(__file__).parents[1], timeout=300, check=False)
  assert (done.returncode, done.stdout) == (code, out), done.stderr
  assert 'saving after this step, then stopping; once more after 3 s ends at once' in done.stderr


def test_the_exit_code_says_restart_me():
  assert stop.SAVED == 128 + signal.SIGTERM
