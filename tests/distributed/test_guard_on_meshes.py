"""What the guard decides does not depend on the mesh."""

from typing import Any

import pytest


@pytest.mark.parametrize("mesh", ["2x1x1", "1x2x1", "1x1x2"])
def test_the_same_steps_are_skipped_and_the_same_lanes_restart(records: Any, mesh: str) -> None:
    alone, found = records(1, "guarded-1x1x1"), records(2, f"guarded-{mesh}")
    for name in ("skipped", "restarted_lanes"):
        assert [record[name] for record in found] == [record[name] for record in alone]
        assert any(record[name] for record in alone), f"nothing tests {name}"
    assert sum(record["skipped"] for record in alone) < 4
    assert 0 < alone[1]["restarted_lanes"] < 8


@pytest.mark.parametrize(("processes", "mesh"), [(1, "1x1x1"), (2, "2x1x1"), (2, "1x2x1")])
def test_from_a_checkpoint_on_the_same_steps_are_skipped(
    folder: Any, metrics: Any, processes: int, mesh: str
) -> None:
    ran = folder(processes, f"guarded-{mesh}")
    assert metrics(ran / "again") == metrics(ran / "run")
