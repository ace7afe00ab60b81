"""A thread of a process group that outlives the run can abort it when Python ends."""

import json
from pathlib import Path

import pytest


@pytest.mark.parametrize("rank", range(2))
def test_a_closed_world_leaves_no_thread_behind(on_two: Path, rank: int) -> None:
    assert json.loads((on_two / f"left-{rank}.json").read_text()) == []


@pytest.mark.parametrize("rank", range(4))
def test_closed_meshes_leave_no_thread_behind(on_four: Path, rank: int) -> None:
    assert json.loads((on_four / f"left-{rank}.json").read_text()) == []
