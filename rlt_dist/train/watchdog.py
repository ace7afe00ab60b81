"""A step that does not end is ended, with every rank's stacks.

Every rank has a thread that knows how long its step has taken, counted in its own looks (a job that
was suspended as a whole is not stuck). The first rank whose step takes too long asks all on the
board that `mesh.watch` shares; each leaves its stacks in the run folder and says whether it waits
for others. Who does not wait, or does not answer, is the one that is stuck.
"""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

import torch.distributed as dist

from rlt_dist.checkpoint.run_folder import STACKS
from rlt_dist.mesh.stacks import Where, where, write_stacks
from rlt_dist.mesh.world import World

_PERIOD = 1.0
"""Seconds between looks, or a quarter of the limit if that is less."""
_PATIENCE = 4.0
"""Seconds that ranks have to answer."""

_STUCK = "stuck"


class Watchdog:
    """Watches over the steps of a run."""

    def __init__(self, world: World, run_folder: Path, limit: float) -> None:
        """
        Args:
            limit: seconds that a step may take; the first, which compiles, may take any time.
        """
        self._world, self._limit = world, limit
        self._folder = run_folder / STACKS
        self._step: int | None = None
        self._warm = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """What is done inside is watched; all ranks begin it together."""
        self._step = number if self._warm else None
        yield
        self._step, self._warm = None, True

    def _look(self) -> None:
        with suppress(RuntimeError):  # Of a store that is gone, `mesh.watch` tells.
            self._watch_over_steps()

    def _watch_over_steps(self) -> None:
        board = self._world.watch.board()
        period = min(_PERIOD, self._limit / 4)
        seconds, seen = 0.0, None
        while not self._over.wait(period):
            seconds = seconds + period if self._step == seen is not None else 0.0
            seen = self._step
            if seconds >= self._limit:
                self._write()  # The board may be that of a rank that is stuck itself.
                board.set(_STUCK, str(seen))
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
            rank: Where(**json.loads(board.get(f"at {rank}")))
            if board.check([f"at {rank}"])
            else None
            for rank in ranks
        }
        step = board.get(_STUCK).decode()
        return (
            f"step {step} took more than {self._limit:g} s: {accuse(answers)}; "
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


def accuse(answers: dict[int, Where | None]) -> str:
    """Who holds up the others, in words.

    Args:
        answers: by rank what it is at; None: it did not answer.
    """
    stuck = {rank: at for rank, at in answers.items() if at is None or not at.waits}
    if not stuck:
        return f"all wait for each other, {_listed(answers)}"
    return f"stuck is {_listed(stuck)}"


def _listed(answers: dict[int, Where | None]) -> str:
    return ", ".join(
        f"rank {rank} (does not answer: stopped, or gone)"
        if at is None
        else f"rank {rank} at {at.place}"
        for rank, at in answers.items()
    )
