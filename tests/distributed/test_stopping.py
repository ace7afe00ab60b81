"""A signal at any one rank, at any moment, or a deadline: all stop, and nothing is lost."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlt_dist.checkpoint.manifest import verify
from rlt_dist.config.run import RunConfig

HERE = Path(__file__).parent
SECONDS = 30

SIGNALS = ("SIGTERM", "SIGUSR1", "SIGINT")
MOMENTS = {"loading": 0, "step 2": 2, "step 5": 5, "validating": 3, "saving": 4}
"""Moments, and the step after which the run stops."""

STEPS = ("train.steps=6", "validation.every=3", "checkpoint.every=4", "guard.step_timeout=30")


IMPORT_ALL = """
import importlib, pkgutil, signal
from rlt_dist.util.signals import SIGNALS, heard
with heard():
    ours = [signal.getsignal(number) for number in SIGNALS]
    import rlt_dist
    for module in pkgutil.walk_packages(rlt_dist.__path__, "rlt_dist."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    import torch._dynamo, torch.distributed.checkpoint, torch.utils.tensorboard
    assert [signal.getsignal(number) for number in SIGNALS] == ours
"""


def event(moment: str, do: str, rank: int = 0, **more: Any) -> dict[str, Any]:
    return {"rank": rank, "moment": moment, "do": do, **more}


def _asked() -> dict[str, tuple[int, list[dict[str, Any]]]]:
    """By name: ranks, and what happens. One asks the other: that is in a collective meanwhile."""
    found = {}
    for number, moment in enumerate(MOMENTS):
        name = SIGNALS[number % 3]
        do = "signal while busy" if moment.startswith("step") else "signal"
        found[f"alone {moment}"] = 1, [event(moment, do, name=name)]
        asker = number % 2
        found[f"two {moment}"] = 2, [event(moment, "signal", asker, to=1 - asker, name=name)]
    found[READER] = 1, [event("step 2", "signal to the group", name="SIGUSR1")]
    return found


READER = "alone with a process that reads"
ASKED = _asked()
SECOND = {
    "alone": (1, [event("step 3", "two signals")]),
    "in a collective": (2, [event("step 3", "two signals", 1, to=0)]),
    "outside of Python": (2, [event("step 3", "two signals", 1, to=1)]),
}
LATE = {"alone": (1, [event("over", "signal")]), "two": (2, [event("over", "signal", 1, to=1)])}
SLOW = [event(f"step {step}", "sleep", seconds=0.6) for step in range(2, 30)]


UNSAVED = ("train.steps=100", "checkpoint.every=1", "checkpoint.max_failures=1")
"""Rank 1 learns of the first save's end seconds after rank 0."""

LIMIT = 1.5
STUCK = {
    "one sleeps": (2, [event("step 3", "sleep", 1, seconds=99)]),
    "one spins": (2, [event("step 3", "spin", 0)]),
    "one is halted": (2, [event("step 3", "halt", 1)]),
    "the first is halted": (2, [event("step 3", "halt", 0)]),
    "alone": (1, [event("step 3", "spin")]),
}
STUCK_SELDOM = {
    "step 1": ("step 1", "step 1"),
    "validation": ("validating", "validation after step 3"),
    "a save": ("saving", "saving step 4"),
    "the writing of a save": ("saved", "saving step 6"),
}
"""By name: when rank 1 sleeps, and what is said to have taken long."""
IN_NO_HURRY = [
    event(moment, "sleep", 1, seconds=2 * LIMIT) for moment in ("step 1", "validating", "saving")
]


def plan(folder: Path, configure: Callable[..., Any]) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = []

    def add(name: str, ranks: int, events: list[Any], *choices: str, **more: Any) -> None:
        configure(folder / name, "rlt1", *STEPS, *choices)
        file = str(folder / name / "run.yaml")
        runs.append({"name": name, "config": file, "ranks": ranks, "events": events, **more})

    for name, (ranks, events) in ASKED.items():
        add(name, ranks, events, f"data.workers={int(name == READER)}")
        again = {**runs[-1], "events": [], "after": len(runs) - 1, "name": f"{name} again"}
        runs.append(again)
    for name, (ranks, events) in SECOND.items():
        add(f"second {name}", ranks, events)
    for name, (ranks, events) in LATE.items():
        add(f"late {name}", ranks, events)
    for ranks in (1, 2):
        add(f"whole {ranks}", ranks, [event("over", "look at handlers")])
    add("deadline wished", 1, SLOW, "train.steps=100", arguments=["--stop-before", "10s"])
    add("deadline of the job", 2, SLOW, "train.steps=100", ends_soon=1)
    for name, (ranks, events) in STUCK.items():
        add(name, ranks, events, f"guard.step_timeout={LIMIT}")
    for name, (moment, _) in STUCK_SELDOM.items():
        events = [event(moment, "sleep", 1, seconds=99)]
        add(f"stuck in {name}", 2, events, f"guard.step_timeout={LIMIT}")
    add("silent", 2, [event("step 3", "halt", 1)])
    add("two silent", 4, [event("step 3", "halt", rank) for rank in (1, 2)])
    unsaved = [event("step 1", "forbid saves"), event("saved", "sleep", 1, seconds=2)]
    add("unsaved", 2, [*SLOW, *unsaved], *UNSAVED)
    add("slow", 2, IN_NO_HURRY, f"guard.step_timeout={LIMIT}")
    return runs


@pytest.fixture(scope="session")
def asked(once: Callable[..., Path], configure: Callable[..., Any]) -> Path:
    """All runs, in one start of Python."""

    def make(folder: Path) -> None:
        runs = plan(folder, configure)
        (folder / "plan.json").write_text(json.dumps(runs))
        subprocess.run(
            [
                sys.executable,
                str(HERE / "asked.py"),
                str(folder / "plan.json"),
                str(folder / "out"),
            ],
            env=os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
            timeout=280,
            check=True,
        )
        names = [run["name"] for run in runs]
        results = json.loads((folder / "out").read_text())
        (folder / "by_name.json").write_text(json.dumps(dict(zip(names, results, strict=True))))

    return once("asked", make)


@pytest.fixture
def outcome(asked: Path) -> Callable[[str], dict[str, Any]]:
    """`outcome(name)`: what became of a run, and how its folder says that it ended."""
    by_name = json.loads((asked / "by_name.json").read_text())

    def of(name: str) -> dict[str, Any]:
        ended = asked / name.removesuffix(" again") / "run" / "ended.json"
        return by_name[name] | {"ended": json.loads(ended.read_text()) if ended.exists() else None}

    return of


@pytest.mark.parametrize("name", ASKED)
def test_a_signal_at_any_moment_stops_all_after_one_step_and_the_run_goes_on_to_the_bit(
    outcome: Any, asked: Path, metrics: Any, name: str
) -> None:
    ranks, (asked_by,) = ASKED[name]
    moment, sent, to = asked_by["moment"], asked_by["name"], asked_by.get("to", 0)
    stopped = outcome(name)
    assert stopped["statuses"] == [75] * ranks, stopped["errors"]
    assert max(stopped["seconds"]) < SECONDS
    when = f"after step {MOMENTS[moment]}" if MOMENTS[moment] else "before the first step"
    if moment == "saving" and ranks > 1:  # the other rank may have begun the next step
        when = f"after step [{MOMENTS[moment]}{MOMENTS[moment] + 1}]"
    why = f"stopped {when}: rank {to} was sent {sent}; the same command goes on from there\n"
    assert len(re.findall(why, "".join(stopped["errors"]))) == 1
    assert "rlt-dist: error" not in "".join(stopped["errors"])
    again = outcome(f"{name} again")
    assert again["statuses"] == [0] * ranks, again["errors"]
    assert {"how": "finished", "step": 6, "why": None}.items() <= again["ended"].items()
    assert metrics(asked / name / "run") == metrics(asked / f"whole {ranks}" / "run")


@pytest.mark.parametrize("name", SECOND)
def test_a_second_signal_ends_all_at_once_wherever_the_main_threads_are(
    outcome: Any, name: str
) -> None:
    ranks, (sent,) = SECOND[name]
    ended = outcome(f"second {name}")
    assert ended["statuses"] == [1] * ranks
    assert max(ended["seconds"]) < SECONDS
    prefix = rf"rank {sent.get('to', 0)} \(\S+ cpu\): " if ranks > 1 else ""
    line = f"rlt-dist: error: {prefix}a second signal, SIGINT: ended at once, without saving"
    (said,) = [said for said in all_lines(ended) if "error" in said]
    assert re.fullmatch(line, said)
    assert ended["ended"]["how"] == "failed"
    assert said.endswith(ended["ended"]["why"])


@pytest.mark.parametrize("name", LATE)
def test_a_signal_after_the_last_step_changes_nothing(outcome: Any, name: str) -> None:
    assert outcome(f"late {name}")["statuses"] == [0] * LATE[name][0]
    assert outcome(f"late {name}")["ended"]["how"] == "finished"


@pytest.mark.parametrize(
    ("name", "ranks", "rank"), [("deadline wished", 1, 0), ("deadline of the job", 2, 1)]
)
def test_a_deadline_of_any_rank_stops_all_in_time(
    outcome: Any, asked: Path, name: str, ranks: int, rank: int
) -> None:
    stopped = outcome(name)
    assert stopped["statuses"] == [75] * ranks, stopped["errors"]
    step = stopped["ended"]["step"]
    assert step < 30
    when = f"after step {step}" if step else "before the first step"
    assert f"stopped {when}: rank {rank} has to end before 2" in stopped["errors"][0]
    for folder in [asked / name / "run" / "checkpoints" / f"step-{step:08d}"] if step else []:
        verify(folder)


@pytest.mark.parametrize(
    ("name", "accused"),
    [
        ("one sleeps", r"stuck is rank 1 \(\S+ cpu\) at .*"),
        ("one spins", r"stuck is rank 0 \(\S+ cpu\) at .*"),
        ("one is halted", r"stuck is rank 1 \(\S+ cpu\), which does not answer: stopped, or gone"),
        ("alone", r"stuck is rank 0 \(\S+ cpu\) at .*"),
    ],
)
def test_a_stuck_step_is_ended_its_rank_is_named_and_the_others_leave_their_stacks(
    outcome: Any, asked: Path, name: str, accused: str
) -> None:
    ended, ranks = outcome(name), STUCK[name][0]
    halted = [1] if name == "one is halted" else []
    assert [ended["statuses"][rank] for rank in range(ranks) if rank not in halted] == [1] * (
        ranks - len(halted)
    )
    assert max(ended["seconds"]) < SECONDS
    stacks = asked / name / "run" / "stacks"
    line = f"rlt-dist: error: step 3 took more than {LIMIT} s: {accused}; the stacks of .* {stacks}"
    (said,) = [said for said in all_lines(ended) if "error" in said]
    assert re.fullmatch(line, said)
    for rank in range(ranks):
        file = stacks / f"rank-{rank}.txt"
        assert file.exists() is (rank not in halted)
        assert rank in halted or "train/loop.py" in file.read_text()


@pytest.mark.parametrize("name", STUCK_SELDOM)
def test_so_is_what_is_done_seldom_after_longer(outcome: Any, asked: Path, name: str) -> None:
    ended, (_, what) = outcome(f"stuck in {name}"), STUCK_SELDOM[name]
    assert ended["statuses"] == [1, 1]
    (said,) = [said for said in all_lines(ended) if "error" in said]
    assert f"error: {what} took more than {10 * LIMIT:g} s: stuck is rank 1 (" in said
    assert "rank 0" not in said
    stacks = asked / f"stuck in {name}" / "run" / "stacks"
    assert sorted(path.name for path in stacks.iterdir()) == ["rank-0.txt", "rank-1.txt"]


@pytest.mark.parametrize(("name", "halted"), [("the first is halted", 0), ("silent", 1)])
def test_a_rank_that_falls_silent_is_missed_and_the_others_leave_their_stacks(
    outcome: Any, asked: Path, name: str, halted: int
) -> None:
    """Also rank 0, which serves the store, and long before a step counts as stuck."""
    ended = outcome(name)
    assert ended["statuses"][1 - halted] == 1
    (said,) = [said for said in all_lines(ended) if "error" in said]
    found = re.search(
        r"rank (\d) \(\S+ cpu\): lost contact with rank (\d) \(\S+ cpu\) \(no s", said
    )
    assert found and [int(rank) for rank in found.groups()] == [1 - halted, halted]
    assert (asked / name / "run" / "stacks" / f"rank-{1 - halted}.txt").read_text()


def test_all_ranks_that_fall_silent_together_are_named(outcome: Any) -> None:
    ended = outcome("two silent")
    assert [ended["statuses"][rank] for rank in (0, 3)] == [1, 1]
    (said,) = [said for said in all_lines(ended) if "error" in said]
    names = [rf"rank {rank} \(\S+ cpu\)" for rank in range(3)]
    assert re.search(rf"{names[0]}: lost contact with {names[1]}, {names[2]} \(no sign", said)


def test_ranks_that_learn_apart_that_nothing_can_be_saved_stop_after_the_same_step(
    outcome: Any, asked: Path, metrics: Any
) -> None:
    ended = outcome("unsaved")
    assert ended["statuses"] == [1, 1]  # there may be room at the next try
    (said,) = [said for said in all_lines(ended) if "error" in said]
    assert "error: step 1 could not be saved (" in said
    assert len(metrics(asked / "unsaved" / "run")) < 100


def test_the_first_step_validation_and_saving_may_take_longer_than_a_step(outcome: Any) -> None:
    slow = outcome("slow")
    assert slow["statuses"] == [0, 0], slow["errors"]


@pytest.mark.parametrize("name", ["whole 1", "whole 2"])
def test_at_a_runs_end_the_signals_are_still_heard_by_us(asked: Path, name: str) -> None:
    names = [run["name"] for run in json.loads((asked / "plan.json").read_text())]
    found = json.loads((asked / str(names.index(name)) / "handlers.json").read_text())
    assert found == dict.fromkeys(SIGNALS, "rlt_dist.util.signals")


def test_nothing_that_we_import_takes_the_signals() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


def all_lines(outcome: dict[str, Any]) -> list[str]:
    return "".join(outcome["errors"]).splitlines()


def test_under_torchrun_usr1_and_term_are_passed_on_and_the_same_command_goes_on(
    repository: Path, long_run: RunConfig, metrics: Any, records: Any
) -> None:
    """Its own exit status is 1; the run's is what `launch` ends with."""
    command = [repository / "launch" / "torchrun.sh", "2", long_run.run_folder.parent / "run.yaml"]
    for steps, sent in ((4, signal.SIGUSR1), (12, signal.SIGTERM), (None, None)):
        process = subprocess.Popen(
            list(map(str, command)),
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            if steps is not None:
                wait_for_steps(long_run.run_folder / "metrics.jsonl", steps, process)
                process.send_signal(sent)
            out, _ = process.communicate(timeout=90)
        finally:
            process.kill()
        ended = json.loads((long_run.run_folder / "ended.json").read_text())
        assert ended["how"] == ("finished" if sent is None else "stopped"), out
        assert sent is None or f"was sent {sent.name}" in ended["why"]
        assert process.returncode == (0 if sent is None else 75)
    assert metrics(long_run.run_folder) == records(2, "long")


def wait_for_steps(file: Path, steps: int, process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 90
    while not file.exists() or len(file.read_text().splitlines()) < steps:
        assert process.poll() is None, "it ended before it could be asked to"
        assert time.monotonic() < until
        time.sleep(0.01)
