"""`rlt-dist status`, `logs`, `cancel`, `resume`: what they say of runs, whoever started them."""

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlt_dist.jobs.job import Begun, Job, Start, Submitted, add_start, write_record
from rlt_dist.jobs.status import run_folders, status_of
from rlt_dist.util.lock import holder, locked


@pytest.fixture
def trained(configure: Any, command: Any, tmp_path: Path) -> Path:
    """The folder of a run that was trained in a shell, to its end."""
    config = configure(tmp_path, "rlt1", "train.steps=3")
    assert command("train", tmp_path / "run.yaml")[0] == 0
    return config.run_folder


@pytest.fixture
def submitted(tmp_path: Path) -> Path:
    """The folder of a run whose first job is Slurm's 1234; its ranks have not begun."""
    run = tmp_path / "submitted"
    folder = run / "jobs" / "0001"
    folder.mkdir(parents=True)
    job = Job(run_folder=run, directory=tmp_path, nodes=2, nodes_min=1, processes=4)
    write_record(folder / "job.json", job)
    (folder / "config.yaml").write_text("train: {steps: 500}\n")
    write_record(folder / "submitted.json", Submitted(job_id="1234", when=time.time()))
    return run


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """`slurm(line)`: what squeue prints of all jobs; scancel writes down what it is given."""
    programs = tmp_path / "programs"
    programs.mkdir()
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    said = programs / "said"
    said.touch()
    for name, does in (("squeue", f"cat {said}"), ("scancel", f'echo "$@" >> {said}.cancelled')):
        (programs / name).write_text(f"#!/bin/sh\n{does}\n")
        (programs / name).chmod(0o755)
    return lambda line: void(said.write_text(line))


def void(_: object) -> None:
    return None


def start(how: Any = "failed", **facts: Any) -> Start:
    known = {"job_id": "1234", "nodes": ("n1", "n2"), "mesh": "8x1x1", "began": time.time()}
    known |= {"ended": time.time(), "from_step": 0, "to_step": 0}
    return Start(**known | facts, how=how)


def test_a_run_that_was_never_submitted(
    command: Any, is_one_error: Any, strict_json: Any, trained: Path
) -> None:
    found = strict_json(command("status", trained, "--json")[1])
    assert (found["state"], found["job_id"], found["restarts"]) == ("finished", None, 0)
    assert (found["step"], found["steps"], found["checkpoint"]) == (3, 3, 3)
    assert found["tokens_per_second"] > 0
    assert found["loss"] > 0
    code, out, _ = command("status", trained)
    assert code == 0
    for shown in ("finished", "3 of 3", "3, 0 s ago"):
        assert shown in out
    is_one_error(command("cancel", trained), "nothing to cancel, it is finished")
    is_one_error(command("resume", trained), "never submitted; `rlt-dist submit")
    is_one_error(command("resume", trained / "x"), "no such folder")
    is_one_error(command("status", trained.parent), "is no run folder")


def test_a_run_that_is_at_work_in_a_shell(command: Any, is_one_error: Any, trained: Path) -> None:
    (trained / "ended.json").unlink()
    assert status_of(trained).state == "lost"
    with locked(trained, "trains"):
        status = status_of(trained)
        assert (status.state, status.active) == ("running", True)
        assert status.why == f"process {os.getpid()} on {os.uname().nodename} trains here"
        is_one_error(command("cancel", trained), "trains here; stop it there with Ctrl-C")
    (trained / "ended.json").write_text('{"how": "stopped", "step": 3, "why": "was sent SIGTERM"}')
    status = status_of(trained)
    assert (status.state, status.why, status.active) == ("stopped", "was sent SIGTERM", False)


def test_who_only_looks_keeps_nobody_from_a_folder(tmp_path: Path) -> None:
    with locked(tmp_path, "trains"):
        pass
    ended = threading.Event()

    def look() -> None:
        while not ended.is_set():
            holder(tmp_path)
            time.sleep(0.001)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        for _ in range(200):
            with locked(tmp_path, "trains"):
                assert holder(tmp_path)
    finally:
        ended.set()
        looking.join()
    assert holder(tmp_path) is None


