"""Training that does not go on is ended, with every rank's stacks.

Every rank has a thread that knows what its main thread is at, a step, a validation or a save, and
for how long, counted in its own looks (a job that was suspended as a whole is not stuck). The first
rank at which that takes too long asks all on the board that `mesh.watch` shares; each leaves its
stacks in the run folder and says whether it waits for others. Who does not wait, or does not
answer, is the one that is stuck.
"""

import json
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import torch.distributed as dist

from rlt_dist.checkpoint.run_folder import STACKS
from rlt_dist.mesh.stacks import Where, where, write_stacks
from rlt_dist.mesh.world import World

T = TypeVar("T")

_SELDOM = 10
"""Times as long as a step may take what is not done at every step."""
_PERIOD = 1.0
"""Seconds between looks, or a quarter of the limit if that is less."""
_PATIENCE = 4.0
"""Seconds that ranks have to answer."""

_STUCK = "stuck"


@dataclass(frozen=True, eq=False)
class _Doing:
    """What the main thread is at, and the seconds that it may take."""

    what: str
    limit: float


class Watchdog:
    """Watches over a run from its first step until all is saved."""

    def __init__(self, world: World, run_folder: Path, limit: float) -> None:
        """
        Args:
            limit: seconds that a step may take.
        """
        self._world, self._limit = world, limit
        self._folder = run_folder / STACKS
        self._doing: _Doing | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def at(self, what: str, *, seldom: bool = False) -> None:
        """What was being done is over, and this process, like all others, begins something else.

        Args:
            seldom: it may take longer than a step.
        """
        self._doing = _Doing(what, self._limit * (_SELDOM if seldom else 1))

    def each(self, items: Iterable[T]) -> Iterator[T]:
        """The same items; what is being done may take its time for each of them."""
        for item in items:
            if self._doing is not None:
                self._doing = replace(self._doing)
            yield item

    def _look(self) -> None:
        with suppress(RuntimeError):  # Of a store that is gone, `mesh.watch` tells.
            self._watch_over()

    def _watch_over(self) -> None:
        board = self._world.watch.board()
        period = min(_PERIOD, self._limit / 4)
        seconds, seen = 0.0, self._doing
        while not self._over.wait(period):
            seconds = seconds + period if self._doing is seen else 0.0
            seen = self._doing
            if seen is not None and seconds >= seen.limit:
                self._write()  # The board may be that of a rank that is stuck itself.
                board.set(_STUCK, f"{seen.what} took more than {seen.limit:g} s")
            if board.check([_STUCK]):
                self._write()
                self._world.watch.end(self._verdict(board))

    def _write(self) -> None:
        write_stacks(self._folder / f"rank-{self._world.rank}.txt")

    def _verdict(self, board: dist.Store) -> str:
        """What all ranks are at, from their own words."""
        ranks = range(self._world.size)
        board.set(f"at {self._world.rank}", json.dumps(asdict(where())))
        until = time.monotonic() + _PATIENCE
        while time.monotonic() < until and not board.check([f"at {rank}" for rank in ranks]):
            time.sleep(0.05)
        answers = {
            self._world.watch.names[rank]: Where(**json.loads(board.get(f"at {rank}")))
            if board.check([f"at {rank}"])
            else None
            for rank in ranks
        }
        return (
            f"{board.get(_STUCK).decode()}: {accuse(answers)}; "
            f"the stacks of all ranks that answered are in {self._folder}"
        )

    def __enter__(self) -> "Watchdog":
        self._world.watch.leave_stacks = self._write
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        if kind is None:
            self._thread.join()


def accuse(answers: dict[str, Where | None]) -> str:
    """Who holds up the others, in words.

    Args:
        answers: by a rank's name what it is at; None: it did not answer.
    """
    stuck = {name: at for name, at in answers.items() if at is None or not at.waits}
    if not stuck:
        return f"all wait for each other, {_listed(answers)}"
    return f"stuck is {_listed(stuck)}"


def _listed(answers: dict[str, Where | None]) -> str:
    return ", ".join(
        f"{name}, which does not answer: stopped, or gone"
        if at is None
        else f"{name} at {at.place}"
        for name, at in answers.items()
    )
