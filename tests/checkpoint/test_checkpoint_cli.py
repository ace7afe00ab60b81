"""`rlt-dist checkpoint ls | show | verify`."""

import re
from pathlib import Path
from typing import Any

import pytest

from rlt_dist.config.run import RunConfig


@pytest.fixture
def damaged(run: RunConfig) -> Path:
    """A run whose third checkpoint lacks a file."""
    folder = run.run_folder / "checkpoints" / "step-00000003"
    next(folder.glob("*.distcp")).unlink()
    return run.run_folder


def test_ls_lists_all_oldest_first_with_their_tokens(command: Any, run: RunConfig) -> None:
    code, out, _ = command("checkpoint", "ls", run.run_folder)
    rows = [line for line in out.splitlines() if "step-" in line]
    assert code == 0
    assert [re.search(r"step-(\d+)", row)[1] for row in rows] == [f"{n:08}" for n in range(1, 6)]
    for number, row in enumerate(rows, 1):
        assert f" {number * 80} " in row
        assert "yes" in row


def test_ls_says_which_is_damaged_and_how(command: Any, damaged: Path) -> None:
    code, out, _ = command("checkpoint", "ls", damaged)
    assert code == 0
    assert out.count("yes") == 4
    assert "missing" in " ".join(out.split())


@pytest.mark.parametrize("named", ["", "checkpoints/step-00000002"])
def test_show_tells_facts_and_tensors_of_a_run_or_a_checkpoint(
    command: Any, run: RunConfig, named: str
) -> None:
    code, out, _ = command("checkpoint", "show", run.run_folder / named)
    assert code == 0
    step = 2 if named else 5
    assert re.search(rf"step +{step}\n", out)
    assert re.search(rf"tokens +{step * 80}\n", out)
    for name in ("model.embed.weight", "optimizer.updates", "state.s", "cursors"):
        assert name in out


def test_verify_goes_through_all_of_a_run(command: Any, run: RunConfig) -> None:
    code, out, _ = command("checkpoint", "verify", run.run_folder)
    assert code == 0
    assert out.count(": whole") == 5


def test_verify_takes_one_checkpoint(command: Any, damaged: Path) -> None:
    code, out, _ = command("checkpoint", "verify", damaged / "checkpoints" / "step-00000004")
    assert (code, out.count(": whole")) == (0, 1)


def test_verify_fails_with_one_line_that_names_the_file(
    command: Any, is_one_error: Any, damaged: Path
) -> None:
    for path in (damaged, damaged / "checkpoints" / "step-00000003"):
        result = command("checkpoint", "verify", path)
        is_one_error(result, "step-00000003", "is missing")


@pytest.mark.parametrize("verb", ["ls", "show", "verify"])
def test_a_folder_without_checkpoints_is_one_line(
    command: Any, is_one_error: Any, tmp_path: Path, verb: str
) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("empty", "missing"):
        is_one_error(command("checkpoint", verb, tmp_path / name), name)