SAID = {
    "pending": ("1234|PENDING|0|Resources|\n", "Resources", True),
    "running": ("1234|RUNNING|2|None|\n", None, True),
    "completing": ("1234|COMPLETING|0|None|\n", None, True),
    "timeout": ("1234|TIMEOUT|0|TimeLimit|\n", None, False),
    "cancelled": ("1234|CANCELLED|0|None|\n", None, False),
    "lost": ("", None, False),
}


@pytest.mark.parametrize("state", SAID)
def test_slurm_says_what_became_of_a_job(slurm: Any, submitted: Path, state: str) -> None:
    said, why, active = SAID[state]
    slurm(said)
    status = status_of(submitted)
    assert (status.state, status.why, status.active) == (state, why, active)
    assert (status.step, status.steps) == (0, 500)
    assert status.restarts == (2 if state == "running" else 0)


@pytest.mark.parametrize("how", ["finished", "stopped", "guard", "mistake", "failed", "sick"])
def test_a_job_that_slurm_has_forgotten_ended_as_was_written_down(
    slurm: Any, submitted: Path, how: Any
) -> None:
    slurm("")
    add_start(submitted / "jobs" / "0001", start("failed", why="before"))
    add_start(submitted / "jobs" / "0001", start(how, why="as it is", idle=2))
    status = status_of(submitted)
    assert (status.state, status.why, status.restarts) == (how, "as it is", 1)
    assert (status.mesh, status.idle, status.active) == ("8x1x1", 2, False)


