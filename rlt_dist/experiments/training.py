"""Runs trained side by side on this machine, each in a process of its own.

A process is `rlt-dist train` with a run's configuration, which lies beside its folder (RUN.yaml),
as do what it says (RUN.log) and who has it trained (.RUN.lock). What was broken off goes on, and
what is done is left alone.
"""

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rlt_dist.checkpoint.run_folder import METRICS, check_unchanged
from rlt_dist.config.run import RunConfig
from rlt_dist.jobs.ranks import begin, end, noted_signals
from rlt_dist.jobs.status import last_record
from rlt_dist.util.ending import STATUS, last_ended
from rlt_dist.util.errors import Trouble, UserError
from rlt_dist.util.files import make_folder, write_atomic
from rlt_dist.util.lock import holder, locked

Watch = Callable[[RunConfig, int], None]
"""Called now and then with a run that is being trained and the steps that it has done."""

_PERIOD = 0.2
_LEAVES = (STATUS["stopped"], -signal.SIGTERM)
"""Statuses of a process that was asked to end; the second one's had not begun to train."""


def train_side_by_side(
    runs: Sequence[RunConfig], watch: Watch, *, at_once: int | None = None
) -> bool:
    """Train runs until all are done.

    SIGTERM, SIGUSR1, SIGINT and SIGHUP are passed on: the runs finish the step, save and end. At a
    second one they end at once. Where a run fails, the others are trained all the same.

    Only the main thread may call it.

    Args:
        runs: each with a folder of its own; they are begun in this order.
        at_once: how many are trained at a time, each on one thread; None: as many as there are
            cores.

    Returns:
        whether all are done; if not, they were asked to stop, and the same call goes on.

    Raises:
        UserError: a run was begun with another configuration; or runs have failed, which are named
            with the last that they said, one of them by a mistake.
        Trouble: another process trains a run, and none was begun; or runs have failed otherwise.
    """
    runs = [config.resolved() for config in runs]
    for config in runs:
        check_unchanged(config)
    left = [config for config in runs if not is_done(config)]
    with _held(left):
        failed = _train(left, watch, at_once or len(os.sched_getaffinity(0)))
    if failed:
        whys = "; ".join(training.why for training in failed)
        told = f"{len(failed)} of {len(runs)} runs failed: {whys}"
        if any(training.process.returncode == STATUS["mistake"] for training in failed):
            raise UserError(told)
        raise Trouble(f"{told}; the same command goes on")
    return all(map(is_done, runs))


def is_done(config: RunConfig) -> bool:
    """Whether a run has done its last step."""
    ended = last_ended(config.run_folder)
    return ended is not None and ended.how == "finished"


@contextmanager
def _held(runs: Iterable[RunConfig]) -> Iterator[None]:
    """Hold runs for this process, before theirs do, which takes them seconds."""
    with ExitStack() as held:
        for config in runs:
            folder = config.run_folder
            make_folder(folder.parent)
            lock = locked(folder.parent, f"trains {folder.name}", f".{folder.name}.lock")
            held.enter_context(lock)
            if here := holder(folder):
                raise Trouble(f"{folder}: {here}; wait for it, or give another folder")
        yield


def _train(runs: Iterable[RunConfig], watch: Watch, places: int) -> list["_Training"]:
    """Train runs, so many at a time; those that have failed."""
    waiting = deque(runs)
    working: list[_Training] = []
    failed: list[_Training] = []
    with noted_signals() as heard:
        try:
            told = 0
            while working or (waiting and not heard):
                while waiting and len(working) < places and not heard:
                    working.append(_begin(waiting.popleft()))
                time.sleep(_PERIOD)
                asked = len(heard)
                for training in working:
                    watch(training.config, training.step)
                    if asked > told:
                        training.process.send_signal(signal.SIGTERM)
                told = asked
                over = [training for training in working if training.process.poll() is not None]
                working = [training for training in working if training not in over]
                failed += [training for training in over if training.has_failed(asked > 0)]
        finally:
            for training in working:
                end(training.process)
    return failed


@dataclass(frozen=True)
class _Training:
    """A run and the process that trains it."""

    config: RunConfig
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def step(self) -> int:
        """The last one that it has done."""
        return last_record(self.config.run_folder / METRICS).get("step", 0)

    def has_failed(self, asked: bool) -> bool:
        """Once it has ended: it is not done, nor ended because it was asked."""
        status = self.process.returncode
        return not (status == 0 or (asked and status in _LEAVES))

    @property
    def why(self) -> str:
        """Why it has failed."""
        status = self.process.returncode
        said = self.log.read_text(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(said) if line.strip()), "it said nothing")
        killed = f"was ended by {signal.Signals(-status).name}: " if status < 0 else ""
        return f"{self.config.run_folder.name}: {killed}{last} (see {self.log})"


def _begin(config: RunConfig) -> _Training:
    file, log = (_beside(config, ending) for ending in ("yaml", "log"))
    write_atomic(file, config.to_yaml())
    with log.open("w") as said:
        command = (sys.executable, "-m", "rlt_dist", "train", str(file))
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = begin(command, environment, output=said, errors=said)
    return _Training(config, process, log)


def _beside(config: RunConfig, ending: str) -> Path:
    return config.run_folder.with_name(f"{config.run_folder.name}.{ending}")
