"""Starts `rlt-dist train`, on one rank or several, and kills some of them with SIGKILL.

    python killer.py PLAN.json RESULTS.json

PLAN.json is a list of starts {"config", "kill"} of one rank, done one after the other; "kill" is
null or the fields of a `Kill`. RESULTS.json holds for each its exit status (negative: the signal),
its notes, what lay in its folder of checkpoints afterwards, and what it wrote to standard error.

torch is imported once, before any fork, so that a start takes a tenth of a second. Ranks get the
environment that torchrun gives, and no launcher ends them: those that are left when one is killed
have to end by themselves.
"""

import contextlib
import ctypes
import functools
import json
import os
import random
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch._dynamo
import torch.distributed
import torch.utils.tensorboard

import rlt_dist.checkpoint.saver
import rlt_dist.train.loop
import rlt_dist.train.session
from rlt_dist.cli.main import main as rlt_dist_main

LIMIT_SECONDS = 120
"""For a start that nobody kills."""
GONE_SECONDS = 40
"""From a kill on, for the other ranks, which miss a silent one after 20 s, and their helpers."""
MEET = "init_process_group"
FILE_EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")
CALLS = (
    (torch.distributed, MEET),
    (rlt_dist.train.loop, "train_step"),
    (rlt_dist.checkpoint.saver, "save_checkpoint"),
)
_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36  # of <linux/prctl.h>


@dataclass(frozen=True)
class Kill:
    """Who is killed, and when.

    Attributes:
        ranks: all at the same moment.
        at, nth: the moment is when the first of them notes for the nth time what this pattern is
            found in; 0: when it is started.
        seconds: so much later; 0: it is stopped there, and what it noted is not done.
    """

    ranks: tuple[int, ...] = (0,)
    at: str = ""
    nth: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Ended:
    """What became of a start.

    Attributes:
        statuses: by rank; negative: the signal.
        notes: by rank, `THREAD: OPERATION FILE` before each on a file of the run folder, and the
            begin and end of `CALLS`.
        told: by rank, what it wrote to standard output and error.
        killed: whether the moment came while a victim was alive.
        unmet: a victim was not known to the others yet, so that they were ended as a launcher does.
        seconds: from the kill until no process of the start was left.
        overdue: processes that had to be ended from here, by their command lines or ranks.
    """

    statuses: list[int]
    notes: list[list[str]]
    told: list[str]
    killed: bool
    unmet: bool
    seconds: float
    overdue: list[str]


def adopt_orphans() -> None:
    """Be the parent of every descendant whose own is gone, so that none is missed."""
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_with_parent() -> None:
    """Be killed when the parent ends, however it does."""
    ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def one_start(config: Path, ranks: int, kill: Kill | None, folder: Path) -> Ended:
    """Start a run and wait until nothing of it is left; `folder` takes notes and output."""
    port = _free_port()
    pids = [_fork(config, rank, ranks, port, kill, folder) for rank in range(ranks)]
    try:
        statuses, killed, unmet, overdue = _wait(pids, kill, folder)
    finally:
        _end_children(pids)
    return Ended(
        [os.waitstatus_to_exitcode(statuses[pid]) for pid in pids],
        [_notes(folder, rank) for rank in range(ranks)],
        [(folder / f"told-{rank}").read_text(errors="replace") for rank in range(ranks)],
        killed is not None,
        unmet,
        0.0 if killed is None else time.monotonic() - killed,
        overdue,
    )


def _wait(
    pids: list[int], kill: Kill | None, folder: Path
) -> tuple[dict[int, int], float | None, bool, list[str]]:
    """Kill as is wished and reap all; statuses, the time of the kill, `unmet` and `overdue`."""
    due = time.monotonic() + kill.seconds if kill and not kill.nth else None
    limit = time.monotonic() + LIMIT_SECONDS
    statuses: dict[int, int] = {}
    killed, unmet, overdue = None, False, []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
        except ChildProcessError:
            return statuses, killed, unmet, overdue
        now = time.monotonic()
        if pid and os.WIFSTOPPED(status):
            assert kill is not None
            due = now + kill.seconds
            if kill.seconds:
                os.kill(pid, signal.SIGCONT)
        elif pid:
            statuses[pid] = status
        if kill and due is not None and now >= due:
            due = None
            for victim in [pids[rank] for rank in kill.ranks if pids[rank] not in statuses]:
                os.kill(victim, signal.SIGKILL)
                killed, limit = now, now + GONE_SECONDS
            unmet = any(MEET not in "".join(_notes(folder, rank)) for rank in kill.ranks)
            if unmet:
                _end_children(pids)
        if now > limit:
            overdue += _end_children(pids)
        if not pid:
            time.sleep(0.001)


