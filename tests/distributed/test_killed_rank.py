"""Two processes under launch/torchrun.sh: what a person sees, and what a kill of one leaves."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlt_dist.checkpoint.manifest import checkpoints, verify
from rlt_dist.config.run import RunConfig

SECONDS = 90


def start(repository: Path, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(repository / "launch" / "torchrun.sh"), *map(str, arguments)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@contextlib.contextmanager
def ended_at_last(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """Whatever happens, nothing of it outlives the test."""
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=SECONDS)


def children(pid: int) -> list[int]:
    listed = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    found = [int(child) for part in listed for child in part]
    return [*found, *(child for own in found for child in children(own))]


def process_of_rank(pid: int, rank: int) -> int:
    """The process of a rank, among all that were started."""
    wanted = f"RANK={rank}".encode()
    return next(
        child
        for child in children(pid)
        if wanted in Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
    )


def wait_for_steps(config: RunConfig, steps: int, process: subprocess.Popen[str]) -> None:
    metrics = config.run_folder / "metrics.jsonl"
    until = time.monotonic() + SECONDS
    while not metrics.exists() or len(metrics.read_text().splitlines()) < steps:
        assert process.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < until
        time.sleep(0.02)


def test_one_rank_is_killed_the_other_ends_and_the_same_command_goes_on(
    repository: Path, long_run: RunConfig, metrics: Any, records: Any
) -> None:
    command = (2, long_run.run_folder.parent / "run.yaml")
    with ended_at_last(start(repository, *command)) as process:
        wait_for_steps(long_run, 7, process)
        os.kill(process_of_rank(process.pid, 1), signal.SIGKILL)
        process.communicate(timeout=SECONDS)
        assert process.returncode != 0
    assert len(metrics(long_run.run_folder)) < 30
    with ended_at_last(start(repository, *command)) as process:
        out, _ = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, out
    assert "resumed from" in out
    assert metrics(long_run.run_folder) == records(2, "long")
    assert not list(long_run.run_folder.rglob("*.partial"))
    for folder in checkpoints(long_run.run_folder / "checkpoints"):
        verify(folder)


@pytest.mark.parametrize("override", ["data.lanes=7"])
def test_a_mistake_is_told_once_by_all_the_processes_together(
    repository: Path, long_run: RunConfig, override: str
) -> None:
    file = long_run.run_folder.parent / "run.yaml"
    with ended_at_last(start(repository, 2, file, override)) as process:
        out, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 2
    lines = [line for line in out.splitlines() if "7 lanes cannot be shared equally by 2" in line]
    assert len(set(lines)) == 1  # As it was said, and once more at the end.
    assert out.splitlines()[-1] == lines[-1]
    assert {path.name for path in long_run.run_folder.iterdir()} == {"ended.json", "logs"}
