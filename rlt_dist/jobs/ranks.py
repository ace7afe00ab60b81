"""A launcher and its ranks, from their start to their end.

The launcher is one of many, and its exit status says little. What counts is the ranks' own record
(`util.ending`): its status is given, and its error is the last thing on the screen. A signal goes
to the ranks themselves, where some are on this machine: launchers differ in what they make of one,
and a signal at one rank is a wish of all.
"""

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rlt_dist.mesh.launched import RANK_NAME
from rlt_dist.util.children import end_with, own_name
from rlt_dist.util.ending import (
    ASKED,
    ENDED,
    OWNER,
    START,
    STATUS,
    Ended,
    How,
    leave_wish,
    read_ended,
)
from rlt_dist.util.errors import UserError
from rlt_dist.util.log import LOGS, show_error, warn

PATIENCE = 20.0
"""Seconds in which ranks may end after another one has failed, or after a second signal."""

_PASSED_ON = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
_PERIOD = 0.1
_LEAVE = 3.0
"""Seconds that a launcher, and what it leaves, has to end by itself."""
_STUCK = 30.0
"""Seconds after which a process that SIGKILL does not end is left: a disk or a device holds it."""


@dataclass(frozen=True)
class Ending:
    """How a start of the ranks ended.

    Attributes:
        how: as the ranks recorded it; failed if they left no record.
        status: to exit with: 0 finished, 75 stopped and saved, 2 a mistake or the guard, 1 failed.
        why: in one line; None for what finished.
    """

    how: How
    status: int
    why: str | None


def run_ranks_with(
    command: Sequence[str],
    environment: Mapping[str, str],
    run_folder: Path,
    *,
    patience: float = PATIENCE,
) -> Ending:
    """Start ranks with a launcher, wait for their end, and leave no process of theirs behind.

    SIGTERM, SIGUSR1, SIGINT and SIGHUP are passed on: the ranks finish the step, save and end. At a
    second one they end at once. Ranks of this machine that are still there `patience` seconds after
    one has failed are killed, such as one that was stopped. The error is shown as the last line.

    Only the main thread may call it.

    Args:
        command: the launcher's, such as one of `jobs.launchers`.
        environment: all of its environment. `RLT_DIST_START` is the name of the start, if several
            launchers work on it; they have begun before any rank of theirs ends.
        run_folder: where the ranks record how they ended; it is made if it is not there.

    Raises:
        UserError: the launcher is not installed.
    """
    start = environment.get(START) or uuid.uuid4().hex[:12]
    own = {START: start, OWNER: f"{own_name()}/{uuid.uuid4().hex}"}
    run_folder.mkdir(parents=True, exist_ok=True)
    for left in (ENDED, ASKED):
        (run_folder / left).unlink(missing_ok=True)
    with noted_signals() as heard, _launcher(command, {**environment, **own}) as launcher:
        minder = _Minder(launcher, own[OWNER], run_folder, start, patience)
        while launcher.poll() is None:
            minder.look(heard)
            time.sleep(_PERIOD)
    ending = _ending(read_ended(run_folder, start), launcher.returncode, run_folder)
    if ending.how == "stopped":
        warn(f"{ending.why}; the same command goes on from there")
    elif ending.why is not None:
        show_error(ending.why)
    return ending


