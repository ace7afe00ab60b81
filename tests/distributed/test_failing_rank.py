"""One of four ranks fails: all end, non-zero, soon, and the first error is the one shown."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlt_dist.mesh.local import run_ranks
from rlt_dist.util.errors import UserError

PROGRAM = Path(__file__).parent / "failing.py"
SECONDS = 30
"""From the start of the ranks, which fail at once, to the end of all."""

ERROR = "rlt-dist: error: "
RANK = r"rank {} \(\S+ cpu\)"
"""A rank in the words of an error, with its host and device."""
LOST = r"rank \d \(\S+ cpu\): lost contact with .*; probably killed or stopped: see its log or .*"


def run_of(mesh: str, rank: int, how: str, others: str = "wait") -> dict[str, Any]:
    return {"mesh": mesh, "rank": rank, "how": how, "others": others}


SAID = [
    (run_of("1x2x2", 3, "mistake"), f"{ERROR}{RANK.format(3)}: no such file"),
    (run_of("1x4x1", 1, "mistake", "compute"), f"{ERROR}{RANK.format(1)}: no such file"),
    (run_of("2x2x1", 0, "shared_mistake"), f"{ERROR}{RANK.format(0)}: no such file"),
    (run_of("2x1x2", 2, "late_mistake"), f"{ERROR}{RANK.format(2)}: no such file"),
    (
        run_of("1x4x1", 0, "full_disk"),
        f"{ERROR}{RANK.format(0)}: metrics.jsonl: No space left on device; make room",
    ),
    (
        run_of("1x1x4", 1, "leave"),
        f"{ERROR}{RANK.format(1)}: ended with exit status 0 while others were at work",
    ),
]
DEFECT = run_of("2x2x1", 3, "defect")
SILENT = [
    run_of("2x1x2", 2, "killed"),
    run_of("4x1x1", 0, "killed"),
    run_of("1x2x2", 1, "vanish", "compute"),
]
RUNS = [*(run for run, _ in SAID), DEFECT, *SILENT]


@pytest.fixture(scope="session")
def failures(once: Callable[..., Path]) -> Path:
    """All runs without a launcher, in one start of Python."""

    def make(folder: Path) -> None:
        subprocess.run(
            [sys.executable, str(PROGRAM), json.dumps(RUNS), str(folder)],
            env=os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
            stdout=subprocess.DEVNULL,
            timeout=200,
            check=True,
        )

    return once("failures", make)


def statuses_and_errors(failures: Path, run: dict[str, Any]) -> tuple[list[int], str]:
    """By rank its exit status, and what all wrote to standard error; they have ended in time."""
    number = RUNS.index(run)
    result = json.loads((failures / "results.json").read_text())[number]
    assert max(result["seconds"]) < SECONDS
    errors = [(failures / f"{number}-{rank}.err").read_text() for rank in range(4)]
    return result["statuses"], "".join(errors)


@pytest.mark.parametrize(("run", "line"), SAID)
def test_what_one_rank_says_is_shown_once_and_all_end(
    failures: Path, run: dict[str, Any], line: str
) -> None:
    statuses, errors = statuses_and_errors(failures, run)
    assert all(status in (1, 2) for status in statuses)
    assert re.fullmatch(f"{line}\n", errors)


def test_a_defect_is_one_traceback_with_its_rank_on_every_line(failures: Path) -> None:
    statuses, errors = statuses_and_errors(failures, DEFECT)
    assert statuses == [1] * 4
    lines = errors.splitlines()
    assert re.fullmatch(rf"{RANK.format(3)}: Traceback \(most recent call last\):", lines[0])
    assert re.fullmatch(rf"{RANK.format(3)}: ZeroDivisionError: a defect", lines[-1])
    assert all(re.match(f"{RANK.format(3)}: ", line) for line in lines)
    assert errors.count("Traceback") == 1


@pytest.mark.parametrize("run", SILENT)
def test_a_rank_that_ends_without_a_word_is_missed_by_the_others(
    failures: Path, run: dict[str, Any]
) -> None:
    """Also rank 0, which serves the store, and also while nobody waits for it."""
    statuses, errors = statuses_and_errors(failures, run)
    assert [status for rank, status in enumerate(statuses) if rank != run["rank"]] == [1] * 3
    assert re.fullmatch(f"{ERROR}{LOST}\n", errors)


@pytest.mark.parametrize(
    ("how", "line"),
    [("mistake", f"{RANK.format(3)}: no such file"), ("killed", "rank 3: was ended by SIGKILL")],
)
def test_the_local_launcher_raises_the_first_error(tmp_path: Path, how: str, line: str) -> None:
    output, run = tmp_path / "output.txt", run_of("1x2x2", 3, how, "compute")
    with pytest.raises(UserError) as raised:
        run_ranks(4, [str(PROGRAM), json.dumps(run)], output)
    assert re.fullmatch(rf"{line} \(what all 4 ranks printed is in {output}\)", str(raised.value))
    assert "at work" in output.read_text()


def test_under_torchrun_the_error_is_shown_once_and_its_rank_is_the_root_cause() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "4", str(PROGRAM), json.dumps(run_of("2x1x2", 0, "mistake"))]
    done = subprocess.run(
        command,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=3 * SECONDS,
        check=False,
    )
    assert done.returncode != 0
    assert done.stderr.count(ERROR) == 1
    assert re.search(f"{ERROR}{RANK.format(0)}: no such file\n", done.stderr)
    assert "rank      : 0 " in done.stderr.partition("Root Cause")[2]
