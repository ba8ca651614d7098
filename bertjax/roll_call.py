"""Processes that train together find each other before JAX starts, and notice when one is gone.

    others ── {"call": 1, "count": 2} ──> process 0, on the coordinator's port
    others <── {"seen": 2} ... {"go": true} ── process 0, when all have called; JAX takes the port

JAX's own start waits for all as well, but after its timeout it aborts the process from C++, with no
word on who is missing. The connections of the roll call stay open: a process that says {"ended": 0}
has done its work, one whose connection closes without it was killed, and all others are told:

    any ── {"number": 1, "ended": 2} ──> process 0 ──> all
    process 0 ── {"number": 1, "gone": true} ──> all
"""

import contextlib
import json
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

# A machine that vanishes closes no connection: it is given up after 10 + 4 * 5 seconds.
_KEEP_ALIVE = {'TCP_KEEPIDLE': 10, 'TCP_KEEPINTVL': 5, 'TCP_KEEPCNT': 4}
_HANDSHAKE = 2.0  # seconds for a caller to say who it is: longer is a stranger
_LONGEST_LINE = 1 << 16
# An error that one process had is often about to be told by the others as well.
GRACE = 10.0
# Exit code of the processes that a lost one leaves behind: nothing was saved, but where machines
# come and go, starting all again helps (sysexits.h calls it EX_TEMPFAIL).
LOST = 75
_IN_ORDER = (0, 143)  # exit codes of training that is complete, or stopped by a signal after a save

Message = dict[str, Any]


class HostError(ValueError):
  """Hosts that make no run, or a platform that is absent; the message says the mend."""


class _Line:
  """A connection that carries JSON objects, one a line."""

  def __init__(self, connection: socket.socket):
    self.connection = connection
    self._unread = b''
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, seconds in _KEEP_ALIVE.items():
      if hasattr(socket, name):  # not on macOS
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)

  def send(self, message: Message) -> None:
    with contextlib.suppress(OSError):  # that it is gone is found out by reading
      self.connection.sendall(json.dumps(message).encode() + b'\n')

  def receive(self) -> list[Message] | None:
    """What has arrived, after waiting for something; None at the end of the connection.

    A stranger's talk counts as the end.

    Raises:
      TimeoutError: nothing came within the connection's timeout.
    """
    try:
      arrived = self.connection.recv(_LONGEST_LINE)
    except TimeoutError:
      raise
    except OSError:
      arrived = b''
    *whole, self._unread = (self._unread + arrived).split(b'\n')
    try:
      messages = [json.loads(line) for line in whole]
    except ValueError:
      return None
    sound = all(isinstance(message, dict) for message in messages)
    return messages if arrived and sound and len(self._unread) < _LONGEST_LINE else None

  def is_open(self) -> bool:
    """Whether the other end still holds it, without waiting."""
    try:
      return self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b''
    except BlockingIOError:
      return True
    except OSError:
      return False