def _end_children(pids: list[int]) -> list[str]:
    """Kill what is left; what it was."""
    listed = [path.read_text() for path in Path("/proc/self/task").glob("*/children")]
    ended = []
    for pid in map(int, " ".join(listed).split()):
        with contextlib.suppress(OSError):
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
            os.kill(pid, signal.SIGKILL)
            if state != "Z":
                ended.append(f"rank {pids.index(pid)}" if pid in pids else command)
    return ended


def _free_port() -> int:
    """Below those that the system gives away itself, so that no rank's connection takes it."""
    while True:
        port = random.randint(15000, 30000)
        with contextlib.suppress(OSError), socket.socket() as tried:
            tried.bind(("127.0.0.1", port))
            return port


def _notes(folder: Path, rank: int) -> list[str]:
    path = folder / f"notes-{rank}"
    return path.read_text().splitlines() if path.exists() else []


def _fork(config: Path, rank: int, ranks: int, port: int, kill: Kill | None, folder: Path) -> int:
    """Start one rank; its pid."""
    (folder / f"notes-{rank}").unlink(missing_ok=True)
    (folder / f"told-{rank}").write_text("")  # It may be killed before it says anything.
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    pid = os.fork()
    if pid == 0:
        end_with_parent()
        if ranks > 1:
            os.environ.update({key: str(value) for key, value in (own | meeting).items()})
        first = kill is not None and rank == kill.ranks[0]
        _be_rank(config, rank, kill if first else None, folder)
    return pid


def _be_rank(config: Path, rank: int, kill: Kill | None, folder: Path) -> None:
    """Be one `rlt-dist train`; never returns."""
    descriptor = os.open(folder / f"told-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    _take_notes(str(config.parent / "run"), folder / f"notes-{rank}", kill)
    sys.argv = ["rlt-dist", "train", str(config)]
    sys.modules["__main__"] = ModuleType("__main__")  # else readers would import all of this
    code: Any = 1
    try:
        rlt_dist_main()
    except SystemExit as stop:
        code = stop.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


def _take_notes(run_folder: str, file: Path, kill: Kill | None) -> None:
    """Note what this process is about to do; at a kill's moment, stop and wait for it."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    lock, found = threading.RLock(), 0

    def note(what: str) -> None:
        nonlocal found
        text = f"{threading.current_thread().name.partition('_')[0]}: {what}"
        with lock:
            os.write(descriptor, f"{text}\n".encode())
            found += kill is not None and re.search(kill.at, text) is not None
            if kill is not None and found == kill.nth:
                found += 1
                signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)

    def note_path(event: str, path: str) -> None:
        if f"{path}/".startswith(f"{run_folder}/"):
            note(f"{event} {Path(path).relative_to(run_folder)}")

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in FILE_EVENTS:
            return
        path, *others = arguments
        if event == "open":
            event = f"open {others[0]}"
        elif others and others[-1] not in (-1, None) and not os.path.isabs(path):
            path = os.path.join(os.readlink(f"/proc/self/fd/{others[-1]}"), path)
        note_path(event, str(path))

    def fsync(descriptor: int, flush: Callable[[int], None] = os.fsync) -> None:
        note_path("os.fsync", os.readlink(f"/proc/self/fd/{descriptor}"))
        flush(descriptor)

    sys.addaudithook(audit)
    os.fsync = fsync
    for owner, name in CALLS:
        setattr(owner, name, _noted(getattr(owner, name), note))


def _noted(function: Callable[..., Any], note: Callable[[str], None]) -> Callable[..., Any]:
    @functools.wraps(function)
    def noted(*arguments: Any, **named: Any) -> Any:
        note(f"{function.__name__} begins")
        result = function(*arguments, **named)
        note(f"{function.__name__} ends")
        return result

    return noted


def main(plan: Path, results: Path) -> None:
    adopt_orphans()
    found = []
    for start in json.loads(plan.read_text()):
        config, kill = Path(start["config"]), start["kill"]
        ended = one_start(config, 1, kill and Kill(**kill), results.parent)
        left = (config.parent / "run" / "checkpoints").glob("*")
        found.append(
            {
                "status": ended.statuses[0],
                "notes": ended.notes[0],
                "left": sorted(path.name for path in left),
                "told": ended.told[0],
            }
        )
    results.write_text(json.dumps(found))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
