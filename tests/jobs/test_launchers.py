"""The launchers' command lines."""

import os
import subprocess
from pathlib import Path

import pytest

from rlt_dist.jobs import launchers
from rlt_dist.mesh.launched import LAUNCHER

PROGRAM = ("-m", "rlt_dist", "train", "run.yaml")


def test_torchrun_here_and_on_several_machines() -> None:
    here = launchers.torchrun(PROGRAM, 2, restarts=3, shutdown=90).command
    assert here[-len(PROGRAM) :] == PROGRAM
    assert {"--standalone", "--nproc-per-node=2", "--max-restarts=3"} <= set(here)
    assert "--shutdown-timeout=90" in here
    there = launchers.torchrun(PROGRAM, 4, nodes=2, meeting="n1:77", address="n2").command
    assert {"--nnodes=2", "--rdzv-endpoint=n1:77", "--local-addr=n2"} <= set(there)
    assert "--standalone" not in there
    first = launchers.torchrun(PROGRAM, 4, nodes=2, meeting="n1:77", address="n1", serves=True)
    assert "--rdzv-conf=is_host=1" in first.command


def test_one_agent_a_node_with_its_own_number_of_ranks() -> None:
    launch = launchers.torchrun_on_nodes(
        PROGRAM, (8, 8, 3), meeting="n1:77", name="12-0", step=("--exclude=n9",)
    )
    command = launch.command
    assert command[0] == "srun"
    assert {"--nodes=3", "--ntasks=3", "--exclude=n9", "--nnodes=3", "--rdzv-id=12-0"} <= {*command}
    (script,) = [part for part in command if "places" in part]
    assert "places=(8 8 3);" in script
    assert command[-len(PROGRAM) :] == PROGRAM


def test_ranks_of_a_machine_share_its_cores_unless_a_person_says_otherwise() -> None:
    cores = len(os.sched_getaffinity(0))
    for launch in (launchers.torchrun(PROGRAM, 1), launchers.mpirun(PROGRAM, 1)):
        assert launch.environment_in({})["OMP_NUM_THREADS"] == str(cores)
        assert launch.environment_in({"OMP_NUM_THREADS": "7"})["OMP_NUM_THREADS"] == "7"
    many = launchers.torchrun(PROGRAM, 3 * cores)
    assert many.environment_in({})["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in launchers.srun(PROGRAM).environment_in({})


@pytest.mark.parametrize(("said", "threads"), [(None, None), ("7", "7")])
def test_so_they_do_on_each_of_a_jobs_nodes(said: str | None, threads: str | None) -> None:
    cores = len(os.sched_getaffinity(0))
    command = launchers.torchrun_on_nodes(PROGRAM, (2, 1), meeting="n1:77", name="1").command
    bash = command.index("bash")
    agent = [*command[bash : command.index("agent") + 1], "env"]
    outer = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    outer |= {"SLURM_NODEID": "1"} | ({} if said is None else {"OMP_NUM_THREADS": said})
    told = subprocess.run(agent, env=outer, capture_output=True, text=True, check=True).stdout
    assert {"PET_NPROC_PER_NODE=1", f"OMP_NUM_THREADS={threads or cores}"} <= {*told.split()}


def test_mpi_and_slurm_are_asked_for_by_name() -> None:
    mpirun = launchers.mpirun(PROGRAM, 4, Path("hosts"))
    assert mpirun.environment[LAUNCHER] == "mpi"
    assert mpirun.command[2:4] == ("-f", "hosts")
    step = launchers.srun(PROGRAM, ("--nodes=2",))
    assert step.environment == {LAUNCHER: "srun"}
    assert "--nodes=2" in step.command
    over_mpi = launchers.srun(PROGRAM, mpi=True)
    assert over_mpi.environment[LAUNCHER] == "mpi"
    assert "--mpi=pmi2" in over_mpi.command


def test_deepspeed_gives_the_ranks_no_argument_of_its_own() -> None:
    command = launchers.deepspeed(PROGRAM, Path("hosts")).command
    assert command[1:] == (
        *("--hostfile=hosts", "--no_local_rank", "--module"),
        *("rlt_dist", "train", "run.yaml"),
    )
    here = launchers.deepspeed(PROGRAM, Path("hosts"), 77).command
    assert {"--no_ssh_check", "--master_addr=127.0.0.1", "--master_port=77"} <= set(here)