def test_without_an_answer_only_what_is_final_is_said(
    submitted: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    status = status_of(submitted)
    assert status.state == "unknown"
    assert status.why == (
        "squeue is not installed here; go to a machine of the cluster, or run with --local"
    )
    add_start(submitted / "jobs" / "0001", start("failed"))
    assert status_of(submitted).state == "unknown"
    add_start(submitted / "jobs" / "0001", start("finished"))
    assert status_of(submitted).state == "finished"


def test_how_a_run_ended_before_says_nothing_of_its_new_job(slurm: Any, submitted: Path) -> None:
    slurm("")
    ended = submitted / "ended.json"
    ended.write_text('{"how": "guard", "step": 3, "why": "before"}')
    os.utime(ended, (time.time() - 100,) * 2)
    assert status_of(submitted).state == "lost"


def test_a_cancelled_job_is_cancelled_also_once_slurm_has_forgotten_it(
    command: Any, slurm: Any, submitted: Path, tmp_path: Path
) -> None:
    slurm("1234|PENDING|0|Priority|\n")
    code, out, _ = command("cancel", submitted)
    assert (code, out) == (0, f"{submitted}: job 1234, which was pending, is cancelled\n")
    assert (tmp_path / "programs" / "said.cancelled").read_text() == "1234\n"
    slurm("")
    assert status_of(submitted).state == "cancelled"
    add_start(submitted / "jobs" / "0001", start("stopped"))
    assert status_of(submitted).state == "cancelled"
    add_start(submitted / "jobs" / "0001", start("finished"))
    assert status_of(submitted).state == "finished"


def test_the_start_that_is_at_work_counts(slurm: Any, submitted: Path) -> None:
    slurm("1234|RUNNING|0|None|\n")
    begun = Begun(job_id="1234", nodes=("n1",), mesh="4x1x1", began=1.0, from_step=7, idle=4)
    write_record(submitted / "jobs" / "0001" / "running.json", begun)
    status = status_of(submitted)
    assert (status.mesh, status.idle, status.restarts) == ("4x1x1", 4, 0)


def test_all_runs_below_a_folder_are_found(
    command: Any, monkeypatch: pytest.MonkeyPatch, slurm: Any, submitted: Path, trained: Path
) -> None:
    slurm("1234|PENDING|0|None|\n")
    home = submitted.parent
    (home / "runs" / "study").mkdir(parents=True)
    trained.rename(home / "runs" / "a")
    submitted.rename(home / "runs" / "study" / "b")
    (home / "runs" / "corpus").mkdir()
    assert [path.name for path in run_folders(home / "runs")] == ["a", "b"]
    monkeypatch.chdir(home)
    _, out, _ = command("status")
    assert "runs/a" in out
    assert "runs/study/b" in out


def test_a_job_that_waits_or_runs_is_not_submitted_again(
    command: Any, is_one_error: Any, slurm: Any, submitted: Path, configure: Any
) -> None:
    slurm("1234|PENDING|0|None|\n")
    configure(submitted.parent)
    said = command("submit", submitted.parent / "run.yaml", f"run_folder={submitted}", "--dry-run")
    is_one_error(said, "job 1234 is pending; `rlt-dist cancel")


def test_logs_are_the_jobs_or_a_ranks(
    command: Any, is_one_error: Any, slurm: Any, submitted: Path, trained: Path
) -> None:
    slurm("")
    is_one_error(command("logs", submitted), "output.log: is not there")
    (submitted / "jobs" / "0001" / "output.log").touch()
    code, _, said = command("logs", submitted)
    assert code == 1
    assert "output.log: is empty, job 1234 printed nothing; `sacct --jobs=1234`" in said
    (submitted / "jobs" / "0001" / "output.log").write_bytes(b"one\n\xff\n")
    (trained / "logs").mkdir(exist_ok=True)
    for rank in range(2):
        (trained / "logs" / f"rank-{rank:05}.log").write_text(f"rank {rank}\n")
    assert command("logs", submitted)[1] == "one\n\ufffd\n"
    assert command("logs", trained)[1] == "rank 0\n"
    assert command("logs", trained, "--rank", 1)[1] == "rank 1\n"
    is_one_error(command("logs", trained, "--rank", 9), "rank-00009.log: is not there")


DAMAGE = {
    "jobs/0001/submitted.json": '{"job_id": "12',
    "jobs/0001/running.json": "\x00" * 40,
    "jobs/0001/starts.jsonl": '{"job_id": "1234"}\n',
    "metrics.jsonl": "{}\nloss\n",
    "config.yaml": "train: [",
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_record_is_named_and_other_runs_are_shown(
    command: Any,
    is_one_error: Any,
    strict_json: Any,
    slurm: Any,
    submitted: Path,
    trained: Path,
    name: str,
) -> None:
    slurm("1234|PENDING|0|None|\n")
    (submitted / name).write_text(DAMAGE[name])
    code, out, _ = command("status", submitted, trained, "--json")
    assert code == 0
    damaged, whole = map(strict_json, out.splitlines())
    assert (damaged["state"], whole["state"]) == ("damaged", "finished")
    assert str(submitted / name) in damaged["why"]
    code, out, _ = command("status", submitted, trained)
    assert code == 0
    assert "damaged" in out
    cancelled = command("cancel", submitted)
    if name.endswith("submitted.json"):
        is_one_error(cancelled, "is damaged", str(submitted / name))
    else:
        assert cancelled[0] == 0


def test_a_damaged_job_is_not_resumed(command: Any, is_one_error: Any, submitted: Path) -> None:
    job = submitted / "jobs" / "0001"
    (job / "job.json").write_text("{")
    is_one_error(command("resume", submitted), f"{job}/job.json: is damaged; remove {job}")


def test_a_start_that_follows_one_half_written_is_remembered(slurm: Any, submitted: Path) -> None:
    """The supervisor was killed as it wrote."""
    slurm("")
    job = submitted / "jobs" / "0001"
    (job / "starts.jsonl").write_text(start("failed").model_dump_json()[:60])
    add_start(job, start("stopped", why="as it is"))
    assert (status_of(submitted).state, status_of(submitted).why) == ("stopped", "as it is")


def test_metrics_cut_short_by_a_kill_are_read_up_to_there(submitted: Path, slurm: Any) -> None:
    slurm("")
    whole = json.dumps({"step": 4, "loss": 1.5, "tokens_per_second": 9.0})
    (submitted / "metrics.jsonl").write_text(f'{whole}\n{{"step": 5, "lo')
    status = status_of(submitted)
    assert (status.step, status.loss, status.tokens_per_second) == (4, 1.5, 9.0)
