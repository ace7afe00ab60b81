"""No rank waits for ever for another: when one fails, all end, and one error is shown.

Ranks share a board in the store of their process group. A rank that fails with an error of its own
writes it there, if it is the first, and shows it. A thread of every rank looks there and ends its
process, even one that is stuck in a collective. A lost connection is mostly the consequence of
another rank's failure, so its error waits for that rank's word. Each rank also listens for signs of
life of the next one, so that one killed without a word is missed while all others compute.

Time is counted in a rank's own looks, not by the clock: a job that was suspended as a whole goes on
as if it had not been.

A process that fails ends at once, by `os._exit`: leaving Python in the ordinary way would wait for
collectives that nobody completes any more.
"""

import os
import re
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn, Protocol

import torch.distributed as dist

from rlt_dist.util.ending import STATUS, How, Recorder, how_of
from rlt_dist.util.errors import UserError, one_line
from rlt_dist.util.log import show_error

_PERIOD = 1.0
"""Seconds between a rank's looks at the board, and between its signs of life."""
_SILENCE = 20.0
"""Seconds without a sign of life after which a rank counts as lost."""
_ROLL_CALL = 4
"""Signs of life that other ranks may still give then, which are silent too if none of them does."""
_GRACE = 2.0
"""Seconds that an error which may be a consequence waits for its cause."""
_LEAVE = 3.0
"""Seconds that ranks wait for each other's last word when all end."""

_LOST = re.compile(
    "connection closed by peer|connection reset by peer|broken pipe|timed out waiting|"
    "wait timeout|failed to recv|remote process exited",
    re.IGNORECASE,
)
"""What gloo, NCCL and the store say of a peer that is gone."""

_PREFIX = "rlt-dist"
_FIRST, _TOLD, _DONE, _ALL_DONE, _LEFT = "first", "told", "done", "all done", "left"
_STACKS = "stacks"
"""Set where ranks are to leave their stacks before they end."""


class Watch(Protocol):
    """How a process ends, from any of its threads.

    Attributes:
        leave_stacks: called before the process ends because another one fell silent.
        recorder: leaves the record of the end, if this process's error is the first.
        names: of all ranks, in the words of an error.
    """

    leave_stacks: Callable[[], None]
    recorder: Recorder
    names: list[str]

    def board(self) -> dist.Store:
        """What all ranks write to and read, through a connection of its own."""

    def end(self, text: str) -> NoReturn:
        """End all processes, for a reason that is shown if it is the first; status 1."""


@contextmanager
def watched(store: dist.Store, rank: int, size: int, serves: bool, served: bool) -> Iterator[Watch]:
    """Work together: either all ranks come to the end of it, or all processes end.

    Leaving it waits for all other ranks. An error that arises inside is not raised further: it is
    shown, with its rank, unless another rank's came first, and the process ends with status 2 for a
    person's mistake and 1 for everything else.

    Args:
        store: reached by all ranks.
        serves: the store ends with this process, which is therefore the last to end.
        served: a launcher serves the store, and not rank 0.
    """
    watch = _Watch(store, rank, size, serves, served)
    try:
        yield watch
        watch.finish()
    except BaseException as error:
        watch.fail(error)


def first_failure(store: dist.Store) -> str | None:
    """What the first rank that failed said, with its rank; None if nobody wrote."""
    board = dist.PrefixStore(_PREFIX, store)
    if not board.check([_FIRST]):
        return None
    return board.get(_FIRST).decode().partition(" ")[2]


@contextmanager
def alone() -> Iterator[Watch]:
    """The watch of a process that has no others; an error is recorded, and raised further."""
    watch = _Alone()
    try:
        yield watch
    except BaseException as error:
        watch.recorder.record(how_of(error), _one_line(error) or _summary(error))
        raise


