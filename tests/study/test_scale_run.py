"""`rlt-dist scale run` here: points really trained as processes, killed and gone on with."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from rlt_dist.checkpoint.run_folder import record
from rlt_dist.config.load import load_typed
from rlt_dist.config.run import RunConfig
from rlt_dist.data.stream.corpora import open_corpora
from rlt_dist.mesh.launched import RANK_NAME
from rlt_dist.study.grid import load_study
from rlt_dist.study.measure import measure
from rlt_dist.study.meshes import meshes_of
from rlt_dist.study.run import Outcome, run_here, tasks_of
from rlt_dist.util.lock import locked

STEPS = 160
"""So many that there is time to kill a rank on the way."""


def steps_of(run: Path) -> list[int]:
    file = run / "metrics.jsonl"
    if not file.is_file():
        return []
    *whole, _ = file.read_text().split("\n")
    return [json.loads(line)["step"] for line in whole]


def rank_of(run: Path, rank: int) -> int | None:
    """The process of a rank of a run, once it has found its place."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if not (process / "comm").read_text().startswith(RANK_NAME):
                continue
            words = (process / "environ").read_bytes().split(b"\0")
            if f"RANK={rank}".encode() in words and str(run) in (process / "cmdline").read_text():
                return int(process.name)
        except OSError:
            continue
    return None


@contextmanager
def killing(run: Path, rank: int, after: int) -> Iterator[None]:
    """Kill a rank of a run once a step is done."""

    def kill() -> None:
        deadline = time.monotonic() + 100
        while time.monotonic() < deadline:
            if after in steps_of(run) and (process := rank_of(run, rank)) is not None:
                os.kill(process, signal.SIGKILL)
                return
            time.sleep(0.02)

    thread = threading.Thread(target=kill)
    thread.start()
    yield
    thread.join()


def test_a_killed_point_is_told_and_gone_on_with_and_a_done_one_is_left_alone(
    command: Any, make_study: Callable[..., Path], tmp_path: Path
) -> None:
    file, out = make_study(tmp_path, steps=STEPS), tmp_path / "out"
    first, second = (out / "points" / f"nodes={nodes}" for nodes in (1, 2))
    with killing(second, 1, after=STEPS // 4 + 2):
        code, _, err = command("scale", "run", file, "--output", out)
    assert code == 1
    *lines, failed, advice = err.splitlines()
    assert any(line.startswith("[1/2] nodes=1: 1 rank: ") for line in lines)
    assert failed.startswith("nodes=2: failed: rank 0 ")
    assert "1 failed; the same command" in advice
    assert steps_of(first) == list(range(1, STEPS + 1))
    assert 0 < len(steps_of(second)) < STEPS
    before = (first / "metrics.jsonl").stat().st_mtime_ns

    code, _, err = command("scale", "run", file, "--output", out)
    assert code == 0, err
    assert "nodes=1: done" in err
    assert "[1/1] nodes=2: 2 ranks: " in err
    assert "resumed from" in (second / "logs" / "rank-00000.log").read_text()
    assert steps_of(second) == list(range(1, STEPS + 1))
    assert (first / "metrics.jsonl").stat().st_mtime_ns == before
    _holds_what_was_measured(file, out)


def _holds_what_was_measured(file: Path, out: Path) -> None:
    """Both points have the same losses, and tell what they took."""
    study = load_study(file)
    found = [measure(point, out / "points" / point.name, 2) for point in study.points]
    one, two = (each for each in found if each is not None)
    assert (one.axes, two.axes) == ("1x1x1", "2x1x1")
    assert one.steps == two.steps == STEPS - 2
    assert one.loss == pytest.approx(two.loss, rel=1e-4)
    assert one.sent is not None and two.sent is not None
    assert one.sent["data"] == 0 < two.sent["data"]
    assert two.waiting is not None and two.mfu is not None and two.peak_memory is not None
    assert two.waiting["data"] > 0
    assert two.spread[0] <= two.seconds <= two.spread[1]
    assert two.tokens_per_second == pytest.approx(80 / two.seconds)


def test_a_point_that_another_process_has_taken_meanwhile_is_left_alone(
    make_study: Callable[..., Path], tmp_path: Path
) -> None:
    study, out = load_study(make_study(tmp_path)), tmp_path / "out"
    tasks, said = tasks_of(study, meshes_of(study, out, print), out), list[str]()
    assert [task.standing for task in tasks] == ["open", "open"]
    with ExitStack() as held:
        for task in tasks:
            task.config.run_folder.mkdir(parents=True)
            record(task.config.run_folder, task.config, open_corpora(task.config.data).tokenizer)
            held.enter_context(locked(task.config.run_folder, "trains"))
        outcome = run_here(study, tasks, said.append)
    assert outcome == Outcome({})
    for nodes, line in zip((1, 2), said, strict=True):
        assert line.startswith(f"nodes={nodes}: active, process {os.getpid()} ")


def config_of(file: Path, out: Path, *overrides: str) -> RunConfig:
    study = load_study(file, overrides)
    return tasks_of(study, meshes_of(study, out, print), out)[0].config


def test_a_point_is_as_long_as_the_study_says_and_does_nothing_beside(
    make_study: Callable[..., Path], tmp_path: Path
) -> None:
    kept = ("schedule.warmup=5", "checkpoint.every=2", "checkpoint.keep_every=4")
    config = config_of(make_study(tmp_path, *kept, steps=4), tmp_path / "out")
    assert config.run_folder == tmp_path / "out" / "points" / "nodes=1"
    assert (config.train.steps, config.schedule.warmup) == (4, 4)
    assert config.validation.every is None
    assert not config.checkpoint.asynchronous
    assert config.checkpoint.keep_every is None


def test_a_changed_configuration_is_refused_by_the_key_s_name(
    command: Any, is_one_error: Any, make_study: Callable[..., Path], tmp_path: Path
) -> None:
    file, out = make_study(tmp_path), tmp_path / "out"
    begun = out / "points" / "nodes=1"
    begun.mkdir(parents=True)
    mark = "# Written by `rlt-dist train`: the configuration of the run in this folder, resolved.\n"
    (begun / "config.yaml").write_text(mark + config_of(file, out).to_yaml())
    assert load_typed(begun / "config.yaml", RunConfig) == config_of(file, out)
    said = command("scale", "run", file, "--output", out, "optimizer.learning_rate=0.5")
    is_one_error(said, f"{begun}: was begun", "optimizer.learning_rate: 0.01 -> 0.5", "--output")


def test_what_does_not_fit_is_told_and_options_of_slurm_are_refused(
    command: Any, is_one_error: Any, make_study: Callable[..., Path], tmp_path: Path
) -> None:
    file, out = make_study(tmp_path, nodes=[8]), tmp_path / "out"
    is_one_error(command("scale", "run", file, "--qos=high"), "--qos=high: is for --slurm")
    code, _, err = command("scale", "run", file, "--output", out, "train.micro_batch=2")
    assert code == 1
    assert "nodes=8: failed: train.micro_batch 2 does not divide the 1 lanes" in err
