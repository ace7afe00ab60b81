"""Where a Ctrl-C may not strike."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """A Ctrl-C meanwhile counts when this is left; for the main thread, and for moments.

    Python raises it between any two instructions. In the midst of a queue or a lock of a library it
    leaves them such that the next user waits for ever.
    """
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)


@contextmanager
def children_without_interrupts() -> Iterator[None]:
    """A process that is started meanwhile, and those it starts, never see a Ctrl-C.

    It reaches every process of a terminal, also one that is only beginning.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