class _Alone:
    def __init__(self) -> None:
        self._store = dist.HashStore()
        self.leave_stacks, self.recorder, self.names = _nothing, Recorder(), ["rank 0"]

    def board(self) -> dist.Store:
        """A store of its own."""
        return _board(self._store)

    def end(self, text: str) -> NoReturn:
        """End the process."""
        self.recorder.record("failed", text)
        show_error(text)
        _exit(1)


class _Watch:
    def __init__(self, store: dist.Store, rank: int, size: int, serves: bool, served: bool) -> None:
        self._rank, self._size, self._serves = rank, size, serves
        self._store, self.leave_stacks, self._looks = store, _nothing, 0
        self.recorder, self.names = Recorder(), [f"rank {number}" for number in range(size)]
        # The store serves one request of a connection at a time, and waits are requests.
        self._board, of_thread = self.board(), self.board()
        self._ending = threading.Lock()
        self._finished = threading.Event()
        self._board.add(f"beat {rank}", 1)
        self._threads = [threading.Thread(target=self._look, args=(of_thread,), daemon=True)]
        if not (serves or served):
            self._threads.append(threading.Thread(target=self._mind_store, daemon=True))
        for thread in self._threads:
            thread.start()

    def board(self) -> dist.Store:
        return _board(self._store)

    def end(self, text: str) -> NoReturn:
        try:
            board = self.board()
        except RuntimeError:  # The store is gone: the others have ended, or are about to.
            self._tell(text)
            _exit(1)
        self._end(board, text)

    def finish(self) -> None:
        """Wait until all ranks have done their work. From then on nobody's end is a failure."""
        if self._board.add(_DONE, 1) == self._size:
            self._board.set(_ALL_DONE, "")
        self._board.wait([_ALL_DONE])
        self._finished.set()
        for thread in self._threads:
            thread.join()
        with suppress(RuntimeError):
            self._leave(self._board)

    def fail(self, error: BaseException) -> NoReturn:
        """End the process for an error, which is shown if it is the first of all ranks."""
        lost, message = _lost_contact(error), _one_line(error)
        prefix = f"{self.names[self._rank]}: "
        if lost is not None:
            self._end(self._board, self._lost(self._missing(), lost))
        if message is None:
            trace = textwrap.indent("".join(traceback.format_exception(error)), prefix)
            self._end(self._board, prefix + _summary(error), trace)
        if isinstance(error, UserError) and error.shared:
            prefix = ""
        self._end(self._board, prefix + message, how=how_of(error))

    def _look(self, board: dist.Store) -> None:
        """The thread: look at the board and at the next rank until the work is finished."""
        following = (self._rank + 1) % self._size
        beats, silent = 0, 0.0
        while not self._finished.wait(_PERIOD):
            self._looks += 1
            try:
                board.add(f"beat {self._rank}", 1)
                if board.check([_TOLD]):
                    self._end(board)
                heard = board.add(f"beat {following}", 0)
                silent = silent + _PERIOD if heard == beats > 0 else 0.0
                if silent > _SILENCE and (missing := self._roll_call(board)):
                    board.set(_STACKS, "")
                    self._end(board, self._lost(missing, _silent()))
            except RuntimeError:
                self._end(board, self._lost(self.names[0], "the store that it serves is gone"))
            beats = heard

    def _roll_call(self, board: dist.Store) -> str:
        """Which ranks give no sign of life, in words; this one goes on giving its own."""

        def beats() -> list[int]:
            return [board.add(f"beat {rank}", 0) for rank in range(self._size)]

        before = beats()
        for _ in range(_ROLL_CALL):
            board.add(f"beat {self._rank}", 1)
            time.sleep(_PERIOD)
        pairs = enumerate(zip(before, beats(), strict=True))
        return ", ".join(self.names[rank] for rank, (then, now) in pairs if then == now)

    def _missing(self) -> str:
        """Who is lost, unless another rank has said more by then."""
        with suppress(RuntimeError):
            _wait_until(lambda: self._board.check([_FIRST]), _GRACE)
            if self._board.check([_FIRST]):
                return "another rank"
            return self._roll_call(self._board) or "another rank"
        return self.names[0]  # It serves the store.

    def _mind_store(self) -> None:
        """Another thread, where rank 0 serves the store: stopped, it would answer no look."""
        looks, silent = 0, 0.0
        while not self._finished.wait(_PERIOD):
            silent = silent + _PERIOD if self._looks == looks > 0 else 0.0
            looks = self._looks
            if silent > _SILENCE:
                self.leave_stacks()
                # Nobody can say who is first to tell.
                if self._rank == 1:
                    self._tell(self._lost(self.names[0], _silent()))
                _exit(1)

    def _lost(self, whom: str, why: str) -> str:
        return (
            f"{self.names[self._rank]}: lost contact with {whom} ({why}); probably killed or "
            "stopped: see its log or the system's out-of-memory messages"
        )

    def _end(
        self,
        board: dist.Store,
        text: str | None = None,
        trace: str = "",
        how: How = "failed",
    ) -> NoReturn:
        """End the process. A text, or the trace that it sums up, is shown if it is the first.

        It is shown before the others are told, since whoever started the ranks ends those that are
        left as soon as one of them ends.
        """
        self._ending.acquire()  # For good: one of the two threads does it.
        try:
            if board.check([_STACKS]):
                self.leave_stacks()
            if text is not None and self._is_first(board, text):
                self._tell(text, trace, how)
                board.set(_TOLD, "")
            else:
                _wait_until(lambda: board.check([_TOLD]), _LEAVE)
                # The first to fail is the first to end: launchers name the one that did.
                time.sleep(_PERIOD / 2)
            self._leave(board)
        except RuntimeError:
            # The store is gone, and with it rank 0, so nobody says who was first.
            if text is not None and self._rank == 1:
                self._tell(text, trace, how)
        _exit(STATUS[how])

    def _tell(self, text: str, trace: str = "", how: How = "failed") -> None:
        """Say why all end."""
        self.recorder.record(how, text, self._rank)
        show_error(text, trace)

    def _is_first(self, board: dist.Store, text: str) -> bool:
        mine = f"{self._rank} {text}"
        return board.compare_set(_FIRST, "", mine).decode() == mine

    def _leave(self, board: dist.Store) -> None:
        """Use the store for the last time."""
        board.add(_LEFT, 1)
        if self._serves:
            _wait_until(lambda: board.add(_LEFT, 0) == self._size, _LEAVE)


