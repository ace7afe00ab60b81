"""Long generation: text without end from a state that stops growing."""

import json
from pathlib import Path
from typing import Any

import pytest

MEMORY = {"rlt1": 24, "rlt2": 24, "xl": 12}


@pytest.mark.parametrize("name", MEMORY)
def test_state_stops_growing_at_memory_len(
    command: Any, configure: Any, driver: Any, tmp_path: Path, name: str
) -> None:
    config = configure(tmp_path, name, "train.steps=2")
    driver.train(config)
    code, out, _ = command(
        "bench", "generation", config.run_folder, "--tokens", 200, "--every", 5, "--json"
    )
    assert code == 0
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["tokens"] for row in rows] == list(range(5, 201, 5))
    sizes = [row["state_bytes"] for row in rows]
    full = next(place for place, row in enumerate(rows) if row["tokens"] > MEMORY[name])
    assert sizes[0] < sizes[full - 1] <= sizes[full]
    assert set(sizes[full:]) == {sizes[full]}
    assert all(row["seconds"] > 0 and row["resident_bytes"] > 0 for row in rows)
