"""How a process that serves another one behaves towards it."""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing import parent_process
from pathlib import Path
from threading import Thread

_PR_SET_PDEATHSIG = 1
"""Linux: send this process a signal when the one that started it ends (prctl(2))."""
_PERIOD = 1.0
"""Seconds between looks at whether a process is there."""
_LIBC = ctypes.CDLL(None)


def end_with(starter: int, number: int) -> None:
    """Be sent a signal when the process that started this one ends, even by SIGKILL (Linux only).

    It lasts beyond exec, and is not handed on to processes that this one starts.
    """
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != starter:  # It has ended before.
            os.kill(os.getpid(), number)


def own_name() -> str:
    """This process among all of all machines, also those that are named by the same number."""
    own = os.getpid()
    return f"{_machine()}/{own}/{_born(own)}"


def when_gone(name: str, do: Callable[[], object]) -> None:
    """Do something, in a thread, once a process of this machine has ended; elsewhere never.

    Args:
        name: begins as `own_name` gave it there.
    """
    machine, number, born = name.split("/")[:3]
    if machine != _machine():
        return

    def look() -> None:
        while _born(int(number)) == born:
            time.sleep(_PERIOD)
        do()

    Thread(target=look, daemon=True).start()


def _machine() -> str:
    """Since when it runs, and in which namespace processes are numbered."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}-{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return "unknown"


def _born(number: int) -> str | None:
    """When a process was started, in ticks since the machine was; None: it has ended."""
    try:
        # After its name, which may hold anything: the state is the 3rd field, the time the 22nd.
        fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]


def serve_parent() -> None:
    """Leave Ctrl-C, which reaches every process of a terminal, to the parent; end with it.

    To be called first in a process that `multiprocessing` started.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
