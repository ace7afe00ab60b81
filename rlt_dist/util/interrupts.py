"""Where a Ctrl-C may not strike."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


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
