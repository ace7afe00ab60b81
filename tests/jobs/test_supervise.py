"""A job from its first start to its end, without a batch system and without training."""

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rlt_dist.checkpoint.run_folder import METRICS
from rlt_dist.config.run import RunConfig
from rlt_dist.jobs.active import cancel
from rlt_dist.jobs.health import Report
from rlt_dist.jobs.job import (
    CANCELLED,
    CONFIG,
    JOB,
    RUNNING,
    SUBMITTED,
    Begun,
    Cancelled,
    Job,
    Start,
    Submitted,
    read_record,
    starts,
    write_record,
)
from rlt_dist.jobs.launchers import Launch
from rlt_dist.jobs.status import status_of
from rlt_dist.jobs.supervise import supervise
from rlt_dist.jobs.template import render
from rlt_dist.util.errors import UserError
from rlt_dist.util.records import read_records
from rlt_dist.util.signals import Signals

PLAYED = """
import json, os, sys
from pathlib import Path
from rlt_dist.checkpoint.manifest import Facts, Manifest, folder_name, write_manifest
run, how, step = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
if step:
    (run / "checkpoints" / folder_name(step)).mkdir(parents=True)
    none = dict(tokenizer="", corpus="", identity={}, mesh="1x1x1", engine="torch")
    facts = Facts(step=step, tokens=1, **none)
    manifest = Manifest(facts=facts, tensor_bytes=0, files={})
    write_manifest(run / "checkpoints" / folder_name(step), manifest)
ended = {"how": how, "step": step, "why": "played", "start": os.environ["RLT_DIST_START"]}
(run / "ended.json").write_text(json.dumps(ended))
"""
"""Ranks that end as they are told to, with a checkpoint of a step if it is not 0."""


@dataclass
class Played:
    """A batch system whose nodes and ranks do as they are told.

    Attributes:
        plays: what each start does: how it ends, and the step that it saves.
        sick: by start, nodes that say that they are unwell.
        queue: it requeues; the nodes that it was to leave out.
    """

    folder: Path
    plays: list[tuple[str, int]]
    sick: dict[int, tuple[str, ...]] = field(default_factory=dict)
    queue: bool = False
    nodes: tuple[str, ...] = ("n0", "n1")
    job_id: str = "7"
    meeting: tuple[str, int] = ("127.0.0.1", 0)
    cancelled: bool = False
    left_out: list[tuple[str, ...]] = field(default_factory=list)
    begun: int = 0

    def once_a_node(self, program: Sequence[str]) -> Sequence[str]:
        assert program[2] == "rlt_dist.jobs.health"
        unwell = self.sick.get(self.begun, ())
        self.begun += 1
        lines = [
            Report(
                node=node,
                devices=0,
                clock=1.0,
                own="is unwell" if node in unwell else None,
                meeting=None,
            ).model_dump_json()
            for node in self.nodes
        ]
        return [sys.executable, "-c", f"print({chr(10).join(lines)!r})"]

    def ranks(
        self, program: Sequence[str], places: Sequence[int], restarts: int, shutdown: int
    ) -> Launch:
        assert (list(places), restarts, shutdown) == ([1, 1], 3, 120)
        assert program[-3:] == ["mesh.data=2", "mesh.pipeline=1", "mesh.tensor=1"]
        how, step = self.plays.pop(0)
        run = str(self.folder.parents[1])
        return Launch((sys.executable, "-c", PLAYED, run, how, str(step)))

    def unwanted(self, _: Start) -> str | None:
        return "cancelled" if self.cancelled else None

    def requeue(self, without: Sequence[str]) -> bool:
        self.left_out.append(tuple(without))
        return self.queue


@pytest.fixture
def job(configure: Callable[..., RunConfig], tmp_path: Path) -> Path:
    """A job's folder."""
    config = configure(tmp_path)
    folder = config.run_folder / "jobs" / "0001"
    folder.mkdir(parents=True)
    (folder / CONFIG).write_text(config.to_yaml())
    asked = {"run_folder": config.run_folder, "directory": tmp_path}
    write_record(folder / JOB, Job(**asked, nodes=2, nodes_min=1, processes=1))
    return folder


