"""A rank's place, from what each launcher says."""

import socket

import pytest

from rlt_dist.mesh.launched import (
    LAUNCHER,
    Launched,
    address_towards,
    by_slurm,
    by_variables,
    interface_of,
    launched,
    port_of,
    tasks_per_node,
)
from rlt_dist.util.errors import UserError

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "77",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "3",
    "SLURM_STEP_NODELIST": "n[4-6]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),3",
}


def hosts_of(nodes: str) -> list[str]:
    assert nodes == "n[4-6]"
    return ["n4", "n5", "n6"]


def test_alone_there_is_one_rank_also_in_a_shell_of_an_allocation() -> None:
    assert launched({}) == launched(SLURM) == Launched(0, 1, 0, 1)


def test_torchruns_and_deepspeeds_variables() -> None:
    assert launched(TORCHRUN) == Launched(3, 4, 1, 2, "n1", 77, served=False)
    served = TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert launched(served) == Launched(3, 4, 1, 2, "n1", 77, served=True)
    assert not launched(TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "False"}).served
    deepspeed = {key: value for key, value in TORCHRUN.items() if key != "LOCAL_WORLD_SIZE"}
    assert by_variables(deepspeed | {"LOCAL_SIZE": "2"}) == by_variables(TORCHRUN)


def test_slurms_variables_where_they_are_asked_for() -> None:
    place = by_slurm(SLURM, hosts_of)
    assert place == Launched(5, 7, 1, 3, "n4", port_of(12, 3))
    told = SLURM | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "99"}
    assert launched(told | {LAUNCHER: "srun"}) == Launched(5, 7, 1, 3, "10.0.0.1", 99)


def test_tasks_per_node_in_slurms_short_form() -> None:
    assert tasks_per_node("8(x3),2,1(x2)") == [8, 8, 8, 2, 1, 1]


def test_steps_of_one_job_meet_at_ports_of_their_own() -> None:
    assert len({port_of(job, step) for job in range(10) for step in range(20)}) == 200
    assert all(1024 < port_of(job, 3) < 32768 for job in (1, 10**6, 10**9))


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({LAUNCHER: "srun"}, "^SLURM_PROCID, .* not set though RLT_DIST_LAUNCHER=srun"),
        ({LAUNCHER: "ssh"}, "^RLT_DIST_LAUNCHER=ssh: give mpi or srun"),
        ({"RANK": "0"}, "^WORLD_SIZE, .* not set though other launcher variables are"),
    ],
)
def test_half_a_launcher_is_refused(environment: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        launched(environment)


def test_the_way_to_this_machine_is_loopback() -> None:
    assert address_towards("127.0.0.1", 80) == "127.0.0.1"
    assert interface_of("127.0.0.1") in [name for _, name in socket.if_nameindex()]
    assert interface_of("192.0.2.1") is None  # An address that documentation uses.
