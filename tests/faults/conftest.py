"""Many starts of the command, killed or not, in one launch."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent

Starts = Callable[[Path, list[tuple[Path, dict[str, Any] | None]]], list[dict[str, Any]]]


@pytest.fixture(scope="session")
def starts() -> Starts:
    """`starts(folder, [(run's folder, kill), ...])`: what became of each (see killer.py)."""

    def run(folder: Path, wished: list[tuple[Path, dict[str, Any] | None]]) -> list[dict[str, Any]]:
        plan, results = folder / "plan.json", folder / "results.json"
        plan.write_text(
            json.dumps([{"config": str(run / "run.yaml"), "kill": kill} for run, kill in wished])
        )
        done = subprocess.run(
            [sys.executable, str(HERE / "killer.py"), str(plan), str(results)],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(results.read_text())

    return run
