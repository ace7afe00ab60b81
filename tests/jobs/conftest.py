"""Programs that stand in for Slurm's own, where what it would answer is known."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """`stand_in(name, does)`: a shell script on the path; the file of what it is called with."""
    folder = tmp_path / "stand-ins"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def make(name: str, does: str = "") -> Path:
        (folder / name).write_text(f'#!/bin/sh\necho "$@" >> {folder}/{name}.called\n{does}\n')
        (folder / name).chmod(0o755)
        return folder / f"{name}.called"

    return make
