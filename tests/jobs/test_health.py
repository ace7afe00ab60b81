"""Which nodes are fit to train."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlt_dist.jobs.health import Report, judge, parse_reports
from rlt_dist.jobs.job import JOB, Job, write_record

NODES = ("n0", "n1", "n2", "n3")


def reports(**changed: dict[str, Any]) -> list[Report]:
    well = {"devices": 8, "clock": 1e9, "own": None, "meeting": None}
    return [Report(node=node, **well | changed.get(node, {})) for node in NODES]


@pytest.mark.parametrize(
    ("found", "sick"),
    [
        (reports(), {}),
        (reports()[:3], {"n3": "gave no answer"}),
        (reports(n1={"own": "no disk"}), {"n1": "no disk"}),
        (reports(n1={"devices": 7}), {"n1": "has 7 GPUs where others have 8"}),
        (reports(n2={"clock": 1e9 - 60}), {"n2": "its clock is -60 s off the others'"}),
        (reports(n0={"clock": 1e9 + 99}), {"n0": "its clock is +99 s off the others'"}),
        (reports(n2={"clock": 1e9 - 5}), {}),
        (reports(n2={"clock": None, "meeting": "lost"}), {"n2": "lost"}),
        (reports(n1={"own": "no disk"}, n2={"meeting": "lost"}), {"n1": "no disk"}),
        (reports(n2={"meeting": "lost", "clock": None})[:3], {"n3": "gave no answer"}),
        ([], dict.fromkeys(NODES, "gave no answer")),
    ],
)
def test_the_sick_node_is_named_and_not_those_that_suffer_from_it(
    found: list[Report], sick: dict[str, str]
) -> None:
    assert judge(NODES, found) == sick


def test_gpus_that_all_nodes_lack_alike_are_missed() -> None:
    found = reports(**{node: {"devices": 7} for node in NODES})
    assert judge(NODES, found, 7) == {}
    assert judge(NODES, found, 8) == dict.fromkeys(NODES, "has 7 of 8 GPUs")


def test_what_else_a_node_prints_is_passed_over() -> None:
    lines = [report.model_dump_json() for report in reports()]
    text = "\n".join(["a warning", lines[0], "{}", *lines[1:], "", "3"])
    assert parse_reports(text) == reports()


def examine(folder: Path, *names: str) -> list[Report]:
    """Examine nodes of these names, all on this machine."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "rlt_dist.jobs.health", str(folder), "127.0.0.1"]
    port = str(free_port())
    processes = [
        subprocess.Popen(
            [*command, port, str(len(names))],
            env=environment | {"SLURMD_NODENAME": name, "SLURM_PROCID": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, name in enumerate(names)
    ]
    return parse_reports("".join(process.communicate(timeout=100)[0] for process in processes))


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.fixture
def job(tmp_path: Path) -> Path:
    folder = tmp_path / "run" / "jobs" / "0001"
    folder.mkdir(parents=True)
    asked = Job(run_folder=tmp_path / "run", directory=tmp_path, nodes=2, nodes_min=1, processes=1)
    write_record(folder / JOB, asked)
    return folder


def test_nodes_that_are_fit_meet_and_leave_nothing_behind(job: Path) -> None:
    found = examine(job, "a", "b")
    assert judge(["a", "b"], found) == {}
    assert {report.node for report in found} == {"a", "b"}
    assert [path.name for path in (job.parents[1]).iterdir()] == ["jobs"]


def test_a_node_without_the_shared_disk_says_so(tmp_path: Path) -> None:
    (found,) = examine(tmp_path / "elsewhere", "a")
    assert "not on a disk that all nodes share?" in (found.own or "")


def test_a_disk_without_room_for_a_checkpoint_is_named(job: Path) -> None:
    kept = job.parents[1] / "checkpoints" / "step-00000004"
    kept.mkdir(parents=True)
    facts = {"step": 4, "tokens": 1, "tokenizer": "", "corpus": "", "identity": {}}
    facts |= {"mesh": "1x1x1", "engine": "torch"}
    large = {"facts": facts, "tensor_bytes": 1, "files": {"a": {"bytes": 1 << 60, "sha256": ""}}}
    (kept / "manifest.json").write_text(json.dumps(large))
    (found,) = examine(job, "a")
    assert "a checkpoint takes 1073741824.0 GiB" in (found.own or "")
