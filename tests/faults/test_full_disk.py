"""A disk that fills up, early or late: one clear line, and what was whole before stays whole."""

import subprocess
from pathlib import Path
from typing import Any

from rlt_dist.checkpoint.manifest import checkpoints, verify

STEPS = ("checkpoint.every=1", "checkpoint.keep=2", "validation.every=2")


def resize(folder: Path, size: str) -> None:
    command = ["mount", "-o", f"remount,size={size}", str(folder)]
    subprocess.run(command, check=True, timeout=20)


def test_a_full_disk_is_one_line_and_with_more_room_the_run_goes_on(
    starts: Any, configure: Any, tmp_path: Path, metrics: Any, mount_small: Any
) -> None:
    """From no room for the configuration to no room for the third checkpoint."""
    whole = tmp_path / "whole"
    configure(whole, "rlt1", *STEPS)
    folders = []
    for size in ("4k", "12k", "20k", "60k", "200k", "300k", "400k", "700k"):
        folders.append(tmp_path / size)
        configure(folders[-1], "rlt1", *STEPS)
        mount_small(folders[-1] / "run", size)
    full = starts(tmp_path, [(folder, None) for folder in [whole, *folders]])[1:]
    assert any(result["left"] for result in full)
    told = {folder.name: result["told"] for folder, result in zip(folders, full, strict=True)}
    wrong = {
        size: text[-600:]
        for size, text in told.items()
        if text.count("rlt-dist: error: ") != 1 or "Traceback" in text
    }
    assert wrong == {}
    assert [result["status"] for result in full] == [2] * len(full)
    for folder in folders:
        for checkpoint in checkpoints(folder / "run" / "checkpoints"):
            verify(checkpoint)
        resize(folder / "run", "20m")
    for result in starts(tmp_path, [(folder, None) for folder in folders]):
        assert result["status"] == 0, result["told"]
    for folder in folders:
        assert metrics(folder / "run") == metrics(whole / "run")
        assert not list((folder / "run").rglob("*.partial"))