class RollCall:
  """The processes of a run, seen from one of them.

  Args:
    address: HOST:PORT of process 0; JAX's coordinator gets the port after `meet`.
    count: how many processes there are.
    number: which of them this is.

  Raises:
    HostError: an address without a port, or a number that is not one of them.
  """

  def __init__(self, address: str, count: int, number: int):
    if not address.rpartition(':')[2].isdecimal():
      raise HostError(f'--coordinator_address={address} is not HOST:PORT')
    if not 0 <= number < count:
      raise HostError(f'--process_id={number} with --num_processes={count}: give each its own, 0 '
                      f'to {count - 1}')
    self._address, self._count, self._number = address, count, number
    self._lines: dict[int, _Line] = {}  # process 0: to all others; the others: to process 0
    self._ended: dict[int, int] = {}
    self._changed = threading.Condition()
    self._left = False

  def meet(self, timeout: int | float) -> None:
    """Returns when all processes are there.

    Raises:
      HostError: some are not, after `timeout` seconds; or one is there twice.
    """
    if self._number == 0:
      self._await_all(time.monotonic() + timeout, timeout)
    else:
      self._call(time.monotonic() + timeout, timeout)

  def watch(self, when_lost: Callable[[str, int], None]) -> None:
    """Calls `when_lost(reason, code)` in a thread once another process is gone or has failed.

    `code` is the exit code for this process: LOST if the other one said nothing, 1 after an error.
    """
    threading.Thread(target=self._watch, args=(when_lost,), name='roll-call', daemon=True).start()

  def leave(self, code: int) -> bool:
    """Tells the others that this process ends; whether all of them end in order as well.

    After an error the others are given time to come to the same end.
    """
    with self._changed:
      self._left = True
      self._ended[self._number] = code
      for line in self._lines.values():
        line.send({'number': self._number, 'ended': code})
      return code in _IN_ORDER or self._changed.wait_for(
          lambda: len(self._ended) == self._count, GRACE)

  # --- Meeting -----------------------------------------------------------------------------------

  def _await_all(self, deadline: float, timeout: int | float) -> None:
    for line in self._callers(deadline):
      try:
        line.connection.settimeout(_HANDSHAKE)
        known = self._enter(line, (line.receive() or [{}])[0])
        line.connection.settimeout(None)
      except TimeoutError:
        known = False
      if not known:
        line.connection.close()
    missing = sorted(set(range(1, self._count)) - set(self._lines))
    if missing:
      named = ', '.join(map(str, missing[:10])) + (', ...' if len(missing) > 10 else '')
      reason = self._too_few(len(self._lines) + 1, timeout, f'not seen: {named}')
      self._tell({'refused': reason})
      raise HostError(reason)
    self._tell({'go': True})

  def _callers(self, deadline: float) -> Iterator[_Line]:
    """The connections that come in until `deadline`, or until all are there."""
    port = int(self._address.rpartition(':')[2])
    try:
      listener = socket.create_server(
          ('', port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024
      ) if socket.has_dualstack_ipv6() else socket.create_server(('', port), backlog=1024)
    except OSError as error:
      raise HostError(
          f'process 0 cannot listen on port {port} of {self._address} ({error.strerror}): another '
          'run may be at work on this host; end it, or give another --coordinator_address'
      ) from error
    with listener:
      while len(self._lines) + 1 < self._count and (left := deadline - time.monotonic()) > 0:
        listener.settimeout(left)
        try:
          yield _Line(listener.accept()[0])
        except TimeoutError:
          return

  def _enter(self, line: _Line, message: Message) -> bool:
    """Enters a caller, or tells it why not; a stranger hears nothing."""
    number, count = message.get('call'), message.get('count')
    if not isinstance(number, int):
      return False
    if count != self._count:
      line.send({'refused': f'process {number} was started for {count} processes, process 0 for '
                            f'{self._count}: give all the same --num_processes'})
      return False
    if number in self._lines and self._lines[number].is_open():
      line.send({'refused': f'there are two processes {number}: give each its own --process_id, '
                            f'0 to {self._count - 1}'})
      return False
    self._lines[number] = line
    self._tell({'seen': len(self._lines) + 1})
    return True

  def _tell(self, message: Message) -> None:
    for line in self._lines.values():
      line.send(message)

  def _call(self, deadline: float, timeout: int | float) -> None:
    host, _, port = self._address.rpartition(':')
    seen = 1
    while (left := deadline - time.monotonic()) > 0:
      try:
        line = _Line(socket.create_connection((host.strip('[]'), int(port)), timeout=left))
      except OSError:  # not there yet, or its name not known yet
        time.sleep(min(0.2, left))
        continue
      line.send({'call': self._number, 'count': self._count})
      for message in self._answers(line, deadline):
        if 'refused' in message:
          line.connection.close()
          raise HostError(message['refused'])
        seen = message.get('seen', seen)
        if 'go' in message:
          line.connection.settimeout(None)
          self._lines[0] = line
          return
      line.connection.close()
      time.sleep(0.2)
    raise HostError(self._too_few(
        seen, timeout, f'process 0 at {self._address} ' + (
            'is there' if seen > 1 else 'does not answer')))

  @staticmethod
  def _answers(line: _Line, deadline: float) -> Iterator[Message]:
    """What process 0 says until `deadline`, or until it is gone."""
    with contextlib.suppress(TimeoutError):
      while (left := deadline - time.monotonic()) > 0:
        line.connection.settimeout(left)
        messages = line.receive()
        if messages is None:
          return
        yield from messages

  def _too_few(self, seen: int, timeout: int | float, which: str) -> str:
    return (
        f'expected {self._count} processes, seen {seen} within {timeout:g} s ({which}). Start the '
        f'same command on all {self._count} hosts at once: launch/tpu_run.sh does; by hand give '
        f'each --coordinator_address={self._address} --num_processes={self._count} and its own '
        f'--process_id, 0 to {self._count - 1}. --init_timeout waits longer')

  # --- Watching ----------------------------------------------------------------------------------

  def _watch(self, when_lost: Callable[[str, int], None]) -> None:
    with selectors.DefaultSelector() as selector:
      for number, line in self._lines.items():
        selector.register(line.connection, selectors.EVENT_READ, (number, line))
      while selector.get_map():
        for key, _ in selector.select():
          number, line = key.data
          messages = line.receive()
          if messages is None:
            selector.unregister(line.connection)
            messages = [] if number in self._ended else [{'number': number, 'gone': True}]
          for message in messages:
            self._hear(message, when_lost)

  def _hear(self, message: Message, when_lost: Callable[[str, int], None]) -> None:
    number, code = message['number'], message.get('ended')
    with self._changed:
      if self._number == 0:
        self._tell(message)
      if code is not None:
        self._ended[number] = code
        self._changed.notify_all()
      left = self._left
    if code is None:
      when_lost(f'process {number} of {self._count} is gone (killed, or its machine is lost)', LOST)
    elif code not in _IN_ORDER and not left:
      reason = f'process {number} of {self._count} ended with exit code {code}: its log says why'
      timer = threading.Timer(GRACE, when_lost, (reason, 1))
      timer.daemon = True
      timer.start()
