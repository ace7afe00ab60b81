"""A disk that is full or read-only: training goes on up to a limit, what was whole stays whole."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from rlt_dist.checkpoint.manifest import checkpoints, verify

STEPS = ("checkpoint.every=1", "checkpoint.keep=2", "validation.every=2")
WARNING = "WARNING: step "


def remount(folder: Path, option: str) -> None:
    command = ["mount", "-o", f"remount,{option}", str(folder)]
    subprocess.run(command, check=True, timeout=20)


def test_a_full_disk_ends_in_one_line_and_with_more_room_the_run_goes_on(
    starts: Any, configure: Any, tmp_path: Path, metrics: Any, mount_small: Any
) -> None:
    """From no room for the configuration to no room for the third checkpoint."""
    whole = tmp_path / "whole"
    configure(whole, "rlt1", *STEPS)
    folders = []
    for size in ("4k", "12k", "20k", "60k", "200k", "700k", "1100k", "1900k"):
        folders.append(tmp_path / size)
        configure(folders[-1], "rlt1", *STEPS)
        mount_small(folders[-1] / "run", size)
    full = starts(tmp_path, [(folder, None) for folder in [whole, *folders]])[1:]
    assert [len(result["left"]) for result in full] == [0, 0, 0, 0, 0, 0, 1, 2]
    told = {folder.name: result["told"] for folder, result in zip(folders, full, strict=True)}
    wrong = {
        size: text[-600:]
        for size, text in told.items()
        if text.count("rlt-dist: error: ") != 1 or "Traceback" in text
    }
    assert wrong == {}
    assert [result["status"] for result in full] == [1] * len(full)
    warnings = [text.count(WARNING) for text in told.values()]
    assert warnings[:2] == [0, 0]
    assert warnings[2:] == [3] * len(warnings[2:])
    for folder in folders:
        for checkpoint in checkpoints(folder / "run" / "checkpoints"):
            verify(checkpoint)
        remount(folder / "run", "size=20m")
    for result in starts(tmp_path, [(folder, None) for folder in folders]):
        assert result["status"] == 0, result["told"]
    for folder in folders:
        assert metrics(folder / "run") == metrics(whole / "run")
        assert not list((folder / "run").rglob("*.partial"))


@pytest.mark.parametrize("asynchronous", ["true", "false"])
@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [("size=400k", "size=20m", "No space left|cut short"), ("ro", "rw", "Read-only file system")],
)
def test_training_goes_on_without_saves_and_later_ones_succeed(
    configure: Any,
    driver: Any,
    tmp_path: Path,
    metrics: Any,
    mount_small: Any,
    capsys: pytest.CaptureFixture[str],
    asynchronous: str,
    before: str,
    after: str,
    reason: str,
) -> None:
    choices = (*STEPS, f"checkpoint.asynchronous={asynchronous}", "checkpoint.max_failures=4")
    whole = configure(tmp_path / "whole", "rlt1", *STEPS)
    config = configure(tmp_path / "tried", "rlt1", *choices)
    folder = config.run_folder / "checkpoints"
    config.run_folder.mkdir()
    mount_small(folder, "20m")
    remount(folder, before)

    def give_room_in_step_4(session: Any) -> None:
        def look(*_: object) -> None:
            if session.step == 3:
                remount(folder, after)

        session.model.register_forward_pre_hook(look)

    driver.train(config, prepare=give_room_in_step_4)
    lines = [line for line in capsys.readouterr().err.splitlines() if WARNING in line]
    assert len(lines) in (2, 3)  # the save of step 3 may see the room already
    for line in lines:
        assert any(part in line for part in reason.split("|"))
    assert [path.name[-1] for path in checkpoints(folder)] == ["4", "5"]
    for checkpoint in checkpoints(folder):
        verify(checkpoint)
    assert not list(folder.glob(".*"))
    driver.train(whole)
    assert metrics(config.run_folder) == metrics(whole.run_folder)
