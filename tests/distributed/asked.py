"""Runs of `rlt-dist train` in which something happens at a moment: a signal, a sleep, a halt.

    asked.py RUNS RESULTS

RUNS is a JSON file, a list of {"config", "ranks", "events", "arguments", "ends_soon", "after"}:
rank 0 serves the store, as under srun, and nobody ends the others. An event is {"rank", "moment",
"do", ...}: what this rank does when it is there for the first time. RESULTS gets, for each run,
{"statuses", "seconds", "errors"} by rank, from the first event to each rank's end. "ends_soon" is a
rank whose job ends in 10 s. A run with "after" begins when that one, by its number, has ended.
torch is imported once, before any fork; `TOGETHER` runs are under way at a time.
"""

import ctypes
import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch._dynamo
import torch.utils.tensorboard

from rlt_dist.checkpoint import saver
from rlt_dist.cli.main import main as rlt_dist_main
from rlt_dist.mesh import watch
from rlt_dist.train import loop, session, step, watchdog
from rlt_dist.util.signals import SIGNALS

TOGETHER = 4
LIMIT_SECONDS = 60
BETWEEN = 0.7
"""Seconds between two signals that are two wishes."""
HANDLERS = "handlers.json"
"""Written by a rank that looks what Python calls for each signal."""

Run = dict[str, Any]


class Doings:
    """What a rank does at which moment, once each."""

    def __init__(self, run: Run, rank: int, folder: Path) -> None:
        self._folder = folder
        self._run_folder = Path(run["config"]).parent / "run"
        self._left = [event for event in run["events"] if event["rank"] == rank]
        (folder / f"pid-{rank}").write_text(str(os.getpid()))
        for moment, (owner, name) in MOMENTS.items():
            self._before(owner, name, moment)

    def _before(self, owner: Any, name: str, moment: str) -> None:
        original = getattr(owner, name)

        def wrapped(*arguments: Any, **choices: Any) -> Any:
            number = f" {arguments[5]}" if moment == "step" else ""
            for event in list(self._left):
                if event["moment"] == moment + number:
                    self._left.remove(event)
                    self._do(**event)
            return original(*arguments, **choices)

        setattr(owner, name, wrapped)

    def _do(
        self, do: str, to: int = 0, name: str = "SIGTERM", seconds: float = 0.4, **_: Any
    ) -> None:
        if not (began := self._folder / "began").exists():
            began.write_text(str(time.time()))
        if do == "signal":
            self._send(to, name)
            time.sleep(seconds)
        elif do == "signal while busy":
            threading.Timer(seconds / 2, self._send, (to, name)).start()
            busy(seconds)
        elif do == "signal to the group":
            os.killpg(self._pid(to), signal.Signals[name])
        elif do == "two signals":
            self._send(to, name)
            threading.Timer(BETWEEN, self._send, (to, "SIGINT")).start()
            busy(LIMIT_SECONDS)
        elif do == "look at handlers":
            found = {number.name: signal.getsignal(number).__module__ for number in SIGNALS}
            (self._folder / HANDLERS).write_text(json.dumps(found))
        elif do == "sleep":
            time.sleep(seconds)
        elif do == "forbid saves":
            (self._run_folder / "checkpoints").touch()
        elif do == "spin":
            while True:
                pass
        elif do == "halt":
            os.kill(os.getpid(), signal.SIGSTOP)

    def _send(self, to: int, name: str) -> None:
        os.kill(self._pid(to), signal.Signals[name])

    def _pid(self, rank: int) -> int:
        return int((self._folder / f"pid-{rank}").read_text())


def busy(seconds: float) -> None:
    """Keep the main thread outside of Python, whatever signals come: as a collective does."""
    told, tell = os.pipe()
    threading.Timer(seconds, os.write, (tell, b"x")).start()
    ctypes.CDLL(None).read(told, ctypes.create_string_buffer(1), 1)


MOMENTS: dict[str, tuple[Any, str]] = {
    "loading": (session, "open_corpora"),
    "step": (step, "_forward_backward"),
    "validating": (loop, "_validate"),
    "saving": (session.Session, "save"),
    "saved": (saver, "Saved"),
    "over": (watchdog.Watchdog, "__exit__"),
}


def be_a_rank(run: Run, rank: int, port: int, folder: Path) -> None:
    os.dup2(os.open(folder / f"{rank}.err", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    if run["ranks"] > 1:
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": run["ranks"]}
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({key: str(value) for key, value in (own | meeting).items()})
    if rank == run.get("ends_soon"):
        os.environ["SLURM_JOB_END_TIME"] = str(int(time.time()) + 10)
    os.setpgid(0, 0)  # torchrun gives each rank a group of its own as well
    Doings(run, rank, folder)
    sys.argv = ["rlt-dist", "train", run["config"], *run.get("arguments", ())]
    code: Any = 1
    try:
        rlt_dist_main()
    except SystemExit as stop:
        code = stop.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Runs:
    """Some at a time."""

    def __init__(self, runs: list[Run], folder: Path) -> None:
        self._runs, self._folder = runs, folder
        self._waiting = list(range(len(runs)))
        self._at_work: dict[int, tuple[int, int, float]] = {}
        self._ends: dict[tuple[int, int], tuple[int, float]] = {}

    def results(self) -> list[dict[str, Any]]:
        while self._waiting or self._at_work:
            self._start()
            self._collect()
            time.sleep(0.02)
        return [self._result(number) for number in range(len(self._runs))]

    def _start(self) -> None:
        under_way = {number for number, _, _ in self._at_work.values()}
        for number in list(self._waiting):
            after = self._runs[number].get("after")
            if len(under_way) >= TOGETHER:
                return
            if after is None or not (after in under_way or after in self._waiting):
                self._waiting.remove(number)
                under_way.add(number)
                self._fork(number)

    def _fork(self, number: int) -> None:
        run, port, folder = self._runs[number], free_port(), self._folder / str(number)
        folder.mkdir()
        for rank in range(run["ranks"]):
            pid = os.fork()
            if pid == 0:
                be_a_rank(run, rank, port, folder)
            self._at_work[pid] = (number, rank, time.time())

    def _collect(self) -> None:
        for pid, (number, rank, began) in list(self._at_work.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self._at_work[pid]
                self._ends[number, rank] = (os.waitstatus_to_exitcode(status), time.time())
                continue
            left = sum(at[0] == number for at in self._at_work.values())
            halts = sum(event["do"] == "halt" for event in self._runs[number]["events"])
            if left <= halts or time.time() - began > LIMIT_SECONDS:
                os.kill(pid, signal.SIGKILL)

    def _result(self, number: int) -> dict[str, Any]:
        folder, ranks = self._folder / str(number), range(self._runs[number]["ranks"])
        statuses, ends = zip(*(self._ends[number, rank] for rank in ranks), strict=True)
        began = folder / "began"
        since = float(began.read_text()) if began.exists() else 0.0
        return {
            "statuses": statuses,
            "seconds": [end - since for end in ends],
            "errors": [(folder / f"{rank}.err").read_text(errors="replace") for rank in ranks],
        }


if __name__ == "__main__":
    watch._SILENCE = 5.0  # 20 s are long in a test.
    torch.set_num_threads(1)
    plan, results = map(Path, sys.argv[1:])
    results.write_text(json.dumps(Runs(json.loads(plan.read_text()), results.parent).results()))
