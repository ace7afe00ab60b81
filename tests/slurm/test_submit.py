"""`rlt-dist submit` and what follows it, on a real cluster; jobs run tests/jobs/stand_in.py."""

import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlt_dist.jobs.batch import Slurm
from rlt_dist.jobs.status import Status, status_of

PATIENCE = 60  # seconds


@pytest.fixture
def run(
    cluster: dict[str, str], checkout: Path, configure: Any, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """The folder of a run of 8 lanes, to be submitted to the cluster from a checkout."""
    monkeypatch.setenv("SLURM_CONF", cluster["SLURM_CONF"])
    return configure(checkout.parent).run_folder


@pytest.fixture
def submit(command: Any, run: Path) -> Callable[..., str]:
    """`submit(...)`: the id of the job that `rlt-dist submit run.yaml ...` submits."""

    def submitted(*arguments: object) -> str:
        code, out, err = command("submit", run.parent / "run.yaml", *arguments)
        assert code == 0, err
        assert re.fullmatch(r"\d+\n", out)
        return out.strip()

    return submitted


def ask(*command: object) -> str:
    return subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, timeout=60, check=True
    ).stdout


def shown(job_id: str) -> dict[str, str]:
    """What Slurm knows of a job."""
    told = ask("scontrol", "--oneliner", "show", "job", job_id)
    return dict(re.findall(r"(\S+?)=(\S*)", told))


def wait_for(run: Path, *states: str) -> Status:
    deadline = time.monotonic() + PATIENCE
    while (status := status_of(run)).state not in states:
        assert time.monotonic() < deadline, status
        time.sleep(0.2)
    return status


def ended(job_id: str) -> str:
    """How a job ended, in Slurm's words."""
    deadline = time.monotonic() + PATIENCE
    while (state := shown(job_id)["JobState"]) in ("PENDING", "RUNNING", "COMPLETING"):
        assert time.monotonic() < deadline, shown(job_id)
        time.sleep(0.1)
    return state


def test_a_job_runs_its_own_code_with_all_that_was_asked_for(
    submit: Any, run: Path, checkout: Path
) -> None:
    (run / "jobs").mkdir(parents=True)
    (run / "jobs" / "hold").touch()
    wish = ["--nodes", 2, "--gpus-per-node", "h200:4", "--time", "1:00:00", "--comment", "a b"]
    job_id = submit(*wish, "--exclude=n3", "--nodes-min", 1, "--", "--mem-per-cpu", "100M")
    stand_in = checkout / "rlt_dist" / "jobs" / "supervise.py"
    stand_in.write_text("raise SystemExit('changed since')")
    found = shown(job_id)
    wanted = {"JobName": "run", "Requeue": "1", "TimeLimit": "01:00:00", "CPUs/Task": "4"}
    wanted |= {"ExcNodeList": "n3", "TresPerNode": "gres:gpu:h200:4", "MinMemoryCPU": "100M"}
    assert found | wanted == found
    assert "Comment=a b" in ask("scontrol", "show", "job", job_id)
    assert wait_for(run, "running").job_id == job_id
    assert shown(job_id)["NumNodes"] == "2"  # as many as there are
    (run / "jobs" / "hold").unlink()
    assert ended(job_id) == "COMPLETED"
    folder = run / "jobs" / "0001"
    code = folder / "code" / "rlt_dist" / "__init__.py"
    assert (folder / "output.log").read_text().splitlines() == [
        f"as submitted, {folder}, code in {code}, from {checkout}, task none",
        "the end",
    ]


