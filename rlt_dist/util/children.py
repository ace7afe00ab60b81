"""How a process that serves another one behaves towards it."""

import os
import signal
from multiprocessing import parent_process
from threading import Thread


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
