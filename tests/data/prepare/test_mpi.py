"""Preparation over a real MPI world: the same bytes, and no rank left waiting."""

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[3]
LAUNCHER = REPOSITORY / "launch" / "prepare_mpi.sh"
TIME_LIMIT = 120  # seconds

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mpi4py") is None, reason="mpi4py is not installed"
)


def start(processes: int, command: list[str]) -> subprocess.Popen:
    """`command` is that of one process; the launcher adds what precedes its options."""
    options = command[command.index("prepare") + 1 :]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.Popen(
        [str(LAUNCHER), str(processes), *options],
        env=os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen) -> tuple[int, str]:
    """Its status and what it said; a world that hangs is ended and is a failure."""
    try:
        _, error = process.communicate(timeout=TIME_LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, error


def ranks_of(output: Path) -> list[int]:
    """The Python processes that prepare a folder; the first one leads."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            command = Path("/proc", entry, "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"rlt_dist" in command and b"mpirun" not in command[0] and bytes(output) in command:
            found.append(int(entry))
    return sorted(found)


def test_four_ranks_make_the_same_bytes(
    preparation: Any, contents: Any, whole: dict[str, bytes], tmp_path: Path
) -> None:
    status, error = finish(start(4, preparation.command(tmp_path / "out")))
    assert (status, error) == (0, "")
    assert contents(tmp_path / "out") == whole


def test_a_mistake_that_a_rank_finds_ends_all(preparation: Any, tmp_path: Path) -> None:
    status, error = finish(start(3, preparation.command(tmp_path / "out", "--require-utf8")))
    assert status != 0
    assert error.startswith("rlt-dist: error: ")
    assert error.count("rlt-dist: error") == 1
    assert "no_utf8.txt" in error


def test_a_killed_rank_ends_all_and_the_next_start_goes_on(
    preparation: Any, contents: Any, whole: dict[str, bytes], tmp_path: Path, wait_until: Any
) -> None:
    output = tmp_path / "out"
    process = start(3, preparation.command(output))
    wait_until(lambda: len(list((output / "progress").glob("t*.json"))) >= 3)
    os.kill(ranks_of(output)[-1], signal.SIGKILL)
    status, _ = finish(process)
    assert status != 0
    wait_until(lambda: not ranks_of(output))
    assert not (output / "index.json").exists()
    assert finish(start(2, preparation.command(output)))[0] == 0
    assert contents(output) == whole


def test_a_world_of_one_is_refused(preparation: Any, tmp_path: Path) -> None:
    status, error = finish(start(1, preparation.command(tmp_path / "out")))
    assert status == 2
    assert "this is a world of one process" in error