def _board(store: dist.Store) -> dist.Store:
    """The board through a connection of its own."""
    return dist.PrefixStore(_PREFIX, store.clone())  # type: ignore[attr-defined]


def _silent() -> str:
    return f"no sign of life for {_SILENCE:.0f} s"


def _nothing() -> None:
    """What is left before the end, until something else is."""


def _wait_until(holds: Callable[[], bool], seconds: float) -> None:
    until = time.monotonic() + seconds
    while not holds() and time.monotonic() < until:
        time.sleep(0.05)


def _lost_contact(error: BaseException) -> str | None:
    """What an error says of a lost connection; None if it is of another kind."""
    if isinstance(error, UserError | OSError | SystemExit | KeyboardInterrupt):
        return None
    said = _LOST.search(str(error))
    if said:
        return said.group().lower()
    return str(error).partition("\n")[0] if isinstance(error, dist.DistError) else None


def _one_line(error: BaseException) -> str | None:
    if isinstance(error, SystemExit):
        return f"ended with exit status {error.code or 0} while others were at work"
    return "interrupted" if isinstance(error, KeyboardInterrupt) else one_line(error)


def _summary(error: BaseException) -> str:
    return traceback.format_exception_only(error)[0].splitlines()[0]


def _exit(status: int) -> NoReturn:
    if sys.stderr.isatty():
        sys.stderr.write("\x1b[?25h")  # A progress bar hides the cursor.
    # Another thread may hold a stream and never let it go.
    flush = threading.Thread(target=sys.stdout.flush, daemon=True)
    flush.start()
    flush.join(1.0)
    os._exit(status)
