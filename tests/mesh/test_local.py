"""Ranks on this machine: what they are given, and that none outlives the launcher."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlt_dist.mesh.local import run_ranks
from rlt_dist.util.errors import UserError

SHOW = """
import os
names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR OMP_NUM_THREADS".split()
os.write(1, (" ".join(os.environ[name] for name in names) + "\\n").encode())
"""
STUBBORN = """
import os, signal, sys, time
if os.environ["RANK"] == "0":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("pid", os.getpid(), flush=True)
    time.sleep(100)
time.sleep(1)
sys.exit(3)
"""


def ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_each_rank_knows_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    run_ranks(3, ["-c", SHOW], tmp_path / "output")
    lines = sorted((tmp_path / "output").read_text().splitlines())
    assert lines == [f"{rank} 3 {rank} 3 127.0.0.1 1" for rank in range(3)]


def test_a_person_may_give_each_rank_more_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    run_ranks(1, ["-c", SHOW], tmp_path / "output")
    assert (tmp_path / "output").read_text() == "0 1 0 1 127.0.0.1 2\n"


def test_when_one_fails_even_a_rank_that_will_not_end_is_ended(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^rank 1: exit status 3 \(what all 2 ranks printed"):
        run_ranks(2, ["-c", STUBBORN], tmp_path / "output")
    pid = int((tmp_path / "output").read_text().removeprefix("pid "))
    assert ended(pid)


def test_an_interrupt_ends_all(tmp_path: Path) -> None:
    output = tmp_path / "output"
    program = "import os, time; os.write(1, b'%d ' % os.getpid()); time.sleep(100)"
    call = f"run_ranks(3, ['-c', {program!r}], Path({str(output)!r}))"
    source = f"from pathlib import Path\nfrom rlt_dist.mesh.local import run_ranks\n{call}"
    with subprocess.Popen([sys.executable, "-c", source], stderr=subprocess.PIPE) as launcher:
        until = time.monotonic() + 60
        while not output.exists() or len(output.read_text().split()) < 3:
            assert launcher.poll() is None
            assert time.monotonic() < until
            time.sleep(0.05)
        launcher.send_signal(signal.SIGINT)
        launcher.communicate(timeout=30)
    assert launcher.returncode != 0
    assert all(ended(int(pid)) for pid in output.read_text().split())
