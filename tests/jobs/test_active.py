"""`rlt-dist cancel`: which of a run's jobs are told what, and that they obey."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from rlt_dist.jobs.active import active_jobs
from rlt_dist.jobs.batch import Slurm, batch_of
from rlt_dist.jobs.job import Job, Start, Submitted, write_record
from rlt_dist.util.signals import Signals

NODES = {"SLURM_JOB_NODELIST": "n1"}
ARRAY = {"SLURM_JOB_ID": "12", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3"}
ENDED = Start(
    job_id="12_3",
    nodes=("n1",),
    mesh="1x1x1",
    began=1,
    ended=2,
    from_step=0,
    to_step=1,
    how="stopped",
)


def submitted(run: Path, *job_ids: str) -> Path:
    """The folder of a run with jobs of these ids."""
    for number, job_id in enumerate(job_ids, start=1):
        folder = run / "jobs" / f"{number:04}"
        folder.mkdir(parents=True)
        job = Job(run_folder=run, directory=run.parent, nodes=1, nodes_min=1, processes=1)
        write_record(folder / "job.json", job)
        write_record(folder / "submitted.json", Submitted(job_id=job_id, when=time.time()))
    return run


def test_who_runs_is_told_to_save_and_a_failure_keeps_nobody_from_being_cancelled(
    command: Any, stand_in: Any, tmp_path: Path
) -> None:
    stand_in("squeue", 'echo "1|PENDING|0|Priority|"; echo "2|COMPLETED|0||"; echo "3|RUNNING|0||"')
    called = stand_in("scancel", 'case "$*" in 1) echo "scancel: error: no" >&2; exit 1; esac')
    runs = [submitted(tmp_path / f"run-{job_id}", job_id) for job_id in ("1", "2", "3")]
    code, out, err = command("cancel", *runs)
    assert code == 2
    assert out == (
        f"{runs[2]}: job 3, which was running, saves and ends; `scancel 3` kills it if it does "
        "not\n"
    )
    refused, nothing = err.splitlines()
    assert "scancel refuses: no" in refused
    assert f"{runs[1]}: nothing to cancel, it is lost: Slurm says COMPLETED" in nothing
    assert called.read_text().splitlines() == ["1", "--batch --signal=USR1 3"]
    marked = [(run / "jobs" / "0001" / "cancelled.json").exists() for run in runs]
    assert marked == [True, False, True]


def test_the_mark_is_there_before_a_job_is_told(
    command: Any, stand_in: Any, tmp_path: Path
) -> None:
    """Else it could decide to be requeued in between."""
    run = submitted(tmp_path / "run", "1")
    stand_in("squeue", 'echo "1|RUNNING|0||"')
    stand_in("scancel", f"test -f {run}/jobs/0001/cancelled.json")
    assert command("cancel", run)[0] == 0


def test_a_job_and_those_that_wait_for_its_end_are_cancelled_the_last_one_first(
    command: Any, stand_in: Any, tmp_path: Path
) -> None:
    stand_in(
        "squeue", 'echo "2|RUNNING|0||"; echo "3_1|PENDING|0|Dependency|"; echo "1|FAILED|0||"'
    )
    called = stand_in("scancel")
    run = submitted(tmp_path / "run", "1", "2", "3_1")
    assert [job.job_id for job in active_jobs(run)] == ["2", "3_1"]
    code, out, _ = command("cancel", run)
    assert (code, len(out.splitlines())) == (0, 2)
    assert called.read_text().splitlines() == ["3_1", "--batch --signal=USR1 2"]


def controller(reason: str, restarts: Path) -> str:
    """A scontrol whose job is completing on n1, and excludes n5; its restarts are in a file."""
    known = f"JobState=COMPLETING Reason={reason} ExcNodeList=n5 Restarts=$(cat {restarts})"
    answers = f'show*) echo n1;; *job*) echo "{known}";; requeue*) echo 1 > {restarts}'
    return f'case "$*" in {answers};; esac'


@pytest.fixture
def restarts(tmp_path: Path) -> Path:
    (tmp_path / "restarts").write_text("0")
    return tmp_path / "restarts"


def test_a_task_of_an_array_speaks_for_itself_alone(
    stand_in: Any, restarts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of one task, the last to begin, is that of the whole array."""
    called = stand_in("scontrol", controller("None", restarts))
    monkeypatch.setattr("signal.signal", lambda *_: None)
    batch, alone = Slurm(tmp_path, NODES | ARRAY), Slurm(tmp_path, NODES | {"SLURM_JOB_ID": "12"})
    assert (batch.job_id, batch.meeting, alone.job_id) == ("12_3", alone.meeting, "12")
    assert batch.unwanted(ENDED) == "cancelled"  # it completes, and nobody has requeued it
    assert batch.requeue(["n9"])
    assert batch.unwanted(ENDED) is None
    words = called.read_text().split()
    assert {word for word in words if "12" in word} == {"12_3", "JobId=12_3"}
    assert "update JobId=12_3 ExcNodeList=n5,n9" in called.read_text()


def test_who_was_cancelled_is_not_wanted_whatever_slurm_says(
    stand_in: Any, restarts: Path, tmp_path: Path
) -> None:
    stand_in("scontrol", controller("TimeLimit", restarts))
    batch = Slurm(tmp_path, NODES | ARRAY)
    assert batch.unwanted(ENDED) is None
    (tmp_path / "cancelled.json").write_text('{"when": 1}')
    assert batch.unwanted(ENDED) == "cancelled"


def test_a_job_whose_id_nobody_wrote_down_does_so(stand_in: Any, tmp_path: Path) -> None:
    stand_in("scontrol", "echo n1")
    environment = NODES | ARRAY
    assert batch_of(tmp_path, Signals(), environment).job_id == "12_3"
    assert json.loads((tmp_path / "submitted.json").read_text())["job_id"] == "12_3"
