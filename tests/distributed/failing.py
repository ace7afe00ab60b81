"""One of four ranks fails in the middle of a run, while all others wait for it or compute.

    failing.py RUN

RUN is JSON: {"mesh", "rank", "how", "others": "wait" or "compute"}. With a list of such runs and a
folder, it is all four ranks of every run, as srun would start them: nobody ends the others, and
rank 0 serves the store.

    failing.py RUNS FOLDER

writes FOLDER/results.json: for each run {"statuses", "seconds"} by rank, from the start of the run
to the rank's end, and FOLDER/RUN-RANK.err. torch is imported once, before any fork.
"""

import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rlt_dist.mesh import watch
from rlt_dist.mesh.axes import parse_axes
from rlt_dist.mesh.collectives import all_sum, together
from rlt_dist.mesh.mesh import Mesh, open_mesh
from rlt_dist.mesh.world import open_world
from rlt_dist.util.errors import UserError


def mistake(_: Mesh) -> None:
    raise UserError("no such file")


def shared_mistake(mesh: Mesh) -> None:
    together(mesh.world, lambda: mistake(mesh))


def late_mistake(_: Mesh) -> None:
    """The others notice its connections before it says a word."""
    time.sleep(1)
    raise UserError("no such file")


def full_disk(_: Mesh) -> None:
    raise OSError(28, "No space left on device", "metrics.jsonl")


def defect(_: Mesh) -> None:
    raise ZeroDivisionError("a defect")


def leave(_: Mesh) -> None:
    sys.exit(0)


def vanish(_: Mesh) -> None:
    os._exit(0)


def killed(_: Mesh) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


WAYS: dict[str, Callable[[Mesh], None]] = {
    way.__name__: way
    for way in (
        *(mistake, shared_mistake, late_mistake, full_disk, defect),
        *(leave, vanish, killed),
    )
}


def work(mesh: Mesh) -> None:
    """A step: every axis's sum is waited for."""
    for line in (mesh.tensor, mesh.pipeline, mesh.data):
        all_sum(torch.ones(3), line)


def be_a_rank(run: dict[str, Any]) -> None:
    with open_world() as world, open_mesh(world, parse_axes(run["mesh"])) as mesh:
        work(mesh)
        print("at work", flush=True)
        if world.rank == run["rank"]:
            WAYS[run["how"]](mesh)
        elif run["how"] == "late_mistake":
            raise RuntimeError("Connection closed by peer [127.0.0.1]:1234")
        elif run["how"] == "shared_mistake":
            together(world, lambda: None)
        elif run["others"] == "compute":
            time.sleep(120)
        work(mesh)


def fork_rank(run: dict[str, Any], rank: int, port: int, errors: Path) -> int:
    """The process of a rank."""
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
        meeting = {"WORLD_SIZE": 4, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        mine = {"RANK": rank, "LOCAL_RANK": rank, "OMP_NUM_THREADS": 1}
        os.environ.update({name: str(value) for name, value in (meeting | mine).items()})
        with contextlib.suppress(BaseException):
            be_a_rank(run)
        os._exit(0)
    return pid


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def watch_runs(runs: list[dict[str, Any]], folder: Path) -> None:
    """All runs, a little apart from one another."""
    ranks, ends, began = {}, {}, []
    for number, run in enumerate(runs):
        port = free_port()
        began.append(time.monotonic())
        for rank in range(4):
            ranks[fork_rank(run, rank, port, folder / f"{number}-{rank}.err")] = (number, rank)
        time.sleep(1)
    while ranks:
        pid, status = os.wait()
        number, rank = ranks.pop(pid)
        seconds = time.monotonic() - began[number]
        ends[number, rank] = (os.waitstatus_to_exitcode(status), seconds)
    results = []
    for number in range(len(runs)):
        statuses, seconds = zip(*(ends[number, rank] for rank in range(4)), strict=True)
        results.append({"statuses": statuses, "seconds": seconds})
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    watch._SILENCE = 8.0  # 20 s are long in a test.
    if len(sys.argv) == 3:
        watch_runs(json.loads(sys.argv[1]), Path(sys.argv[2]))
    else:
        be_a_rank(json.loads(sys.argv[1]))
