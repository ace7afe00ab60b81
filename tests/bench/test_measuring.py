"""What timing and memory figures are made of."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch

from rlt_dist.bench import timing
from rlt_dist.bench.memory import peak_above_inputs
from rlt_dist.bench.timing import LEAST_ROUNDS, Disturbance, time_in_rounds


def test_every_step_is_warmed_up_once_and_then_run_once_a_round() -> None:
    calls: list[str] = []
    watched: list[int] = []
    steps = {name: partial(calls.append, name) for name in "abc"}
    seconds = time_in_rounds(steps, budget=0.0, watch=watched.append)
    assert watched == list(range(LEAST_ROUNDS + 1))
    assert calls[:3] == ["a", "b", "c"]
    rounds = [calls[i : i + 3] for i in range(3, len(calls), 3)]
    assert len(rounds) == LEAST_ROUNDS
    assert all(Counter(each) == Counter("abc") for each in rounds)
    assert {name: len(runs) for name, runs in seconds.items()} == dict.fromkeys("abc", LEAST_ROUNDS)


def test_a_longer_budget_gives_more_rounds() -> None:
    seconds = time_in_rounds({"a": list}, budget=1e9, watch=[].append)
    assert len(seconds["a"]) > LEAST_ROUNDS


@pytest.mark.parametrize(("busy", "cores"), [(3.0, 0.0), (2.9, 0.0), (6.0, 1.5), (None, None)])
def test_what_others_did_is_a_disturbance_and_one_s_own_work_is_none(
    monkeypatch: pytest.MonkeyPatch, busy: float | None, cores: float | None
) -> None:
    """Two seconds, of which this process worked three on its threads; ticks are coarse."""
    monkeypatch.setattr(timing.time, "perf_counter", iter([100.0, 102.0]).__next__)
    monkeypatch.setattr(timing, "_own_seconds", iter([7.0, 10.0]).__next__)
    totals = iter([50.0, busy and 50.0 + busy])
    monkeypatch.setattr(timing, "_busy_seconds", totals.__next__)
    with Disturbance() as disturbance:
        pass
    assert disturbance.cores == pytest.approx(cores)


WORK = """
import subprocess, sys, time
if sys.argv[1] == "above":
    subprocess.run([sys.executable, "-c", sys.argv[2], "below", ""], check=True)
while time.process_time() < 0.3:
    pass
print("done", flush=True)
if sys.argv[1] == "above":
    sys.stdin.read()
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the system does not say")
def test_one_s_own_work_is_that_of_children_and_theirs_alive_or_ended() -> None:
    before = timing._own_seconds()
    own = time.process_time()
    command = [sys.executable, "-c", WORK, "above", WORK]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as child:
        assert child.stdout is not None
        assert [child.stdout.readline() for _ in range(2)] == ["done\n"] * 2
        alive = timing._own_seconds() - before - (time.process_time() - own)
    ended = timing._own_seconds() - before - (time.process_time() - own)
    assert alive >= 0.5
    assert ended >= alive - 0.05  # ticks


MEBIBYTE = 1 << 20


class Filling:
    """Takes 24 MiB, fills them and frees them, five times over; its inputs are 8 MiB."""

    def __init__(self) -> None:
        self.inputs = torch.ones(8 * MEBIBYTE // 4)

    def __call__(self) -> None:
        for _ in range(5):
            torch.ones(24 * MEBIBYTE // 4)


@pytest.mark.parametrize("segments", [1, 3])
def test_the_peak_is_what_stands_at_once_above_the_inputs(segments: int) -> None:
    peak = peak_above_inputs(Filling, threads=1, segments=segments)
    assert peak is None or 23.5 <= peak / MEBIBYTE <= 25


class Interrupting:
    """Interrupts the process that waits for the measurement, takes long, and ends."""

    def __init__(self, outlived: Path) -> None:
        self._outlived = outlived

    def __call__(self) -> None:
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(8)
        self._outlived.touch()
        os._exit(1)


def test_who_interrupts_a_measurement_does_not_wait_for_it(tmp_path: Path) -> None:
    outlived = tmp_path / "outlived"
    with pytest.raises(KeyboardInterrupt):
        peak_above_inputs(partial(Interrupting, outlived), threads=1, segments=1)
    assert not outlived.exists()
