"""Signals that ask a process to stop, heard at once whatever its main thread does.

Python runs a signal's handler in the main thread, between two of its own instructions: not while
that thread waits in a collective or computes outside of Python. But it writes every signal's number
to a socket at once, and a thread reads it there.
"""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rlt_dist.util.log import show_error

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

_SAME = 0.5
"""Seconds within which further signals are the same wish: some launchers pass on to a process what
it was sent as well."""


class Signals:
    """What this process was asked for.

    Attributes:
        first: the name of the first signal; None until there is one.
        at_second: what ends the process at a second one; it is told why.
    """

    def __init__(self) -> None:
        self.first: str | None = None
        self.at_second: Callable[[str], object] = _end_alone
        self._last, self._heard = "", 0.0

    def _listen(self, numbers: socket.socket) -> None:
        while received := numbers.recv(16):
            for number in received:
                if number in SIGNALS:
                    self._hear(signal.Signals(number).name)

    def _hear(self, name: str) -> None:
        """Batch systems warn by SIGUSR1, and say SIGTERM later: the two are one wish."""
        if self.first is None or (self._last, name) == ("SIGUSR1", "SIGTERM"):
            self.first = self.first or name
            self._last, self._heard = name, time.monotonic()
        elif time.monotonic() - self._heard > _SAME:
            self.at_second(f"a second signal, {name}: ended at once, without saving")


@contextmanager
def heard() -> Iterator[Signals]:
    """Take note of all `SIGNALS` from now on; only the main thread may call it.

    Afterwards they are ignored: the process is about to end with its own exit status, which a
    launcher that ends all processes as soon as one has ended must not change.
    """
    numbers, told = socket.socketpair()
    told.setblocking(False)
    signals = Signals()
    threading.Thread(target=signals._listen, args=(numbers,), daemon=True).start()
    before = signal.set_wakeup_fd(told.fileno(), warn_on_full_buffer=False)
    for number in SIGNALS:
        signal.signal(number, _noted)
        signal.siginterrupt(number, False)  # No library's system call fails for it.
    try:
        yield signals
    finally:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        signal.set_wakeup_fd(before)
        told.close()


def _noted(_: int, __: object) -> None:
    """The handler: the thread knows it already."""


def _end_alone(why: str) -> None:
    show_error(why)
    os._exit(1)
