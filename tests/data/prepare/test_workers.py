"""Any number of workers makes the same bytes, and none of them is left behind or waited for."""

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rlt_dist.data.corpus.index import load_corpus
from rlt_dist.data.prepare.workers import local_workers
from rlt_dist.util.errors import UserError

PATIENCE = 60  # seconds, for what takes one


@pytest.mark.parametrize("workers", [2, 4])
def test_any_number_of_workers_makes_the_same_bytes(
    preparation: Any, contents: Any, whole: dict[str, bytes], tmp_path: Path, workers: int
) -> None:
    preparation.run(tmp_path / "out", "--workers", workers)
    assert contents(tmp_path / "out") == whole
    corpus = load_corpus(tmp_path / "out")
    assert len(corpus.split("train").shards) > 30
    assert corpus.dropped["empty_documents"] > 500


def of_session(process: subprocess.Popen) -> list[int]:
    """The live processes of the session that a preparation leads, itself first."""
    found = []
    for entry in os.listdir("/proc"):
        try:
            fields = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
        except (OSError, IndexError):
            continue
        state, _, _, session = fields[:4]
        if int(session) == process.pid and state != "Z":
            found.append(int(entry))
    return sorted(found, key=lambda number: number != process.pid)


def workers_of(process: subprocess.Popen) -> list[int]:
    """Its worker processes: those that the fork server has started."""
    server = [number for number in of_session(process) if b"forkserver" in command_of(number)]
    return [number for number in server[1:] if number != process.pid]


def command_of(number: int) -> bytes:
    try:
        return Path("/proc", str(number), "cmdline").read_bytes()
    except OSError:
        return b""


def committed(output: Path) -> int:
    return len(list((output / "progress").glob("t*.json")))


@pytest.mark.parametrize("shards", [0, 3, 30])
@pytest.mark.parametrize("victim", ["command", "worker"])
def test_killed_at_any_moment_it_goes_on(
    preparation: Any,
    contents: Any,
    whole: dict[str, bytes],
    tmp_path: Path,
    wait_until: Any,
    victim: str,
    shards: int,
) -> None:
    output = tmp_path / "out"
    process = preparation.start(output, "--workers", 2)
    wait_until(lambda: workers_of(process) and committed(output) >= shards)
    os.kill(process.pid if victim == "command" else workers_of(process)[0], signal.SIGKILL)
    _, error = process.communicate(timeout=PATIENCE)
    wait_until(lambda: not of_session(process))
    if victim == "command":
        assert process.returncode == -signal.SIGKILL
    else:
        assert process.returncode == 2
        assert error.startswith("rlt-dist: error: a worker was killed")
        assert "with fewer --workers if so: what is finished is kept" in error
        assert error.count("\n") == 1
        assert not list(output.glob(".*.partial"))
    assert not (output / "index.json").exists()
    finished = {path.stem for path in (output / "progress").glob("t*.json")}
    times = {name: (output / f"{name}.tar").stat().st_mtime_ns for name in finished}
    preparation.run(output, "--workers", 1)
    assert contents(output) == whole
    assert times == {name: (output / f"{name}.tar").stat().st_mtime_ns for name in finished}


def test_a_killed_worker_is_told_without_an_option_that_the_caller_lacks() -> None:
    said = r"a worker was killed.*, on fewer cores \(taskset\) if so: what is finished is kept"
    with pytest.raises(UserError, match=said), local_workers(2) as crew:
        list(crew.run(os._exit, [(1,)]))


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_leave_no_process_and_no_partial_file(
    preparation: Any, tmp_path: Path, wait_until: Any, ending: signal.Signals
) -> None:
    output = tmp_path / "out"
    process = preparation.start(output, "--workers", 2)
    wait_until(lambda: committed(output) >= 2)
    if ending is signal.SIGINT:  # which a terminal sends to all
        os.killpg(process.pid, ending)
    else:
        process.send_signal(ending)
    _, error = process.communicate(timeout=PATIENCE)
    # It may have been done before the signal came.
    assert (process.returncode == 0) == (output / "index.json").exists()
    assert "ForkServer" not in error
    assert not list(output.glob(".*.partial"))
    wait_until(lambda: not of_session(process))


def test_a_mistake_that_a_worker_finds_is_one_line(
    preparation: Any, tmp_path: Path, wait_until: Any
) -> None:
    process = preparation.start(tmp_path / "out", "--workers", 2, "--require-utf8")
    _, error = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2
    assert error.startswith("rlt-dist: error: ")
    assert "no_utf8.txt" in error
    assert error.count("\n") == 1
    wait_until(lambda: not of_session(process))


def test_an_input_that_changes_between_the_passes_is_one_line(
    preparation: Any, tmp_path: Path, wait_until: Any
) -> None:
    folder = tmp_path / "inputs"
    folder.mkdir()
    for number in range(3000):
        (folder / f"{number:04}.txt").write_text(f"document {number} " * 40)
    changing = type(preparation)(folder, preparation.recipe)
    process = changing.start(tmp_path / "out", "--workers", 2)
    wait_until(lambda: committed(tmp_path / "out") >= 1)
    (folder / "2990.txt").write_text("other")
    _, error = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2
    assert "2990.txt: has changed while it was read" in error
    assert error.count("\n") == 1
