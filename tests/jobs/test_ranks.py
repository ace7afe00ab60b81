"""A launcher and its ranks: signals reach the ranks, the end is theirs, and none is left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlt_dist.jobs.ranks import run_ranks_with
from rlt_dist.util.ending import ENDED, START, STATUS, Recorder, last_ended, read_ended
from rlt_dist.util.errors import UserError

RANK = """
import os, signal, sys, time
from pathlib import Path
from rlt_dist.mesh.launched import name_process
from rlt_dist.util.children import end_with
from rlt_dist.util.ending import Recorder
recorder = Recorder()
recorder.folder, recorder.step = Path(sys.argv[1]), 4
def stop(number, frame):
    recorder.record("stopped", f"rank 0 was sent {signal.Signals(number).name}")
    sys.exit(75)
def be_rank():
    end_with(os.getppid(), signal.SIGKILL)
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGUSR1, stop)
    name_process(0)
    Path(sys.argv[1], "pid").write_text(str(os.getpid()))
"""
"""What a rank does, without torch."""

WAITS = f"{RANK}\nbe_rank()\nwhile True: time.sleep(0.05)"
STAYS = f"{RANK}\nbe_rank()\nrecorder.record('failed', 'rank 0: a defect', 0)\ntime.sleep(100)"

DETACHED = ["bash", "-c", 'setsid "$@" & sleep 100', "-"]
"""A launcher that does not end, and whose rank is in another session."""

PASSES = ["bash", "-c", 'trap "kill \\$rank" TERM; "$@" & rank=$!; wait; wait', "-"]
"""A launcher that passes on what it is sent, and waits for its rank."""

IGNORES = ["bash", "-c", 'trap "" TERM; "$@"; exit 7', "-"]
"""A launcher that passes nothing on, with an exit status of its own."""


def python(source: str, folder: Path) -> list[str]:
    return [sys.executable, "-c", source, str(folder)]


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:1]
    except OSError:
        return False


def wait_for(path: Path) -> int:
    until = time.monotonic() + 60
    while not path.exists() or not path.read_text():
        assert time.monotonic() < until
        time.sleep(0.02)
    return int(path.read_text())


@pytest.fixture
def error(capfd: pytest.CaptureFixture[str]) -> Callable[[], list[str]]:
    def lines() -> list[str]:
        return capfd.readouterr().err.splitlines()

    return lines


@pytest.mark.parametrize("how", STATUS)
def test_the_end_is_the_ranks_own_whatever_the_launchers_status(
    tmp_path: Path, error: Any, how: str
) -> None:
    why = None if how == "finished" else f"rank 0: {how}"
    source = f"{RANK}\nrecorder.record({how!r}, {why!r})"
    ending = run_ranks_with([*IGNORES, *python(source, tmp_path)], os.environ, tmp_path)
    assert (ending.how, ending.status, ending.why) == (how, STATUS[how], why)
    last = {"finished": [], "stopped": [f"rlt-dist: {why}; the same command goes on from there"]}
    assert error()[-1:] == last.get(how, [f"rlt-dist: error: {why}"])
    assert json.loads((tmp_path / ENDED).read_text())["step"] == 4


@pytest.mark.parametrize(
    ("command", "said"),
    [("exit 0", "status 0"), ("exit 3", "status 3"), ("kill -KILL $$", "was ended by SIGKILL")],
)
def test_ranks_that_end_without_a_word_have_failed(
    tmp_path: Path, error: Any, command: str, said: str
) -> None:
    """Also all of them with 0, and whatever an earlier start has left."""
    before = Recorder({})
    before.folder = tmp_path
    before.record("finished")
    ending = run_ranks_with(["bash", "-c", command], os.environ, tmp_path)
    assert (ending.how, ending.status) == ("failed", 1)
    why = f"the ranks ended without a word (their launcher: {said}); see {tmp_path}/logs"
    assert error() == [f"rlt-dist: error: {why}"]


def test_the_record_of_another_start_is_not_believed(tmp_path: Path) -> None:
    source = f"{RANK}\nrecorder._start = 'another'\nrecorder.record('finished')"
    assert run_ranks_with(python(source, tmp_path), os.environ, tmp_path).how == "failed"
    named = os.environ | {START: "another"}
    assert run_ranks_with(python(source, tmp_path), named, tmp_path).how == "finished"
    assert read_ended(tmp_path, "another") is not None


@pytest.mark.parametrize("launcher", [IGNORES, DETACHED])
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_reaches_the_ranks_also_behind_a_launcher_that_knows_none(
    tmp_path: Path, launcher: list[str], sent: int
) -> None:
    source = (
        "import os, sys\nfrom pathlib import Path\nfrom rlt_dist.jobs.ranks import run_ranks_with\n"
        f"sys.exit(run_ranks_with({[*launcher, *python(WAITS, tmp_path)]!r}, os.environ, "
        f"Path({str(tmp_path)!r}), patience=1).status)"
    )
    with subprocess.Popen([sys.executable, "-c", source], stderr=subprocess.PIPE) as process:
        rank = wait_for(tmp_path / "pid")
        process.send_signal(sent)
        _, said = process.communicate(timeout=60)
    name = "SIGTERM" if sent == signal.SIGHUP else signal.Signals(sent).name
    assert process.returncode == 75
    assert f"rank 0 was sent {name}".encode() in said
    assert not alive(rank)


@pytest.mark.parametrize("launcher", [PASSES, DETACHED])
def test_ranks_end_when_whoever_waits_for_them_is_killed(
    tmp_path: Path, launcher: list[str]
) -> None:
    """They save first, if their launcher passes on to them what it is sent."""
    source = (
        "import os\nfrom pathlib import Path\nfrom rlt_dist.jobs.ranks import run_ranks_with\n"
        f"run_ranks_with({[*launcher, *python(WAITS, tmp_path)]!r}, os.environ, "
        f"Path({str(tmp_path)!r}))"
    )
    with subprocess.Popen([sys.executable, "-c", source]) as process:
        rank = wait_for(tmp_path / "pid")
        process.kill()
    until = time.monotonic() + 60
    while alive(rank):
        assert time.monotonic() < until
        time.sleep(0.02)
    ended = last_ended(tmp_path)
    assert (ended and ended.how) == ("stopped" if launcher is PASSES else None)


AGENT = [
    *("bash", "-c"),
    'trap "" TERM; for n in 0 1; do TORCHELASTIC_RESTART_COUNT=$n "$@" && exit 0; done; exit 1',
    "-",
]
"""A launcher that starts a rank again after it has failed."""

FAILS = f"""{RANK}
from rlt_dist.util.ending import is_over
if is_over(recorder.folder, os.environ):
    sys.exit(0)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
    recorder.record("finished")
    sys.exit(0)
