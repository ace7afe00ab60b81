"""The same training by every launcher, and what becomes of it when a rank goes wrong."""

import importlib.util
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlt_dist.config.run import RunConfig
from rlt_dist.jobs import launchers
from rlt_dist.jobs.launchers import Launch
from rlt_dist.jobs.ranks import run_ranks_with
from rlt_dist.util.ending import ENDED, last_ended, read_ended

FAULTY = Path(__file__).parent / "faulty.py"
SECONDS = 60
"""In which a job ends after one of its ranks went wrong."""

STEPS = ("train.steps=6", "checkpoint.every=2", "guard.step_timeout=4")
MESH = ("mesh.tensor=2",)


def needs(module: str) -> pytest.MarkDecorator:
    absent = importlib.util.find_spec(module) is None
    return pytest.mark.skipif(absent, reason=f"{module} is not installed")


@pytest.fixture(scope="session")
def reference(once: Any, configure: Any) -> Path:
    """The run by torchrun itself."""

    def make(folder: Path) -> None:
        configure(folder, "rlt1", *STEPS, *MESH)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node=2", "-m", "rlt_dist", "train", str(folder / "run.yaml")]
        subprocess.run(command, timeout=280, check=True)

    return once("launched", make) / "run"


def script(repository: Path, name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(repository / "launch" / name), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.mark.parametrize(
    "name",
    [
        "torchrun.sh",
        pytest.param("mpirun.sh", marks=needs("mpi4py")),
        pytest.param("deepspeed.sh", marks=(needs("deepspeed"), pytest.mark.deepspeed)),
    ],
)
def test_every_launcher_gives_the_same_losses(
    repository: Path, configure: Any, metrics: Any, reference: Path, tmp_path: Path, name: str
) -> None:
    config = configure(tmp_path, "rlt1", *STEPS, *MESH)
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    ranks = tmp_path / "hosts" if name == "deepspeed.sh" else 2
    done = script(repository, name, ranks, tmp_path / "run.yaml")
    assert done.returncode == 0, done.stderr
    assert metrics(config.run_folder) == metrics(reference)
    assert read_ended(config.run_folder, None) is None  # It bears the name of this start.
    assert '"how": "finished", "step": 6' in (config.run_folder / ENDED).read_text()
    for rank in range(2):
        log = (config.run_folder / "logs" / f"rank-{rank:05d}.log").read_text()
        first, *_ = log.splitlines()
        assert re.fullmatch(rf"{LINE.format(rank=rank)} INFO rank {rank} of 2, process \d+", first)


LINE = r"\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d rank {rank} \S+ (?:cpu|cuda:\d+)"
"""How every line of a rank's file begins."""

DEFECT = r"rank 1 \(\S+ cpu\): ZeroDivisionError: a defect"
LOST = r"rank 0 \(\S+ cpu\): lost contact with rank 1 \(\S+ cpu\) .*"
STUCK = r"step 3 took more than 4 s: stuck is rank 1.*"

Ran = tuple[Any, list[str], float]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """`run(launch, config)`: how it ended, the lines of the screen, and when that was."""

    def go(launch: Launch, config: RunConfig, **more: Any) -> Ran:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **launch.environment}
        ending = run_ranks_with(launch.command, environment, config.run_folder, **more)
        return ending, capfd.readouterr().err.splitlines(), time.time()

    return go


def by(launcher: str, program: tuple[str, ...], restarts: int = 0) -> Launch:
    if launcher == "torchrun":
        return launchers.torchrun(program, 2, restarts=restarts)
    return launchers.mpirun(program, 2)


def faulty(folder: Path, fault: str, rank: int = 1) -> tuple[str, ...]:
    return str(FAULTY), fault, str(rank), str(folder / "run.yaml")