REFUSED = {
    "gpus": (
        ["--gpus-per-node", 9, "data.lanes=9"],
        "Requested node configuration is not available",
    ),
    "kind": (["--gpus-per-node", "a100:1"], "Requested node configuration is not available"),
    "nodes": (["--nodes", 5, "data.lanes=10"], "Requested node configuration is not available"),
    "cpus": (["-c", 17], "Requested node configuration is not available"),
    "memory": (["--mem=100G"], "Requested node configuration is not available"),
    "time": (["--time", "foo"], "Invalid --time specification"),
    "partition": (["--partition", "nowhere"], "invalid partition specified: nowhere"),
    "option": (["--nosuch=3"], "unrecognized option '--nosuch=3'"),
    "dependency": (["--dependency", "afterok:nothing"], "ependency"),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_what_slurm_refuses_is_said_in_its_words_and_leaves_nothing(
    command: Any, is_one_error: Any, run: Path, mistake: str
) -> None:
    wish, said = REFUSED[mistake]
    code, out, err = command("submit", run.parent / "run.yaml", *wish)
    *facts, error = err.splitlines()
    is_one_error((code, out, error), "sbatch refuses: ", said)
    assert facts
    assert out == ""
    assert not run.exists()


def test_more_memory_than_a_node_has_is_refused(command: Any, is_one_error: Any, run: Path) -> None:
    # 257 ids of d 2^27: the embedding alone fills more than 62.5 GiB.
    wide = ["model.d_model=134217728", "model.ffn=2", "model.d_head=2"]
    said = command("submit", run.parent / "run.yaml", *wide)
    is_one_error(said, "a rank of stage 0 needs", "the largest node of the partition gives 62.5")


def test_each_task_of_an_array_is_a_run_of_its_own(submit: Any, run: Path, checkout: Path) -> None:
    parent = run.parent
    wish = [f"run_folder={parent}/seed-{{task}}", "train.seed={task}", "--array", "1-5:2%2"]
    job_id = submit(*wish)
    runs = {task: parent / f"seed-{task}" for task in (1, 3, 5)}
    for task, folder in runs.items():
        deadline = time.monotonic() + PATIENCE
        log = folder / "jobs" / "0001" / "output.log"
        while not (log.is_file() and "the end" in log.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        job = folder / "jobs" / "0001"
        code = job / "code" / "rlt_dist" / "__init__.py"
        said, end = log.read_text().splitlines()
        assert said == f"as submitted, {job}, code in {code}, from {checkout}, task {task}"
        assert end == "the end"
        assert f"seed: {task}\n" in (job / "config.yaml").read_text()
        assert status_of(folder).job_id == f"{job_id}_{task}"
    assert ended(f"{job_id}_5") == "COMPLETED"


def test_one_task_of_an_array_is_cancelled_and_resumed_alone(
    command: Any, submit: Any, run: Path
) -> None:
    runs = [run.parent / f"seed-{task}" for task in range(2)]
    for folder in runs:
        (folder / "jobs").mkdir(parents=True)
        (folder / "jobs" / "hold").touch()
    submit(f"run_folder={run.parent}/seed-{{task}}", "--array", "0-1", "--comment=kept")
    for folder in runs:
        wait_for(folder, "running")
    assert command("cancel", runs[0])[0] == 0
    assert wait_for(runs[0], "cancelled").restarts == 0
    assert status_of(runs[1]).state == "running"
    code, out, err = command("resume", runs[0], "--time", 7)
    assert code == 0, err
    found = shown(out.strip())
    assert (found["Comment"], found["TimeLimit"]) == ("kept", "00:07:00")
    assert "ArrayJobId" not in found
    for folder in runs:
        (folder / "jobs" / "hold").unlink()
    assert ended(out.strip()) == "COMPLETED"
    assert (runs[0] / "jobs" / "0002" / "output.log").is_file()


def test_a_task_that_is_requeued_leaves_the_others_of_its_array_alone(
    submit: Any, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm gives the last task the number of the whole array."""
    runs = [run.parent / f"seed-{task}" for task in range(2)]
    for folder in runs:
        (folder / "jobs").mkdir(parents=True)
        (folder / "jobs" / "hold").touch()
    array = submit(f"run_folder={run.parent}/seed-{{task}}", "--array", "0-1")
    for folder in runs:
        wait_for(folder, "running")
    assert shown(f"{array}_1")["JobId"] == array
    own = {"SLURM_JOB_ID": array, "SLURM_ARRAY_JOB_ID": array, "SLURM_ARRAY_TASK_ID": "1"}
    batch = Slurm(runs[1], own | {"SLURM_JOB_NODELIST": shown(f"{array}_1")["NodeList"]})
    monkeypatch.setattr("signal.signal", lambda *_: None)
    assert batch.requeue(["n3"])
    told = {task: shown(f"{array}_{task}") for task in range(2)}
    assert [told[task]["Restarts"] for task in range(2)] == ["0", "1"]
    assert [told[task]["ExcNodeList"] for task in range(2)] == ["(null)", "n3"]
    assert status_of(runs[0]).state == "running"
    for folder in runs:
        (folder / "jobs" / "hold").unlink()
    assert ended(f"{array}_0") == "COMPLETED"
    ask("scancel", f"{array}_1")


def test_a_resumed_run_is_what_was_submitted_on_other_nodes(
    command: Any, is_one_error: Any, submit: Any, run: Path, checkout: Path
) -> None:
    (run / "jobs").mkdir(parents=True)
    (run / "jobs" / "status").write_text("1")
    job_id = submit("--nodes", 4, "--time", "1:00:00", "train.seed=9", "--hold")
    is_one_error(command("resume", run), f"job {job_id} is pending")
    ask("scontrol", "release", job_id)
    assert ended(job_id) == "FAILED"
    stand_in = checkout / "rlt_dist" / "jobs" / "supervise.py"
    stand_in.write_text("raise SystemExit('changed since')")
    (run / "jobs" / "status").write_text("0")
    is_one_error(command("resume", run, "train.seed=3"), "keeps its configuration")
    code, out, err = command("resume", run, "--nodes", 2, "--time", "2:00:00")
    assert code == 0, err
    found = shown(out.strip())
    assert found["TimeLimit"] == "02:00:00"
    assert found["NumNodes"] in ("2", "2-2")
    assert ended(out.strip()) == "COMPLETED"
    first, second = run / "jobs" / "0001", run / "jobs" / "0002"
    assert "as submitted" in (second / "output.log").read_text()
    for name in ("config.yaml", "revision.txt"):
        assert (first / name).read_bytes() == (second / name).read_bytes()
    assert "seed: 9" in (second / "config.yaml").read_text()


def test_dependencies_pass_through(submit: Any, run: Path) -> None:
    def other(name: str, *wish: object) -> str:
        return submit(f"run_folder={run.parent}/{name}", *wish)

    bad = run.parent / "bad" / "jobs"
    bad.mkdir(parents=True)
    (bad / "status").write_text("1")
    failing = other("bad")
    after = other("after", "--dependency", f"afternotok:{failing}")
    never = other("never", "--dependency", f"afterok:{failing}", "--kill-on-invalid-dep=yes")
    chained = submit("--dependency", f"afterany:{failing}", f"run_folder={run.parent}/bad")
    assert (ended(failing), ended(after), ended(chained)) == ("FAILED", "COMPLETED", "FAILED")
    assert ended(never) == "CANCELLED"
    assert wait_for(run.parent / "never", "cancelled").step == 0


def test_logs_follow_a_job_from_before_it_starts_to_its_end(submit: Any, run: Path) -> None:
    job_id = submit("--hold")
    said: list[Any] = []
    program = [sys.executable, "-m", "rlt_dist", "logs", "--follow", run]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    following = threading.Thread(
        target=lambda: said.append(
            subprocess.run(
                program, env=environment, capture_output=True, text=True, timeout=100, check=False
            )
        )
    )
    following.start()
    ask("scontrol", "release", job_id)
    following.join()
    assert said[0].returncode == 0, said[0].stderr
    assert said[0].stdout == (run / "jobs" / "0001" / "output.log").read_text()
    assert said[0].stdout.endswith("the end\n")


def test_a_requeued_job_goes_on_in_the_same_log(submit: Any, run: Path) -> None:
    (run / "jobs").mkdir(parents=True)
    (run / "jobs" / "hold").touch()
    job_id = submit()
    wait_for(run, "running")
    log = run / "jobs" / "0001" / "output.log"
    deadline = time.monotonic() + PATIENCE
    while not (log.is_file() and log.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    ask("scontrol", "requeue", job_id)
    (run / "jobs" / "hold").unlink()
    wait_for(run, "pending")
    assert ended(job_id) == "COMPLETED"
    assert log.read_text().count("as submitted") == 2
    assert status_of(run).restarts == 1


def test_a_folder_of_any_name_can_be_submitted(submit: Any, run: Path) -> None:
    odd = run.parent / "it's 100% $HOME #1"
    job_id = submit(f'run_folder="{odd}"')
    assert ended(job_id) == "COMPLETED"
    assert "the end" in (odd / "jobs" / "0001" / "output.log").read_text()


def test_a_job_waits_for_a_node_that_is_down(command: Any, nodes: Any, run: Path) -> None:
    def four(*wish: object) -> tuple[int, str, str]:
        return command("submit", run.parent / "run.yaml", "--nodes", 4, *wish)

    nodes.kill("n3")
    ask("scontrol", "update", "NodeName=n3", "State=DOWN", "Reason=test")
    try:
        code, _, err = four()
        assert code == 0, err
        assert "Slurm cannot start it while n3 is down; it will wait" in err
        assert status_of(run).state == "pending"
        assert command("cancel", run)[0] == 0
        code, _, err = four("-c", 17)  # no node will ever do
        assert code == 2
        assert "sbatch refuses" in err
    finally:
        nodes.revive("n3")


def test_without_the_programs_of_slurm_runs_can_still_be_looked_at(
    command: Any, submit: Any, run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job_id = submit()
    assert ended(job_id) == "COMPLETED"
    (tmp_path / "programs").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "programs"))
    assert shutil.which("squeue") is None
    assert "unknown (squeue is not installed here" in command("status", run)[1]
    assert "the end" in command("logs", run)[1]
