"""Starts `rlt-dist train` again and again and kills it with SIGKILL: a process for each start.

    python killer.py PLAN.json RESULTS.json

PLAN.json is a list of starts {"config", "kill"}, done one after the other. "kill" is null, or
{"seconds": s} (at that moment, by the parent), or {"event": k} (by itself, at the k-th operation of
any of its threads on a file of its run folder: open, flush, make, rename, remove). RESULTS.json
holds for each its exit status (negative: the signal), its file operations, each with its thread, if
it came to its end, what lay in its folder of checkpoints afterwards, and what it wrote to standard
error.

torch is imported once, before any fork, so that a start takes a tenth of a second.
"""

import contextlib
import json
import os
import select
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch._dynamo
import torch.utils.tensorboard  # noqa: F401

import rlt_dist.train.loop
import rlt_dist.train.session  # noqa: F401
from rlt_dist.cli.main import main as rlt_dist_main

LIMIT_SECONDS = 60
FILE_EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")


def list_file_events(run_folder: str, last: int | None) -> list[str]:
    """List this process's operations on files of a folder; before number `last` it is killed."""
    done: list[str] = []

    def note(event: str, path: str) -> None:
        if f"{path}/".startswith(f"{run_folder}/"):
            thread = threading.current_thread().name.partition("_")[0]
            done.append(f"{thread}: {event} {Path(path).relative_to(run_folder)}")
            if len(done) == last:
                os.kill(os.getpid(), signal.SIGKILL)

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event in FILE_EVENTS:
            note(event, str(arguments[0]))

    def fsync(descriptor: int, flush: Callable[[int], None] = os.fsync) -> None:
        note("os.fsync", os.readlink(f"/proc/self/fd/{descriptor}"))
        flush(descriptor)

    sys.addaudithook(audit)
    os.fsync = fsync
    return done


def child(start: dict[str, Any], told: Path) -> None:
    """Be one `rlt-dist train`; never returns."""
    descriptor = os.open(told, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    folder = str(Path(start["config"]).parent / "run")
    done = list_file_events(folder, (start["kill"] or {}).get("event"))
    sys.argv = ["rlt-dist", "train", start["config"]]
    code: Any = 1
    try:
        rlt_dist_main()
    except SystemExit as stop:
        code = stop.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    told.with_suffix(".events").write_text(json.dumps(done))
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


def one_start(start: dict[str, Any], told: Path) -> dict[str, Any]:
    events = told.with_suffix(".events")
    events.unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        child(start, told)
    seconds = (start["kill"] or {}).get("seconds", LIMIT_SECONDS)
    over = os.pidfd_open(pid)
    if not select.select([over], [], [], seconds)[0]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    os.close(over)
    left = (Path(start["config"]).parent / "run" / "checkpoints").glob("*")
    return {
        "status": os.waitstatus_to_exitcode(status),
        "events": json.loads(events.read_text()) if events.exists() else None,
        "left": sorted(path.name for path in left),
        "told": told.read_text(errors="replace"),
    }


def main(plan: Path, results: Path) -> None:
    told = results.with_suffix(".told")
    starts = json.loads(plan.read_text())
    results.write_text(json.dumps([one_start(start, told) for start in starts]))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
