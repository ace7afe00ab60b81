"""A process that reads some lanes ahead of the trainer.

It is only ever ahead: what it has read and nobody has taken is read again by its successor, for a
lane's tokens follow from its cursors alone. So a worker that is killed costs time and no token.
"""

import multiprocessing
import signal
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import Queue

import numpy as np

from rlt_dist.data.stream.reading import LaneGroup, Reading, Segments
from rlt_dist.util.children import serve_parent
from rlt_dist.util.errors import Trouble, UserError
from rlt_dist.util.interrupts import children_without_interrupts
from rlt_dist.util.signals import SIGNALS

_MOST_DEATHS = 3
"""Workers lost one after the other, without a segment between, after which reading ends."""

_UNTIL_MISSED = 0.2
"""Seconds until a server that was killed is seen to be gone."""

_processes = multiprocessing.get_context("forkserver")
# The server imports once what all workers need; they are forked from it with that in memory.
_processes.set_forkserver_preload([__name__])


class Worker:
    """Some lanes, read by another process."""

    def __init__(
        self, reading: Reading, lanes: Sequence[int], cursors: np.ndarray, ahead: int
    ) -> None:
        """Start reading.

        Args:
            cursors: int64 [b, corpora, 4], where the lanes go on.
            ahead: segments that it may hold ready.
        """
        self._reading, self._lanes, self._ahead = reading, lanes, ahead
        self._cursors = cursors
        self._start()

    def next(self) -> Segments:
        """The next segment of every lane; notices tell of workers that were lost on the way.

        Raises:
            UserError: what reading raised in the worker; or workers die one after the other.
        """
        notices: list[str] = []
        while True:
            try:
                found: Segments | Exception = self._connection.recv()
                break
            except (EOFError, OSError):
                notices.append(self._replace(len(notices) + 1))
        if isinstance(found, Exception):
            raise found
        self._cursors = found.cursors
        return found.noting(notices)

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        if self._process.pid is not None:  # it was started
            self._process.kill()
            self._process.join()

    def _start(self) -> None:
        """Start the process; again, if the server that forks it was killed in between."""
        for left in reversed(range(_MOST_DEATHS)):
            self._connection, its_end = _processes.Pipe(duplex=False)
            self._process = _processes.Process(
                target=_read_ahead,
                args=(its_end, self._reading, self._lanes, self._cursors, self._ahead),
                name=f"reads lanes {self._lanes[0]} to {self._lanes[-1]}",
                daemon=True,
            )
            try:
                with children_without_interrupts():
                    self._process.start()
                return
            except (EOFError, OSError) as error:
                if not left:
                    raise Trouble(
                        f"no process can be started to read ahead ({error}); see the system's "
                        "limits and its out-of-memory messages, or set data.workers to 0"
                    ) from error
                self._connection.close()
                time.sleep(_UNTIL_MISSED)
            finally:
                its_end.close()  # else its death would not be the end of the stream

    def _replace(self, deaths: int) -> str:
        """Start another process in the place of one that is gone; gives what happened."""
        self._connection.close()
        self._process.join()
        how = _manner(self._process.exitcode)
        what = f"the process that {self._process.name} {how}"
        if deaths > _MOST_DEATHS:
            raise Trouble(
                f"{what}, as did {deaths - 1} before it; if nothing above says why, the memory ran "
                "out: lower data.workers"
            )
        self._start()
        return f"{what}; another has taken its place, and no token is lost"


def _manner(code: int | None) -> str:
    if code is not None and code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with code {code}"


def _read_ahead(
    connection: Connection, reading: Reading, lanes: Sequence[int], cursors: np.ndarray, ahead: int
) -> None:
    """A worker's life: it ends with its trainer, or with an error, which it hands over."""
    serve_parent()  # even if it is reading what does not come
    for number in SIGNALS:  # the trainer's to answer, and some launchers send them to all
        signal.signal(number, signal.SIG_IGN)
    ready: Queue[Segments | Exception] = Queue(ahead)
    arguments = (ready, reading, lanes, cursors)
    threading.Thread(target=_fill, args=arguments, daemon=True).start()
    with suppress(BrokenPipeError):  # the trainer has gone
        while True:
            found = ready.get()
            connection.send(found)
            if isinstance(found, Exception):
                return


def _fill(
    ready: "Queue[Segments | Exception]",
    reading: Reading,
    lanes: Sequence[int],
    cursors: np.ndarray,
) -> None:
    try:
        group = LaneGroup(reading, lanes, cursors)
        while True:
            ready.put(group.next())
    except Exception as error:  # every kind: it is raised again in the trainer
        if not isinstance(error, UserError):
            error.add_note(traceback.format_exc())  # which does not travel with it
        ready.put(error)
