"""Ranks as tasks of a step on a real cluster: torchrun's losses, and a task that goes wrong."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlt_dist.jobs import launchers

REPOSITORY = Path(__file__).parents[2]
FAULTY = REPOSITORY / "tests" / "launch" / "faulty.py"
TIME_LIMIT = 280
LONGEST_REQUEST = 1024
"""Bytes of a request that Slurm's pmi2 reads at once; a longer one is torn, and the step hangs."""

Environment = dict[str, str]

STEPS = ("train.steps=4", "guard.step_timeout=4", "mesh.data=2")

RUN = """
import os, sys
from pathlib import Path
from rlt_dist.jobs.ranks import run_ranks_with
folder, *command = sys.argv[1:]
sys.exit(run_ranks_with(command, os.environ, Path(folder), patience=3).status)
"""


def run_with(
    environment: Environment, command: list[str], folder: Path
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", RUN, str(folder), *command],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT,
        check=False,
    )


@pytest.fixture(scope="session")
def environment(cluster: Environment) -> Environment:
    """Every node is this machine, whose name is not theirs."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    own = {"PATH": path, "PYTHONPATH": str(REPOSITORY), "MASTER_ADDR": "127.0.0.1"}
    return cluster | own | {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def reference(once: Any, configure: Any) -> Path:
    def make(folder: Path) -> None:
        configure(folder, "rlt1", *STEPS)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node=2", "-m", "rlt_dist", "train", str(folder / "run.yaml")]
        subprocess.run(command, timeout=TIME_LIMIT, check=True)

    return once("for-slurm", make) / "run"


@pytest.mark.parametrize("by", ["variables", "pmi2"])
def test_tasks_of_two_nodes_give_the_same_losses(
    environment: Environment,
    configure: Any,
    metrics: Any,
    reference: Path,
    tmp_path: Path,
    by: str,
) -> None:
    if by == "pmi2" and importlib.util.find_spec("mpi4py") is None:
        pytest.skip("mpi4py is not installed")
    config = configure(tmp_path, "rlt1", *STEPS)
    launch = [sys.executable, "-m", "rlt_dist", "launch", "srun", "--nodes=2", "--processes=2"]
    done = subprocess.run(
        [*launch, str(tmp_path / "run.yaml")],
        env=environment | ({"RLT_DIST_LAUNCHER": "mpi", "PMI_DEBUG": "1"} if by == "pmi2" else {}),
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert metrics(config.run_folder) == metrics(reference)
    told = re.findall("cmd=put .*", done.stdout + done.stderr)
    assert len(told) == (2 if by == "pmi2" else 0)
    assert all(len(line) < LONGEST_REQUEST // 4 for line in told), "an address of variable length"


def test_an_agent_a_node_gives_the_same_losses(
    environment: Environment, configure: Any, metrics: Any, reference: Path, tmp_path: Path
) -> None:
    config = configure(tmp_path, "rlt1", *STEPS)
    program = ("-m", "rlt_dist", "train", str(tmp_path / "run.yaml"))
    launch = launchers.torchrun_on_nodes(program, (1, 1), meeting="127.0.0.1:29631", name="1")
    done = run_with(environment, [*launch.command], config.run_folder)
    assert done.returncode == 0, done.stderr
    assert metrics(config.run_folder) == metrics(reference)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("raises", r"rank 1 \(\S+ cpu\): ZeroDivisionError: a defect"),
        ("halts", r"(step 3 took more than 4 s: stuck is|.*lost contact with) rank 1.*"),
    ],
)
def test_a_task_that_goes_wrong_ends_the_step_and_is_named_last(
    environment: Environment, configure: Any, tmp_path: Path, fault: str, said: str
) -> None:
    config = configure(tmp_path, "rlt1", *STEPS)
    program = (str(FAULTY), fault, "1", str(tmp_path / "run.yaml"))
    launch = launchers.srun(program, ("--nodes=2", "--ntasks=2"))
    done = run_with({**environment, **launch.environment}, [*launch.command], config.run_folder)
    assert done.returncode == 1, done.stderr
    assert re.fullmatch(f"rlt-dist: error: {said}", done.stderr.splitlines()[-1]), done.stderr
    left = subprocess.run(
        ["squeue", "--noheader", "--states=running"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert left.stdout == ""
