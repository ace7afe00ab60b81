"""Runs side by side: done ones are left alone, broken-off ones go on, failures are named."""

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rlt_dist.config.run import RunConfig
from rlt_dist.experiments import training
from rlt_dist.experiments.training import is_done, train_side_by_side
from rlt_dist.util.errors import Trouble, UserError
from rlt_dist.util.lock import locked


def _unwatched(_: RunConfig, __: int) -> None:
    pass


def _steps(run: RunConfig) -> list[int]:
    lines = (run.run_folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


def test_a_failure_is_named_with_its_last_word_and_the_others_are_done(
    configure: Any, tmp_path: Path
) -> None:
    good = configure(tmp_path / "good", "rlt1")
    bad = configure(tmp_path / "bad", "rlt1", "data.path=nowhere")
    bad = bad.model_copy(update={"run_folder": tmp_path / "bad" / "astray"})
    with pytest.raises(UserError, match=r"1 of 2 runs failed: astray: .*nowhere.*log") as raised:
        train_side_by_side([bad, good], _unwatched)
    assert not isinstance(raised.value, Trouble)
    assert is_done(good)
    assert not is_done(bad)
    (good.run_folder / "metrics.jsonl").unlink()
    assert train_side_by_side([good], _unwatched)
    assert not (good.run_folder / "metrics.jsonl").exists()
    other = configure(tmp_path / "good", "rlt1", "train.steps=6")
    with pytest.raises(UserError, match=r"good.*train\.steps: 5 -> 6"):
        train_side_by_side([other], _unwatched)


def test_runs_that_were_asked_to_stop_go_on(configure: Any, tmp_path: Path) -> None:
    runs = [
        configure(tmp_path / f"of-{steps}", "gru", f"train.steps={steps}") for steps in (400, 5)
    ]
    asked: list[int] = []

    def stop(_: RunConfig, step: int) -> None:
        if step and not asked:
            asked.append(step)
            os.kill(os.getpid(), signal.SIGTERM)

    assert not train_side_by_side(runs, stop, at_once=1)
    assert len(_steps(runs[0])) < 400
    assert not runs[1].run_folder.exists()
    assert train_side_by_side(runs[:1], _unwatched)
    assert _steps(runs[0]) == list(range(1, 401))


def test_a_run_that_was_killed_is_no_mistake(
    configure: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, begun = configure(tmp_path, "gru", "train.steps=400"), list[subprocess.Popen[bytes]]()
    begin = training.begin

    def noted(*given: Any, **more: Any) -> subprocess.Popen[bytes]:
        begun.append(begin(*given, **more))
        return begun[-1]

    def kill(_: RunConfig, step: int) -> None:
        if step:
            begun[0].kill()

    monkeypatch.setattr(training, "begin", noted)
    with pytest.raises(Trouble, match=r"run: was ended by SIGKILL.*the same command goes on"):
        train_side_by_side([run], kill)


@pytest.mark.parametrize("begins", [True, False])
def test_a_run_that_another_process_trains_is_left_alone(
    configure: Any, tmp_path: Path, begins: bool
) -> None:
    """Also while that one's own process has yet to come so far as to hold the run's folder."""
    runs = [configure(tmp_path / name, "gru") for name in ("free", "held")]
    folder = runs[1].run_folder
    log = folder.with_name("run.log")
    log.write_text("at work")
    held = (folder.parent, "trains", ".run.lock") if begins else (folder, "trains")
    with locked(*held), pytest.raises(Trouble, match=r"held.*trains here; wait for it"):
        train_side_by_side(runs, _unwatched)
    assert log.read_text() == "at work"
    assert not runs[0].run_folder.exists()
