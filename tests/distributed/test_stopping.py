"""A signal at any one rank, at any moment, or a deadline: all stop, and nothing is lost."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
SECONDS = 30

SIGNALS = ("SIGTERM", "SIGUSR1", "SIGINT")
MOMENTS = {"loading": 0, "step 2": 2, "step 5": 5, "validating": 3, "saving": 4}
"""Moments, and the step after which the run stops."""

STEPS = ("train.steps=6", "validation.every=3", "checkpoint.every=4", "guard.step_timeout=30")


def event(moment: str, do: str, rank: int = 0, **more: Any) -> dict[str, Any]:
    return {"rank": rank, "moment": moment, "do": do, **more}


def _asked() -> dict[str, tuple[int, list[dict[str, Any]]]]:
    """By name: ranks, and what happens. One asks the other: that is in a collective meanwhile."""
    found = {}
    for number, moment in enumerate(MOMENTS):
        name = SIGNALS[number % 3]
        do = "signal while busy" if moment.startswith("step") else "signal"
        found[f"alone {moment}"] = 1, [event(moment, do, name=name)]
        asker = number % 2
        found[f"two {moment}"] = 2, [event(moment, "signal", asker, to=1 - asker, name=name)]
    return found


ASKED = _asked()
SECOND = {
    "alone": (1, [event("step 3", "two signals")]),
    "in a collective": (2, [event("step 3", "two signals", 1, to=0)]),
    "outside of Python": (2, [event("step 3", "two signals", 1, to=1)]),
}
LATE = {"alone": (1, [event("over", "signal")]), "two": (2, [event("over", "signal", 1, to=1)])}
SLOW = [event(f"step {step}", "sleep", seconds=0.6) for step in range(2, 30)]


def plan(folder: Path, configure: Callable[..., Any]) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = []

    def add(name: str, ranks: int, events: list[Any], *choices: str, **more: Any) -> None:
        configure(folder / name, "rlt1", *STEPS, *choices)
        file = str(folder / name / "run.yaml")
        runs.append({"name": name, "config": file, "ranks": ranks, "events": events, **more})

    for name, (ranks, events) in ASKED.items():
        add(name, ranks, events)
        again = {**runs[-1], "events": [], "after": len(runs) - 1, "name": f"{name} again"}
        runs.append(again)
    for name, (ranks, events) in SECOND.items():
        add(f"second {name}", ranks, events)
    for name, (ranks, events) in LATE.items():
        add(f"late {name}", ranks, events)
    for ranks in (1, 2):
        add(f"whole {ranks}", ranks, [])
    wish = ["--stop-before", "7s"]
    add("deadline wished", 1, SLOW, "train.steps=100", arguments=wish)
    job_end = {"1": {"SLURM_JOB_END_TIME": str(int(time.time()) + 10)}}
    add("deadline of the job", 2, SLOW, "train.steps=100", environment=job_end)
    return runs


@pytest.fixture(scope="session")
def asked(once: Callable[..., Path], configure: Callable[..., Any]) -> Path:
    """All runs, in one start of Python."""

    def make(folder: Path) -> None:
        runs = plan(folder, configure)
        (folder / "plan.json").write_text(json.dumps(runs))
        subprocess.run(
            [
                sys.executable,
                str(HERE / "asked.py"),
                str(folder / "plan.json"),
                str(folder / "out"),
            ],
            env=os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
            timeout=280,
            check=True,
        )
        names = [run["name"] for run in runs]
        results = json.loads((folder / "out").read_text())
        (folder / "by_name.json").write_text(json.dumps(dict(zip(names, results, strict=True))))

    return once("asked", make)


@pytest.fixture
def outcome(asked: Path) -> Callable[[str], dict[str, Any]]:
    """`outcome(name)`: what became of a run, and how its folder says that it ended."""
    by_name = json.loads((asked / "by_name.json").read_text())

    def of(name: str) -> dict[str, Any]:
        ended = asked / name.removesuffix(" again") / "run" / "ended.json"
        return by_name[name] | {"ended": json.loads(ended.read_text()) if ended.exists() else None}

    return of


@pytest.mark.parametrize("name", ASKED)
def test_a_signal_at_any_moment_stops_all_after_one_step_and_the_run_goes_on_to_the_bit(
    outcome: Any, asked: Path, metrics: Any, name: str
) -> None:
    ranks, ((moment, sent, to),) = (
        ASKED[name][0],
        [(e["moment"], e["name"], e.get("to", 0)) for e in ASKED[name][1]],
    )
    stopped = outcome(name)
    assert stopped["statuses"] == [75] * ranks, stopped["errors"]
    assert max(stopped["seconds"]) < SECONDS
    why = f"stopped after step {MOMENTS[moment]}: rank {to} was sent {sent}"
    assert "".join(stopped["errors"]).count(why) == 1
    assert "rlt-dist: error" not in "".join(stopped["errors"])
    again = outcome(f"{name} again")
    assert again["statuses"] == [0] * ranks, again["errors"]
    assert again["ended"] == {"how": "finished", "step": 6, "why": None}
    assert metrics(asked / name / "run") == metrics(asked / f"whole {ranks}" / "run")