def begin(
    command: Sequence[str],
    environment: Mapping[str, str] | None = None,
    output: IO[str] | None = None,
    errors: IO[str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a process that Ctrl-C does not reach, and that is asked to end when this one is gone.

    Args:
        environment: all of it; None: this process's.
        output, errors: files for what it prints there; None: where this process prints.

    Raises:
        UserError: it is not installed.
    """
    own = os.getpid()
    try:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            process_group=0,
            preexec_fn=lambda: end_with(own, signal.SIGTERM),  # noqa: PLW1509 - system calls only
        )
    except FileNotFoundError:
        raise UserError(f"{command[0]} is not installed here") from None


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process that `begin` started, with its group; one that cannot be ended is left."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_LEAVE)


class _Minder:
    """What is to be done while the ranks are at work."""

    def __init__(
        self,
        launcher: subprocess.Popen[bytes],
        owner: str,
        run_folder: Path,
        start: str,
        patience: float,
    ) -> None:
        self._launcher, self._owner = launcher, owner
        self._run_folder, self._start, self._patience = run_folder, start, patience
        self._noted, self._passed, self._waits = False, 0, 0.0
        self._ended: Ended | None = None
        self._since, self._left = 0.0, set[int]()

    def look(self, heard: Sequence[int]) -> None:
        """Pass on signals, and end what does not end by itself."""
        if heard and not self._noted:
            leave_wish(self._run_folder, self._start)
            self._noted = True
        if len(heard) > self._passed:
            self._pass_on(heard)
        self._end_those_left()

    def _pass_on(self, heard: Sequence[int]) -> None:
        """At the first look at which some process can hear it."""
        ranks = _ranks(self._owner)
        self._waits += _PERIOD
        if not ranks and self._waits < self._patience and len(heard) == 1:
            return  # They are not there yet, or all elsewhere.
        # Ranks know no hang-up. What srun or ssh started elsewhere, only the launcher can reach.
        number = heard[self._passed]
        number = signal.SIGTERM if number == signal.SIGHUP or not ranks else number
        for process in ranks or {self._launcher.pid}:
            _send(process, number)
        self._passed, self._waits = self._passed + 1, 0.0

    def _end_those_left(self) -> None:
        ended = read_ended(self._run_folder, self._start)
        if ended is None or ended != self._ended:
            self._ended, self._since = ended, time.monotonic()
            self._left = _ranks(self._owner) if ended else set()
            return
        waited = time.monotonic() - self._since
        if waited > self._patience and self._left:
            for process in self._left & _ranks(self._owner):
                _send(process, signal.SIGKILL)
            self._left = set()
        if waited > 3 * self._patience:  # A rank elsewhere: only the launcher's end ends it.
            self._launcher.terminate()
            self._since = time.monotonic()


def _ending(ended: Ended | None, status: int, run_folder: Path) -> Ending:
    """What the ranks recorded, or that they did not."""
    if ended is not None:
        return Ending(ended.how, STATUS[ended.how], ended.why)
    how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"status {status}"
    why = f"the ranks ended without a word (their launcher: {how}); see {run_folder / LOGS}"
    return Ending("failed", STATUS["failed"], why)


@contextmanager
def _launcher(
    command: Sequence[str], environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """The launcher in a process group of its own; nothing that it started outlives the block."""
    launcher = begin(command, environment)
    try:
        yield launcher
    finally:
        launcher.terminate()
        with suppress(subprocess.TimeoutExpired):
            launcher.wait(_LEAVE)
        until = time.monotonic() + _LEAVE
        while (left := _processes(environment[OWNER])) and time.monotonic() < until:
            time.sleep(_PERIOD)
        while left and time.monotonic() < until + _STUCK:
            for process in left:
                _send(process, signal.SIGKILL)
            time.sleep(_PERIOD)
            left = _processes(environment[OWNER])
        if left:
            warn(f"processes {sorted(left)} cannot be ended: a disk or a device holds them")
        elif launcher.poll() is None:
            launcher.wait()


@contextmanager
def noted_signals() -> Iterator[list[int]]:
    """The signals that this process is sent meanwhile, for those that it has started."""
    heard: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: heard.append(number))
        for number in _PASSED_ON
    }
    try:
        yield heard
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ranks(owner: str) -> set[int]:
    """The ranks of this machine, once they have found their places."""
    found = set()
    for process in _processes(owner):
        with suppress(OSError):
            if Path(f"/proc/{process}/comm").read_text().startswith(RANK_NAME):
                found.add(process)
    return found


def _processes(owner: str) -> set[int]:
    """All processes of this machine that were started with a mark, wherever they are by now."""
    mark, found = f"{OWNER}={owner}".encode(), set()
    for process in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            if mark in Path(f"/proc/{process}/environ").read_bytes().split(b"\0"):
                found.add(int(process))
    return found


def _send(process: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, number)
