"""A job on a real Slurm goes on after whatever ended it, and comes out as if nothing had."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from rlt_dist.config.run import RunConfig
from rlt_dist.jobs.active import cancel
from rlt_dist.jobs.freeze import PACKAGE
from rlt_dist.jobs.job import CODE, CONFIG, OUTPUT, Job, Start, starts
from rlt_dist.jobs.plan import Room
from rlt_dist.jobs.submit import Wanted, make_ready, submit

REPOSITORY = Path(__file__).parents[2]
FIRST_TWO = "--exclude=n2,n3"
PATIENCE = 240  # seconds
STEPS, EVERY, LONG = 40, 8, 300
TROUBLE = "trouble.txt"

SLOWLY = """

_at_once = learning_rate


def learning_rate(config, step):
    import time

    time.sleep({pause})
    {fault}
    return _at_once(config, step)
"""
"""What is added to the job's own copy of train/schedule.py, so that there is time to disturb it."""

pytestmark = pytest.mark.timeout(900)


@dataclass
class Case:
    """A run that is submitted as a job, and what is done to it."""

    cluster: dict[str, str]
    configure: Callable[..., RunConfig]
    template: Path
    folder: Path
    job_id: str = ""

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def job(self) -> Path:
        return self.run / "jobs" / "0001"

    def submit(
        self,
        *options: str,
        nodes: int = 2,
        nodes_min: int | None = None,
        processes: int = 1,
        overrides: tuple[str, ...] = (),
        pause: float = 0.15,
        fault: str = "",
        later: Callable[[RunConfig], RunConfig] = lambda config: config,
        **limits: Any,
    ) -> None:
        """Submit a run whose job's code takes its time, and has a fault if one is given."""
        choices = [f"train.steps={STEPS}", f"checkpoint.every={EVERY}", *overrides]
        config = self.configure(self.folder, "rlt1", *choices)
        least = nodes if nodes_min is None else nodes_min
        lasting = ["--time=9", *options]
        job = Job(
            run_folder=self.run,
            directory=self.folder,
            nodes=nodes,
            nodes_min=least,
            processes=processes,
            options=tuple(lasting),
            **limits,
        )
        wanted = Wanted(job, self.template, PACKAGE, "the tests' own\n", once=("--hold",), lead=10)
        self.job_id, _ = submit(make_ready(wanted, {0: config}, Room(nodes, least, processes)))
        with (self.job / CODE / "rlt_dist" / "train" / "schedule.py").open("a") as file:
            file.write(SLOWLY.format(pause=pause, fault=fault))
        (self.job / CONFIG).write_text(later(config).to_yaml())
        self.ask("scontrol", "release", self.job_id)

    def ask(self, *command: str) -> str:
        done = subprocess.run(
            command, env=self.cluster, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def shown(self) -> dict[str, str]:
        text = self.ask("scontrol", "--oneliner", "show", "job", self.job_id)
        return dict(re.findall(r"(\w+)=(\S*)", text))

    def until(self, true: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not true():
            assert time.monotonic() < deadline, f"{self.folder.name}: {what}: {self.told()}"
            time.sleep(0.2)

    def told(self) -> str:
        path = self.job / OUTPUT
        return path.read_text() if path.exists() else ""

    def reach(self, step: int) -> None:
        """Wait until a step is done."""
        file = self.run / "metrics.jsonl"
        self.until(
            lambda: file.exists() and f'"step": {step},' in file.read_text(), f"no step {step}"
        )

    def end(self) -> None:
        """Wait until the job is over, and remember what Slurm says of it and what it left."""
        final = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
        self.until(lambda: self.shown()["JobState"] in final, "does not end")
        deadline = time.monotonic() + 10
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.2)
        found = {"slurm": self.shown(), "left": list(left.values())}
        (self.folder / "found.json").write_text(json.dumps(found))

    def processes(self, *also: str) -> dict[int, str]:
        """The job's processes on all nodes, with their commands; those with these variables."""
        names = (f"SLURM_JOB_ID={self.job_id}", f"SLURM_CONF={self.cluster['SLURM_CONF']}", *also)
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if {name.encode() for name in names} <= set(
                    (path / "environ").read_bytes().split(b"\0")
                ):
                    command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    found[int(path.name)] = command
            except OSError:
                continue
        return found

    def kill_rank(self, rank: int) -> None:
        (process,) = [
            number
            for number, command in self.processes(f"RANK={rank}").items()
            if " train " in command
        ]
        os.kill(process, signal.SIGKILL)


def finishes(case: Case, _: Any) -> None:
    case.submit(FIRST_TWO)
    case.end()
    case.ask("scontrol", "requeue", case.job_id)
    time.sleep(1)
    case.end()


def is_told_to_stop(case: Case, _: Any) -> None:
    case.submit(FIRST_TWO)
    case.reach(5)
    case.ask("scancel", "-b", "-s", "USR1", case.job_id)
    case.end()


def loses_a_rank(case: Case, _: Any) -> None:
    case.submit(FIRST_TWO)
    case.reach(EVERY + 4)
    case.kill_rank(1)
    case.end()


def loses_a_rank_once_too_often(case: Case, _: Any) -> None:
    case.submit(FIRST_TWO, in_job_restarts=0)
    case.reach(EVERY + 4)
    case.kill_rank(0)
    case.end()


def makes_no_progress(case: Case, _: Any) -> None:
    fault = "assert step < 3, 'made up'"
    case.submit(FIRST_TWO, nodes=1, fault=fault, attempts=2, in_job_restarts=0)
    case.end()


def is_misconfigured(case: Case, _: Any) -> None:
    """The corpus is gone when the job begins."""

    def elsewhere(config: RunConfig) -> RunConfig:
        data = config.data.model_copy(update={"path": "/nowhere"})
        return config.model_copy(update={"data": data})

    case.submit(FIRST_TWO, nodes=1, later=elsewhere)
    case.end()


def is_cancelled_by_us(case: Case, _: Any) -> None:
    case.submit(FIRST_TWO)
    case.reach(3)
    cancel(case.run)
    case.end()


def is_cancelled(case: Case, _: Any) -> None:
    case.submit(FIRST_TWO)
    case.reach(3)
    case.ask("scancel", case.job_id)
    case.end()


def runs_out_of_time(case: Case, _: Any) -> None:
    """Slurm looks every 30 seconds for jobs whose time is over, and limits are whole minutes."""
    case.submit(FIRST_TWO, nodes=1, processes=2, overrides=(f"train.steps={LONG}",))
    case.reach(3)
    case.ask("scontrol", "update", f"JobId={case.job_id}", "EndTime=now+40")
    case.until(lambda: case.shown()["JobState"] == "PENDING", "its time is not over")
    case.ask("scontrol", "update", f"JobId={case.job_id}", "TimeLimit=9")
    case.end()


def is_preempted(case: Case, _: Any) -> None:
    """Saved in time; on a busy machine the job may be gone before it has written that down."""
    case.submit("--nodelist=n2,n3")
    case.reach(5)
    case.ask("sbatch", "-p", "high", "-w", "n3", "-c", "16", "--wrap=sleep 3", "--output=/dev/null")
    case.end()


def has_a_sick_node(case: Case, nodes: Any) -> None:
    """On n1 the run's folder may not be written."""
    case.run.mkdir(parents=True)
    inside = ["nsenter", f"--target={nodes.running['n1'].pid}", "--mount", "mount"]
    here = str(case.run)
    for options in (["--bind", here, here], ["-o", "remount,ro,bind", here]):
        subprocess.run([*inside, *options], check=True, timeout=60)
    case.submit("--exclude=n3")  # the first two of the others are taken
    case.end()


DISTURBED = (
    runs_out_of_time,
    has_a_sick_node,
    is_preempted,
    loses_a_rank_once_too_often,
    is_told_to_stop,
    makes_no_progress,
    finishes,
    loses_a_rank,
    is_cancelled,
    is_cancelled_by_us,
    is_misconfigured,
)


def lose_nodes(one: Case, two: Case, four: Case, nodes: Any) -> None:
    """Two of four nodes are lost at a time: the one of a job, one of its two, two of its four."""
    one.submit("--exclude=n0", nodes=1, pause=0.5)  # it starts sooner than the others
    two.submit()
    four.submit(nodes=4, nodes_min=2)
    for case in (one, two, four):
        case.reach(EVERY + 4)
    lost = {one.shown()["NodeList"], hosts(two)[1]}
    lost |= {"n2" if "n1" in lost else "n1"} if len(lost) == 1 else set()
    for name in lost:
        nodes.kill(name)
    for case in (one, two, four):
        case.end()
    nodes.revive(*lost)


def hosts(case: Case) -> list[str]:
    return case.ask("scontrol", "show", "hostnames", case.shown()["NodeList"]).split()


@pytest.fixture(scope="session")
def survived(
    once: Callable[..., Path],
    configure: Callable[..., RunConfig],
    template: Path,
    request: pytest.FixtureRequest,
) -> Path:
    """All jobs, as many at a time as get along with each other."""

    def make(folder: Path) -> None:
        nodes = request.getfixturevalue("nodes")

        def play(do: Callable[..., None], *names: str) -> None:
            cases = [
                Case(nodes.environment, configure, template, folder / name)
                for name in names or [do.__name__]
            ]
            try:
                do(*cases, nodes)
            except BaseException as error:
                for case in cases:
                    case.folder.mkdir(exist_ok=True)
                    (case.folder / TROUBLE).write_text(repr(error))

        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SLURM_CONF", nodes.environment["SLURM_CONF"])
            with ThreadPoolExecutor(4) as pool:
                list(pool.map(play, DISTURBED))
            play(lose_nodes, "loses_its_node", "loses_a_node", "loses_two_of_four")

    return once("survived", make)


@dataclass(frozen=True)
class Outcome:
    """What became of a case."""

    folder: Path

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def slurm(self) -> dict[str, str]:
        found = json.loads((self.folder / "found.json").read_text())
        assert found["left"] == []
        return found["slurm"]

    @property
    def starts(self) -> list[Start]:
        return list(starts(self.run / "jobs" / "0001"))

    @property
    def how(self) -> list[str]:
        return [start.how for start in self.starts]

    @property
    def told(self) -> str:
        return (self.run / "jobs" / "0001" / OUTPUT).read_text()

    @property
    def last_line(self) -> str:
        return self.told.splitlines()[-1]


@pytest.fixture
def outcome(survived: Path) -> Callable[[str], Outcome]:
    """`outcome(name)`: what became of a case."""

    def of(name: str) -> Outcome:
        trouble = survived / name / TROUBLE
        assert not trouble.exists(), trouble.read_text()
        return Outcome(survived / name)

    return of


@pytest.fixture(scope="session")
def undisturbed(
    once: Callable[..., Path], configure: Callable[..., RunConfig]
) -> Callable[[int], Path]:
    """`undisturbed(steps)`: the same run by two ranks that nobody disturbs."""

    def make(folder: Path) -> None:
        for steps in (STEPS, LONG):
            configure(folder / str(steps), "rlt1", f"train.steps={steps}")
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command += ["--nproc-per-node=2", "-m", "rlt_dist", "train"]
            environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
            subprocess.run(
                [*command, str(folder / str(steps) / "run.yaml")],
                env=environment,
                check=True,
                timeout=PATIENCE,
                capture_output=True,
            )

    folder = once("undisturbed", make)
    return lambda steps: folder / str(steps) / "run"


def check_chain(found: Outcome, last: int) -> None:
    """Every start went on from where the one before had come to, up to the last step."""
    assert found.slurm["JobState"] == "COMPLETED", found.told
    assert found.starts[0].from_step == 0
    for before, after in pairwise(found.starts):
        assert after.from_step == before.to_step
    assert found.starts[-1].to_step == last


@pytest.mark.parametrize(
    ("name", "how", "restarts"),
    [
        ("finishes", ["finished"], "1"),  # a person requeued it; nothing was started
        ("is_told_to_stop", ["stopped", "finished"], "1"),
        ("is_preempted", ["(stopped|failed)", "finished"], "1"),
        ("loses_a_rank", ["finished"], "0"),
        ("loses_a_rank_once_too_often", ["failed", "finished"], "1"),
        ("has_a_sick_node", ["sick", "finished"], "1"),
        ("loses_a_node", ["failed", "finished"], "1"),
    ],
)
def test_a_job_of_two_ranks_comes_out_as_if_nothing_had_happened(
    outcome: Any, undisturbed: Any, metrics: Any, name: str, how: list[str], restarts: str
) -> None:
    found = outcome(name)
    check_chain(found, STEPS)
    assert re.fullmatch(" ".join(how), " ".join(found.how)), found.told
    assert found.slurm["Restarts"] == restarts
    assert name != "is_preempted" or found.starts[0].to_step in range(5, STEPS)
    assert {start.mesh for start in found.starts if start.how != "sick"} == {"2x1x1"}
    assert metrics(found.run) == metrics(undisturbed(STEPS))


@pytest.mark.parametrize(
    ("name", "meshes", "nodes"),
    [
        ("loses_its_node", ["1x1x1", "1x1x1"], [1, 1]),
        ("loses_two_of_four", ["4x1x1", "2x1x1"], [4, 2]),
    ],
)
def test_a_job_goes_on_after_its_nodes_were_lost_on_fewer_if_it_may(
    outcome: Any, undisturbed: Any, metrics: Any, name: str, meshes: list[str], nodes: list[int]
) -> None:
    found = outcome(name)
    check_chain(found, STEPS)
    assert found.how == ["failed", "finished"]
    assert [start.mesh for start in found.starts] == meshes
    assert [len(start.nodes) for start in found.starts] == nodes
    assert found.starts[1].from_step >= EVERY
    ours, plain = metrics(found.run), metrics(undisturbed(STEPS))
    assert [record["step"] for record in ours] == [record["step"] for record in plain]
    losses = [record["loss"] for record in plain]
    assert [record["loss"] for record in ours] == pytest.approx(losses, rel=1e-9)


def test_a_job_whose_time_is_over_stops_in_time_and_goes_on(
    outcome: Any, undisturbed: Any, metrics: Any
) -> None:
    found = outcome("runs_out_of_time")
    check_chain(found, LONG)
    *before, last = found.how
    assert before
    assert set(before) == {"stopped"}
    assert last == "finished"
    assert metrics(found.run) == metrics(undisturbed(LONG))


def test_a_job_without_progress_is_given_up(outcome: Any) -> None:
    found = outcome("makes_no_progress")
    assert (found.slurm["JobState"], found.slurm["ExitCode"]) == ("FAILED", "1:0")
    assert found.how == ["failed", "failed"]
    why = "given up, since 2 starts in a row made no new checkpoint; failed at step 0: "
    assert found.last_line.startswith(f"rlt-dist: job {found.slurm['JobId']}: {why}")
    assert found.last_line.endswith("AssertionError: made up")


def test_a_mistake_is_not_tried_again_neither_by_slurm_nor_by_torchrun(outcome: Any) -> None:
    found = outcome("is_misconfigured")
    assert (found.slurm["JobState"], found.slurm["ExitCode"]) == ("FAILED", "2:0")
    assert found.slurm["Restarts"] == "0"
    assert found.how == ["mistake"]
    assert "/nowhere/index.json: no such file" in found.last_line
    assert found.told.count("mistake at step 0") == 1


def test_a_cancelled_job_saves_and_stays_away(outcome: Any) -> None:
    found = outcome("is_cancelled_by_us")
    assert (found.slurm["JobState"], found.slurm["ExitCode"]) == ("FAILED", "75:0")
    assert found.slurm["Restarts"] == "0"
    (start,) = found.starts
    assert (start.how, start.to_step >= 3) == ("stopped", True)
    assert found.last_line.endswith("cancelled, so not started again")


def test_a_job_that_slurm_was_told_to_cancel_stays_away(outcome: Any) -> None:
    found = outcome("is_cancelled")
    assert found.slurm["JobState"] == "CANCELLED"
    assert found.slurm["Restarts"] == "0"
    assert "finished" not in found.how


def test_a_finished_job_is_not_started_again_even_if_it_is_requeued(outcome: Any) -> None:
    found = outcome("finishes")
    assert found.told.count("finished at step 40") == 2
    assert found.told.count("from step 0") == 1


def test_a_sick_node_is_named_and_excluded(outcome: Any) -> None:
    found = outcome("has_a_sick_node")
    first, second = found.starts
    assert first.sick == ("n1",)
    assert first.why is not None
    assert first.why.startswith("n1: ")
    assert "Read-only file system" in first.why
    assert "n1" not in second.nodes
    assert "n1" in found.slurm["ExcNodeList"]
