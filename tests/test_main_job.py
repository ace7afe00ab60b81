"""`make run` with models so small that it takes seconds: every stage of it, as a person sees it."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

SMALL = {
    "rlt": ("model.ffn=32", "train.steps=60"),
    "transformer_xl": ("model.d_inner=32", "model.layers=2", "train.steps=200"),
}
COMMON = (
    "model.d_model=16",
    "model.heads=2",
    "data.lanes=8",
    "data.segment=16",
    "schedule.warmup=2",
    "checkpoint.every=5",
    "validation.every=30",
    "validation.segments=2",
)


@pytest.fixture(scope="module", params=SMALL)
def job(request: pytest.FixtureRequest, repository: Path, tmp_path_factory: pytest.TempPathFactory):
    """What the job printed, and its run folder."""
    folder = tmp_path_factory.mktemp(request.param)
    paths = {"CORPUS": str(folder / "corpus"), "RUN": str(folder / "run"), "EVAL_TOKENS": "4000"}
    done = subprocess.run(
        [str(repository / "launch" / "main_job.sh"), request.param, *SMALL[request.param], *COMMON],
        env=os.environ | paths | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr, folder / "run"


def test_the_main_job_goes_through_all_its_stages(job: tuple[str, Path]) -> None:
    """Prepared, killed, resumed, evaluated, sampled, reported."""
    said, run = job
    for stage in ("Prepare", "kill", "Resume", "Evaluate", "Sample", "Report"):
        assert re.search(rf"== \d\. .*{stage}", said)

    killed, steps = map(int, re.search(r"killed after step (\d+) of (\d+)", said).groups())
    assert steps // 2 <= killed < steps
    resumed = int(re.search(r"resumed from .*? at step (\d+)", " ".join(said.split()))[1])
    assert 0 < resumed <= killed

    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, steps + 1))
    assert records[-1]["loss"] < records[0]["loss"]

    rows = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    assert [row["state"] for row in rows] == ["carried", "cut"]
    assert all(0 < row["tokens"] <= 4000 and row["step"] == steps for row in rows)
    table = said[said.index("Evaluate") : said.index("Sample")]
    assert "carried" in table
    assert "cut" in table

    assert (run / "sample.txt").read_text().startswith("def read_lines(path):")
    assert len((run / "sample.txt").read_text()) > len("def read_lines(path):\n") + 20
    assert "<html" in (run / "report.html").read_text()
    assert "report.html" in said