def history(folder: Path) -> list[tuple[str, int, int]]:
    return [(start.how, start.from_step, start.to_step) for start in starts(folder)]


@pytest.mark.parametrize(
    ("plays", "status"),
    [
        ([("finished", 5)], 0),
        ([("failed", 2), ("failed", 0), ("stopped", 3), ("finished", 5)], 0),
        ([("failed", 2), ("failed", 0), ("failed", 0), ("failed", 0)], 1),
        ([("stopped", 2), ("mistake", 0)], 2),
        ([("guard", 2)], 2),
    ],
)
def test_ranks_are_started_again_while_that_makes_sense(
    job: Path, plays: list[tuple[str, int]], status: int
) -> None:
    batch = Played(job, list(plays))
    assert supervise(job, batch, Signals()) == status
    assert batch.plays == []
    assert [how for how, _, _ in history(job)] == [how for how, _ in plays]
    assert not (job / RUNNING).exists()
    came_to = 0
    for (_, before, after), (_, step) in zip(history(job), plays, strict=True):
        assert before == came_to
        came_to = step or came_to
        assert after == came_to


def test_where_there_is_a_queue_each_start_is_a_run_of_the_script(job: Path) -> None:
    plays = [("failed", 2), ("finished", 5)]
    assert supervise(job, Played(job, plays, queue=True), Signals()) == 75
    assert supervise(job, Played(job, plays, queue=True), Signals()) == 0
    assert history(job) == [("failed", 0, 2), ("finished", 2, 5)]
    unused = Played(job, [])
    assert supervise(job, unused, Signals()) == 0  # the queue's mistake: there is nothing to do
    assert unused.begun == 0


def test_a_sick_node_is_left_out(job: Path, capfd: pytest.CaptureFixture[str]) -> None:
    batch = Played(job, [], sick={0: ("n1",)}, queue=True)
    assert supervise(job, batch, Signals()) == 75
    assert batch.left_out == [("n1",)]
    (start,) = starts(job)
    assert (start.how, start.why, start.sick) == ("sick", "n1: is unwell", ("n1",))
    assert "job 7: sick at step 0: n1: is unwell" in capfd.readouterr().out


