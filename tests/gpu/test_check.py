"""launch/gpu_check.sh: all that only a GPU can show, and without one what a CPU can."""

import importlib
import subprocess
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytest.importorskip("triton")

SLEEP = "import time; time.sleep(60)"


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return importlib.import_module("check")


def run(repository: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [str(repository / "launch" / "gpu_check.sh"), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
def test_kernels_are_right_on_this_gpu(repository: Path) -> None:
    done = run(repository)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_what_is_untested(repository: Path) -> None:
    done = run(repository, "--steps", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [" ".join(line.split()) for line in done.stdout.splitlines()]
    (tested,) = [row for row in rows if row.endswith("right")]
    assert tested.startswith("band_forward tiny")
    for what in ("loop_forward_backward 48+48 -", "relative_forward enwik8", "rlt_stdlib 2 steps"):
        (row,) = [row for row in rows if row.startswith(what)]
        assert "untested: no GPU" in row


def test_what_ends_a_process_is_a_line_and_others_go_on(check: ModuleType) -> None:
    config, vocabulary, overrides = check.TINY
    file = check.CONFIGS / f"{config}.yaml"
    shapes = check.shapes_of(check.load_typed(file, check.RunConfig, overrides), vocabulary)
    worker, row = check.Worker(), check.Row("a case", "tiny")
    try:
        died = replace(row, **worker.check(shapes, "no such case"))
        right = replace(row, **worker.check(shapes, "band_forward"))
    finally:
        worker.end()
    assert died.verdict == "WRONG: its process ended with 1"
    assert right.verdict == "right"
    assert replace(row, error=float("nan"), tolerance=1.0).verdict == "WRONG"


def test_a_command_that_fails_or_hangs_is_a_line(check: ModuleType) -> None:
    row = check.Row("training", "here")
    for script, said in (("raise SystemExit(3)", "exit status 3"), (SLEEP, "more than 2 s")):
        found = check.tried(row, lambda script=script: check.run("-c", script, limit=2))
        assert found.verdict.startswith("WRONG: ")
        assert said in found.verdict
    assert check.tried(row, lambda: check.run("-c", "pass", limit=60)).verdict == "right"
