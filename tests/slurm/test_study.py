"""A scaling study as arrays of a real Slurm: a point is killed on the way, and finished later."""

import csv
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlt_dist.jobs.status import Status, status_of

NODES = (1, 2, 4)
STEPS = 80
PATIENCE = 200  # seconds
OPTIONS = ("--slurm", "--time", "9", "--template")

pytestmark = pytest.mark.timeout(600)


def wait_until(true: Callable[[], bool], runs: list[Path]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline, told(runs)
        time.sleep(0.2)


def told(runs: list[Path]) -> str:
    logs = [log for run in runs for log in run.glob("jobs/*/output.log")]
    logs += [log for run in runs for log in run.glob("jobs/*/tasks/*/output.log")]
    return "\n".join(f"{log}:\n{log.read_text()[-3000:]}" for log in logs)


def states(runs: list[Path]) -> list[Status]:
    return [status_of(run) for run in runs]


def test_a_study_is_submitted_a_point_killed_and_finished_and_all_of_it_reported(
    command: Any,
    cluster: dict[str, str],
    make_study: Callable[..., Path],
    template: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("SLURM_CONF", cluster["SLURM_CONF"])
    file, out = make_study(tmp_path, nodes=list(NODES), steps=STEPS), tmp_path / "out"
    options = (*OPTIONS, template)
    runs = [out / "points" / f"nodes={nodes}" for nodes in NODES]
    victim = runs[1]

    code, ids, err = command("scale", "run", file, "--output", out, *options)
    assert code == 0, err
    assert len(ids.split()) == len(NODES)
    assert [status_of(run).job_id for run in runs] == [
        f"{job}_{task}" for task, job in enumerate(ids.split())
    ]
    code, none, err = command("scale", "run", file, "--output", out, *options)
    assert (code, none) == (0, "")  # what is at work is left alone
    assert err.count(": active, job ") == len(NODES)

    wait_until(lambda: status_of(victim).step > 5, runs)
    assert command("cancel", victim)[0] == 0
    wait_until(lambda: not any(status.active for status in states(runs)), runs)
    assert [status.state for status in states(runs)] == ["finished", "cancelled", "finished"], told(
        runs
    )
    assert status_of(victim).step < STEPS

    code, again, err = command("scale", "run", file, "--output", out, *options)
    assert code == 0, err
    assert status_of(victim).job_id == f"{again.strip()}_1"
    wait_until(lambda: not status_of(victim).active, runs)
    assert [status.state for status in states(runs)] == ["finished"] * 3, told(runs)
    last = json.loads((victim / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["step"] == STEPS

    code, page, err = command("scale", "report", file, "--output", out)
    assert code == 0, err
    assert page.splitlines()[-1] == str(out / "report.html")
    rows = list(csv.DictReader((out / "points.csv").open()))
    assert [(row["nodes"], row["mesh"]) for row in rows] == [
        ("1", "1x1x1"),
        ("2", "2x1x1"),
        ("4", "4x1x1"),
    ]
    assert {row["measured_steps"] for row in rows} == {str(STEPS - 2)}
    losses = [float(row["measured_loss"]) for row in rows]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-4)
