"""slurm/prepare.sbatch on two nodes of a real cluster: the bytes that one process makes."""

import importlib.util
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlt_dist.data.prepare.prepare import prepare_corpus
from rlt_dist.data.tokenizers.raw_bytes import BytesTokenizer

REPOSITORY = Path(__file__).parents[2]
TIME_LIMIT = 100  # seconds

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mpi4py") is None, reason="mpi4py is not installed"
)


HICCUP = "mpi/pmi2: value not properly terminated"
"""What Slurm 22.05 says, on a busy machine, where it read half of a task's message."""


def run_job(cluster: dict[str, str], log: Path, *arguments: object) -> str:
    """Run the batch script, again where Slurm lost it on the way; the state in which it ended."""
    state = run_once(cluster, log, *arguments)
    while HICCUP in log.read_text():
        log.unlink()
        state = run_once(cluster, log, *arguments)
    return state


def run_once(cluster: dict[str, str], log: Path, *arguments: object) -> str:
    """Run it on two nodes of two tasks."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = cluster | {"PATH": path, "PYTHONPATH": str(REPOSITORY)}
    submit = [
        *("sbatch", "--parsable", "--nodes=2", "--ntasks-per-node=2", "--time=2", "--no-requeue"),
        *(f"--output={log}", "slurm/prepare.sbatch", *map(str, arguments)),
    ]
    job = ask(submit, environment).strip()
    deadline = time.monotonic() + TIME_LIMIT
    while True:
        shown = ask(["scontrol", "--oneliner", "show", "job", job], environment)
        state = re.search(r"JobState=(\w+)", shown)[1]
        if state not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING"):
            return state
        if time.monotonic() > deadline:
            ask(["scancel", job], environment)
            pytest.fail(f"the job does not end: {shown}")
        time.sleep(0.1)


def ask(command: list[str], environment: dict[str, str]) -> str:
    return subprocess.run(
        command,
        cwd=REPOSITORY,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        timeout=30,
        check=True,
    ).stdout


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(200):
        (folder / f"{number:03}.txt").write_text(f"document {number} " * (number % 17))
    return folder


def test_two_nodes_make_the_same_bytes(
    cluster: dict[str, str], texts: Path, tmp_path: Path
) -> None:
    tokenizer = tmp_path / "bytes.json"
    BytesTokenizer().save(tokenizer)
    arguments = ["--input", texts, "--tokenizer", tokenizer, "--shard-mib", 0.001]
    log = tmp_path / "log"
    state = run_job(cluster, log, *arguments, "--output", tmp_path / "out")
    assert state == "COMPLETED", log.read_text()
    prepare_corpus([texts], tmp_path / "alone", tokenizer, shard_bytes=round(0.001 * (1 << 20)))
    assert contents(tmp_path / "out") == contents(tmp_path / "alone")
    assert len(list((tmp_path / "out").glob("train-*.tar"))) > 10


def test_a_mistake_ends_the_job(cluster: dict[str, str], texts: Path, tmp_path: Path) -> None:
    (texts / "100.txt").write_bytes(b"caf\xe9")
    recipe = tmp_path / "bytes.yaml"
    recipe.write_text("kind: bytes\n")
    arguments = ["--input", texts, "--tokenizer", recipe, "--output", tmp_path / "out"]
    assert run_job(cluster, tmp_path / "log", *arguments, "--require-utf8") == "FAILED"
    said = (tmp_path / "log").read_text()
    assert said.count("rlt-dist: error: ") == 1
    assert "100.txt: byte 3 " in said