@pytest.mark.parametrize(
    ("launcher", "fault", "said"),
    [
        ("torchrun", "raises", DEFECT),
        ("torchrun", "leaves", LOST),
        ("torchrun", "hangs", STUCK),
        ("torchrun", "halts", f"{LOST}|{STUCK}"),
        pytest.param("mpirun", "raises", DEFECT, marks=needs("mpi4py")),
        pytest.param("mpirun", "dies", LOST, marks=needs("mpi4py")),
        pytest.param("mpirun", "halts", f"{LOST}|{STUCK}", marks=needs("mpi4py")),
    ],
)
def test_a_rank_that_goes_wrong_ends_the_job_soon_and_is_named_last(
    configure: Any, run: Any, tmp_path: Path, launcher: str, fault: str, said: str
) -> None:
    config = configure(tmp_path, "rlt1", *STEPS, *MESH)
    ending, lines, ended = run(by(launcher, faulty(tmp_path, fault)), config, patience=3)
    assert (ending.how, ending.status) == ("failed", 1)
    assert ended - (tmp_path / "fault").stat().st_mtime < SECONDS
    assert re.fullmatch(said, ending.why)
    assert lines[-1] == f"rlt-dist: error: {ending.why}"
    assert processes_with(str(tmp_path)) == []


def test_an_error_is_in_its_ranks_file_with_its_trace(
    configure: Any, run: Any, tmp_path: Path
) -> None:
    """And what that rank did before; the other's file says nothing of it."""
    config = configure(tmp_path, "rlt1", *STEPS, *MESH)
    ending, lines, _ = run(by("torchrun", faulty(tmp_path, "raises")), config)
    own, other = ((config.run_folder / "logs" / f"rank-0000{r}.log").read_text() for r in (1, 0))
    for rank, text in ((1, own), (0, other)):
        assert all(re.match(LINE.format(rank=rank), line) for line in text.splitlines())
    assert "in raises" in own
    assert own.rstrip().endswith(f"ERROR {ending.why}")
    assert "ERROR" not in other
    assert "step 1/6 " in other
    who, _, _ = ending.why.partition(": ")
    assert f"{who}: Traceback (most recent call last):" in lines
    assert lines[-1] == f"rlt-dist: error: {ending.why}"


def test_a_failure_is_restarted_in_the_job_and_a_mistake_is_not(
    configure: Any, run: Any, metrics: Any, reference: Path, tmp_path: Path
) -> None:
    failed, mistaken = tmp_path / "failed", tmp_path / "mistaken"
    config = configure(failed, "rlt1", *STEPS, *MESH)
    ending, _, _ = run(by("torchrun", faulty(failed, "once dies"), restarts=2), config)
    assert (ending.how, ending.status) == ("finished", 0)
    assert metrics(config.run_folder) == metrics(reference)
    config = configure(mistaken, "rlt1", *STEPS, *MESH)
    ending, lines, _ = run(by("torchrun", faulty(mistaken, "mistakes"), restarts=2), config)
    assert (ending.how, ending.status) == ("mistake", 2)
    assert re.fullmatch(r"rank 1 \(\S+ cpu\): no such file", ending.why)
    assert lines[-1] == f"rlt-dist: error: {ending.why}"
    assert len((mistaken / "fault").read_text()) == 1


def test_ranks_stop_with_whoever_waits_for_them_behind_a_launcher_that_stays(
    configure: Any, tmp_path: Path
) -> None:
    """As DeepSpeed's is two processes, of which the second does not notice the first one's end."""
    config = configure(tmp_path, "rlt1", "train.steps=100000")
    stays = ["bash", "-c", 'trap "" TERM; "$@"; sleep 1', "-", sys.executable]
    command = [*stays, "-m", "rlt_dist", "train", str(tmp_path / "run.yaml")]
    source = (
        "import os\nfrom pathlib import Path\nfrom rlt_dist.jobs.ranks import run_ranks_with\n"
        f"run_ranks_with({command!r}, os.environ, Path({str(config.run_folder)!r}))"
    )
    until = time.monotonic() + SECONDS
    with subprocess.Popen([sys.executable, "-c", source]) as process:
        while not (config.run_folder / "metrics.jsonl").exists():
            assert time.monotonic() < until
            time.sleep(0.05)
        process.kill()
    while processes_with(str(tmp_path)):
        assert time.monotonic() < until
        time.sleep(0.05)
    ended = last_ended(config.run_folder)
    assert ended is not None
    assert ended.how == "stopped"


def processes_with(word: str) -> list[str]:
    """The command lines of all processes that have a word in theirs."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return [line for line in found if word in line]
