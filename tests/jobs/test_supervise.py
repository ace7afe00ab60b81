"""A job from its first start to its end, without a batch system and without training."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rlt_dist.config.run import RunConfig
from rlt_dist.jobs.health import Report
from rlt_dist.jobs.job import (
    CONFIG,
    JOB,
    RUNNING,
    SUBMITTED,
    Begun,
    Job,
    Start,
    Submitted,
    starts,
    write_record,
)
from rlt_dist.jobs.launchers import Launch
from rlt_dist.jobs.supervise import supervise
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
    wanted: bool = True
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

    def wants(self, _: Start) -> bool:
        return self.wanted

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


def test_where_all_nodes_are_sick_it_is_not_the_nodes(job: Path) -> None:
    every = dict.fromkeys(range(3), ("n0", "n1"))
    batch = Played(job, [], sick=every)
    assert supervise(job, batch, Signals()) == 1
    assert [start.how for start in starts(job)] == ["failed"] * 3
    assert batch.left_out == [(), ()]


def test_a_cancelled_job_is_not_requeued(job: Path) -> None:
    batch = Played(job, [("failed", 2)], wanted=False)
    assert supervise(job, batch, Signals()) == 1
    assert batch.left_out == []


def test_a_start_that_nobody_saw_end_counts(job: Path) -> None:
    """The node of the job's script is lost, again and again."""
    plays = [("stopped", 0)]
    for status in (75, 1):
        begun = Begun(job_id="7", nodes=("n0",), mesh="1x1x1", began=1, from_step=0)
        write_record(job / RUNNING, begun)
        assert supervise(job, Played(job, plays, queue=True), Signals()) == status
    assert [start.how for start in starts(job)] == ["failed", "stopped", "failed"]
    assert "no word of its end: node n0 was lost" in (next(starts(job)).why or "")


def test_a_job_of_this_machine_goes_on_after_a_failure_and_stops_when_asked(
    job: Path, configure: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """The real thing: ranks that train, under torchrun."""
    config = configure(tmp_path, "rlt1", "train.steps=2000", "checkpoint.every=2")
    (job / CONFIG).write_text(config.to_yaml())
    write_record(job / SUBMITTED, Submitted(job_id="local", when=time.time()))
    asked = {"run_folder": config.run_folder, "directory": tmp_path, "in_job_restarts": 0}
    write_record(job / JOB, Job(**asked, nodes=1, nodes_min=1, processes=1))
    process = subprocess.Popen(
        [sys.executable, "-m", "rlt_dist.jobs.supervise", str(job)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        wait_for_step(config.run_folder, 4)
        for rank in ranks_of(job):
            os.kill(rank, signal.SIGKILL)
        while len(list(starts(job))) < 1:
            time.sleep(0.05)
        wait_for_step(config.run_folder, next(starts(job)).to_step + 3)
        process.send_signal(signal.SIGTERM)
        told, _ = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == 75, told
    assert [start.how for start in starts(job)] == ["failed", "stopped"]
    assert "was sent SIGTERM; cancelled, so not started again" in told.splitlines()[-1]
    assert ranks_of(job) == []


def wait_for_step(run_folder: Path, step: int) -> None:
    until = time.monotonic() + 100
    file = run_folder / "metrics.jsonl"
    while not file.exists() or not any(
        json.loads(line)["step"] >= step for line in file.read_text().splitlines()
    ):
        assert time.monotonic() < until
        time.sleep(0.05)


def ranks_of(folder: Path) -> list[int]:
    """The processes that train the run of a job."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if str(folder / CONFIG).encode() in words and b"torch.distributed.run" not in words:
            found.append(int(path.name))
    return found
