"""slurm/evaluate.sbatch on a real cluster: one run of a study in each task of an array."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]


def test_each_task_evaluates_its_own_run(
    cluster: dict[str, str], command: Any, configure: Any, tmp_path: Path
) -> None:
    run = configure(tmp_path, "rlt1", "train.steps=2").run_folder
    assert command("train", tmp_path / "run.yaml")[0] == 0
    for task in (1, 3):
        shutil.copytree(run, tmp_path / f"seed-{task}")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    subprocess.run(
        [
            *("sbatch", "--array=1,3", f"--output={tmp_path}/log-%a"),
            *("slurm/evaluate.sbatch", tmp_path / "seed-{task}", "--split", "test"),
        ],
        env=cluster | {"PATH": path, "PYTHONPATH": str(REPOSITORY)},
        cwd=REPOSITORY,
        timeout=60,
        check=True,
    )
    results = [tmp_path / f"seed-{task}" / "evaluations.jsonl" for task in (1, 3)]
    deadline = time.monotonic() + 100
    while not all(path.is_file() and path.stat().st_size for path in results):
        assert time.monotonic() < deadline, [log.read_text() for log in tmp_path.glob("log-*")]
        time.sleep(0.1)
    for path in results:
        (line,) = path.read_text().splitlines()
        assert json.loads(line)["split"] == "test"