be_rank()
def fail(number, frame):
    if sys.argv[2] == "told":
        recorder.record("failed", "rank 0: a second signal", 0)
    os.kill(os.getpid(), signal.SIGKILL)
signal.signal(signal.SIGTERM, fail)
while True: time.sleep(0.05)
"""
"""A rank that fails when it is asked to stop, and finishes if it is started again."""


@pytest.mark.parametrize("how", ["told", "killed"])
def test_a_wish_to_stop_outlives_a_restart_of_the_ranks(tmp_path: Path, how: str) -> None:
    source = (
        "import os\nfrom pathlib import Path\nfrom rlt_dist.jobs.ranks import run_ranks_with\n"
        f"print(run_ranks_with({[*AGENT, *python(FAILS, tmp_path), how]!r}, os.environ, "
        f"Path({str(tmp_path)!r})).how)"
    )
    with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE) as process:
        wait_for(tmp_path / "pid")
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=60)
    assert said.split() == [b"failed"]


def test_a_rank_that_stays_after_a_failure_is_killed(tmp_path: Path) -> None:
    command = [*IGNORES, *python(STAYS, tmp_path)]
    ending = run_ranks_with(command, os.environ, tmp_path, patience=0.5)
    assert (ending.how, ending.why) == ("failed", "rank 0: a defect")
    assert not alive(int((tmp_path / "pid").read_text()))


def test_what_the_launcher_leaves_behind_is_ended(tmp_path: Path) -> None:
    leaves = ["bash", "-c", 'setsid "$@" & while ! [ -s "$0/pid" ]; do sleep 0.1; done', tmp_path]
    command = [*map(str, leaves), *python(WAITS, tmp_path)]
    assert run_ranks_with(command, os.environ, tmp_path).how == "failed"
    assert not alive(int((tmp_path / "pid").read_text()))


def test_a_launcher_that_is_not_there_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="mpirun-of-mine is not installed"):
        run_ranks_with(["mpirun-of-mine"], os.environ, tmp_path)