def test_a_node_that_hangs_is_named_and_not_waited_for(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ignores signals, and a child of it holds what it prints to."""
    monkeypatch.setattr("rlt_dist.jobs.supervise.LIMIT", 1.0)
    monkeypatch.setattr("rlt_dist.jobs.ranks._LEAVE", 0.2)
    batch = Played(job, [], queue=True)
    answer = Report(node="n0", devices=0, clock=1.0, own=None, meeting=None).model_dump_json()
    hangs = f"echo '{answer}'; trap '' TERM; setsid sleep 20 & wait; sleep 20"
    monkeypatch.setattr(batch, "once_a_node", lambda _: ["bash", "-c", hangs])
    began = time.monotonic()
    assert supervise(job, batch, Signals()) == 75
    assert time.monotonic() - began < 15
    assert batch.left_out == [("n1",)]
    assert next(starts(job)).why == "n1: gave no answer"


def test_a_jobs_only_node_is_named_and_left_out_too(job: Path) -> None:
    batch = Played(job, [], sick={0: ("n0",)}, queue=True, nodes=("n0",))
    assert supervise(job, batch, Signals()) == 75
    assert batch.left_out == [("n0",)]
    (start,) = starts(job)
    assert (start.how, start.why) == ("sick", "n0: is unwell")


def test_gpus_that_were_asked_for_and_are_nowhere_are_missed(job: Path) -> None:
    asked = read_record(job / JOB, Job)
    write_record(job / JOB, asked.model_copy(update={"gpus": 8, "attempts": 1}))
    assert supervise(job, Played(job, []), Signals()) == 1
    assert next(starts(job)).why == "n0: has 0 of 8 GPUs; n1: has 0 of 8 GPUs"


def test_a_launcher_that_is_not_there_is_a_mistake_and_leaves_no_start_at_work(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = Played(job, [])
    monkeypatch.setattr(batch, "ranks", lambda *_: Launch(("mpirun-of-mine",)))
    assert supervise(job, batch, Signals()) == 2
    assert not (job / RUNNING).exists()
    (start,) = starts(job)
    assert (start.how, start.why) == ("mistake", "mpirun-of-mine is not installed here")


def test_where_all_nodes_are_sick_it_is_not_the_nodes(job: Path) -> None:
    every = dict.fromkeys(range(3), ("n0", "n1"))
    batch = Played(job, [], sick=every)
    assert supervise(job, batch, Signals()) == 1
    assert [start.how for start in starts(job)] == ["failed"] * 3
    assert batch.left_out == [(), ()]


def test_a_cancelled_job_is_not_requeued(job: Path) -> None:
    batch = Played(job, [("failed", 2)], cancelled=True)
    assert supervise(job, batch, Signals()) == 1
    assert batch.left_out == []


@pytest.mark.parametrize("begun", [False, True])
def test_a_job_that_was_cancelled_while_it_waited_starts_nothing(job: Path, begun: bool) -> None:
    if begun:
        assert supervise(job, Played(job, [("stopped", 2)], queue=True), Signals()) == 75
    write_record(job / CANCELLED, Cancelled(when=1))
    batch = Played(job, [("finished", 5)])
    assert supervise(job, batch, Signals()) == 75
    assert batch.begun == 0


def test_a_start_that_nobody_saw_end_counts(job: Path) -> None:
    """The node of the job's script is lost, again and again."""
    plays = [("stopped", 0)]
    for status in (75, 1):
        begun = Begun(job_id="7", nodes=("n0",), mesh="1x1x1", began=1, from_step=0)
        write_record(job / RUNNING, begun)
        assert supervise(job, Played(job, plays, queue=True), Signals()) == status
    assert [start.how for start in starts(job)] == ["failed", "stopped", "failed"]
    assert "no word of its end: node n0 was lost" in (next(starts(job)).why or "")


def test_a_start_that_a_full_disk_does_not_take_is_decided_on_and_counted_by_the_next(
    job: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def full(folder: Path, _: Start) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(folder / "starts.jsonl"))

    batch = Played(job, [("failed", 2), ("finished", 5)], queue=True)
    with monkeypatch.context() as patched:
        patched.setattr("rlt_dist.jobs.supervise.add_start", full)
        assert supervise(job, batch, Signals()) == 75
    assert batch.left_out == [()]
    said = f"rlt-dist: {job}/starts.jsonl: No space left on device; make room\n"
    assert capfd.readouterr().err.endswith(said)
    assert supervise(job, batch, Signals()) == 0
    assert [how for how, _, _ in history(job)] == ["failed", "finished"]


def test_a_start_that_cannot_be_written_down_is_not_made(job: Path) -> None:
    """Nobody would count it."""
    write_record(job / SUBMITTED, Submitted(job_id="local", when=1))
    (job / f".{RUNNING}.partial").symlink_to("/dev/full")
    process = supervisor_of(job)
    told, _ = process.communicate(timeout=100)
    assert process.returncode == 1
    assert told == f"rlt-dist: error: {job / RUNNING}: No space left on device; make room\n"


CONTROLLER = """case "$2" in
hostnames) echo n0; echo n1;;
*) echo JobState=RUNNING Restarts=0 Reason=None;;
esac
grep SigBlk /proc/self/status >&2"""


def test_a_signal_before_the_script_has_come_to_its_last_line_is_kept(
    job: Path, repository: Path, stand_in: Callable[..., Path]
) -> None:
    """And held back from nothing that is started after that."""
    called = stand_in("scontrol", CONTROLLER.replace(">&2", f">> {job}/masks"))
    stand_in("srun")
    text = render(repository / "slurm" / "train.sbatch", job, read_record(job / JOB, Job))
    marks = "# What your site needs"
    assert marks in text
    (job / "job.sbatch").write_text(text.replace(marks, f"touch {job}/loads; sleep 1\n{marks}"))
    environment = os.environ | {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "n[0-1]"}
    process = subprocess.Popen(["bash", str(job / "job.sbatch")], env=environment)
    wait_until((job / "loads").exists)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(timeout=60) == 75
    (start,) = starts(job)
    assert (start.how, start.to_step) == ("stopped", 0)
    assert start.why == "stopped before the first step: was sent SIGUSR1"
    assert "requeue 12" in called.read_text()
    assert {*(job / "masks").read_text().split()} == {"SigBlk:", "0" * 16}


@pytest.fixture
def local(job: Path, configure: Callable[..., RunConfig], tmp_path: Path) -> Path:
    """The folder of a job of this machine, whose one rank trains under torchrun."""
    config = configure(tmp_path, "rlt1", "train.steps=2000", "checkpoint.every=2")
    (job / CONFIG).write_text(config.to_yaml())
    write_record(job / SUBMITTED, Submitted(job_id="local", when=time.time()))
    asked = {"run_folder": config.run_folder, "directory": tmp_path, "in_job_restarts": 0}
    write_record(job / JOB, Job(**asked, nodes=1, nodes_min=1, processes=1))
    return job


def supervisor_of(job: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "rlt_dist.jobs.supervise", str(job)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def test_ctrl_c_while_the_node_is_examined_is_no_traceback(local: Path) -> None:
    process = supervisor_of(local)
    wait_until(lambda: processes_with(local, b"rlt_dist.jobs.health"))
    time.sleep(0.3)  # It is importing, or waits.
    os.killpg(process.pid, signal.SIGINT)
    told, _ = process.communicate(timeout=100)
    assert process.returncode == 75, told
    assert "Traceback" not in told
    assert [start.how for start in starts(local)] == ["stopped"]
    assert processes_with(local) == []


def test_ranks_whose_agent_is_killed_with_the_supervisor_end_too(local: Path) -> None:
    process = supervisor_of(local)
    wait_for_step(local.parents[1], 3)
    process.kill()
    for agent in processes_with(local, b"torch.distributed.run"):
        os.kill(agent, signal.SIGKILL)
    process.communicate(timeout=100)
    wait_until(lambda: not processes_with(local))


def test_a_job_of_this_machine_goes_on_after_a_failure_and_stops_when_cancelled(
    local: Path,
) -> None:
    """The real thing: ranks that train, under torchrun."""
    run_folder = local.parents[1]
    process = supervisor_of(local)
    try:
        wait_for_step(run_folder, 4)
        for rank in ranks_of(local):
            os.kill(rank, signal.SIGKILL)
        wait_until(lambda: list(starts(local)))
        wait_for_step(run_folder, next(starts(local)).to_step + 3)
        assert [job.runs for job in cancel(run_folder)] == [True]
        told, _ = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == 75, told
    assert [start.how for start in starts(local)] == ["failed", "stopped"]
    assert "was sent SIGTERM; cancelled, so not started again" in told.splitlines()[-1]
    assert processes_with(local) == []
    assert status_of(run_folder).state == "cancelled"
    with pytest.raises(UserError, match="nothing to cancel, it is cancelled"):
        cancel(run_folder)


def wait_until(holds: Callable[[], object]) -> None:
    until = time.monotonic() + 100
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.05)


def wait_for_step(run_folder: Path, step: int) -> None:
    wait_until(lambda: any(each["step"] >= step for each in read_records(run_folder / METRICS)))


def ranks_of(folder: Path) -> list[int]:
    """The processes that train the run of a job."""
    agents = processes_with(folder, b"torch.distributed.run")
    return [process for process in processes_with(folder, b"train") if process not in agents]


def processes_with(folder: Path, word: bytes = b"") -> list[int]:
    """Those whose command line has a word, and something in a job's folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if word in words and any(str(folder).encode() in each for each in words):
            found.append(int(path.name))
    return found
