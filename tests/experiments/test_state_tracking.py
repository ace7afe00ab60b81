"""State tracking: what is trained on, and the command from its corpus to its exit status."""

import csv
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from rlt_dist.checkpoint.run_folder import METRICS
from rlt_dist.cli import experiment_state_tracking
from rlt_dist.data.corpus.index import load_corpus
from rlt_dist.data.stream.loader import Batch, LaneLoader
from rlt_dist.data.stream.mixture import Share
from rlt_dist.data.stream.reading import Reading
from rlt_dist.experiments.state_tracking import corpora, score
from rlt_dist.experiments.state_tracking.corpora import Corpus
from rlt_dist.experiments.state_tracking.recipes import (
    MODELS,
    RECIPES,
    Recipe,
    fitted,
    recipe_of,
    run_config,
)
from rlt_dist.experiments.state_tracking.results import decisive
from rlt_dist.experiments.state_tracking.run import FED_BACK, SCORES
from rlt_dist.experiments.state_tracking.score import Trial
from rlt_dist.jobs.status import last_record
from rlt_dist.parallel.plan.counts import parameters_of
from rlt_dist.tasks.catalogue import TASKS
from rlt_dist.tasks.task import FIRST
from rlt_dist.util.errors import UserError
from rlt_dist.util.lock import holder, locked
from rlt_dist.util.records import read_records

Once = Callable[[str, Callable[[Path], object]], Path]
SMALL = ["width=16", "ffn=16", "lanes=8", "rows=32", "lengths=[2,3,5]", "warmup=5"]


def rows_of(corpus: Path, recipe: Recipe, segment: int, steps: int) -> list[Batch]:
    share = Share(load_corpus(corpus).split("train"), 1)
    loader = LaneLoader(Reading((share,), recipe.lanes, segment, 0), range(recipe.lanes))
    return [loader.next() for _ in range(steps)]


@pytest.mark.parametrize("every", [True, False])
def test_every_segment_holds_whole_programs_of_all_lengths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: bool
) -> None:
    """Through several shards and epochs."""
    monkeypatch.setattr(corpora, "_BLOCK", 12)
    recipe = recipe_of("parity", [*SMALL, "steps=100"])
    corpus = Corpus(tmp_path, "parity", recipe, every)
    corpus.make()
    assert len(load_corpus(corpus.path).split("train").shards) == 3
    sizes = [length + 1 for length in recipe.lengths]
    orders = set()
    for batch in rows_of(corpus.path, recipe, sum(sizes), 15):
        for row in range(recipe.lanes):
            starts = batch.document_start[row].nonzero()[:, 0].tolist()
            assert starts[0] == 0
            lengths = np.diff([*starts, sum(sizes)])
            assert sorted(lengths) == sorted(sizes)
            orders.add(tuple(lengths))
            for start, length in zip(starts, lengths, strict=True):
                here = slice(start, start + length - 1)
                states = (batch.tokens[row, here] - FIRST).cumsum(0) % 2
                assert (batch.targets[row, here] - FIRST)[-1] == states[-1]
                if every:
                    assert (batch.targets[row, here] - FIRST == states).all()
                scored = batch.loss_mask[row, start : start + length].tolist()
                assert scored == [every] * (length - 2) + [True, False]
    assert len(orders) > 3


def test_a_corpus_is_made_once_for_a_recipe(tmp_path: Path) -> None:
    recipe = recipe_of("mod5", ["lanes=8", "rows=16", "lengths=[3,5]"])
    corpus = Corpus(tmp_path, "mod5", recipe, every=True)
    corpus.make()
    before = (corpus.path / "index.json").stat().st_mtime_ns
    corpus.make()
    assert (corpus.path / "index.json").stat().st_mtime_ns == before
    splits = load_corpus(corpus.path).splits
    assert {name: split.documents for name, split in splits.items()} == {
        "train": 32,
        "validation": 16,
    }
    others = [
        replace(corpus, every=False),
        replace(corpus, recipe=recipe.model_copy(update={"lengths": (3, 7)})),
    ]
    assert len({each.path for each in [corpus, *others]}) == 3


def test_the_command_has_every_task_and_model_with_a_recipe() -> None:
    assert get_args(experiment_state_tracking.Task) == tuple(TASKS) == tuple(RECIPES)
    assert get_args(experiment_state_tracking.Model) == MODELS


def test_models_have_as_many_parameters() -> None:
    recipe, vocabulary = recipe_of("s5_swaps", []), TASKS["s5_swaps"]().tokenizer.vocabulary
    found = {
        model: parameters_of(fitted(model, recipe, vocabulary, 32), vocabulary) for model in MODELS
    }
    assert fitted("rlt1", recipe, vocabulary, 32).ffn == recipe.ffn
    assert all(found["rlt1"] <= each < 1.02 * found["rlt1"] for each in found.values()), found


def test_a_recipes_values_can_be_changed_and_are_checked() -> None:
    assert recipe_of("parity", ["steps=7", "lengths=[1,2]"]).lengths == (1, 2)
    with pytest.raises(UserError, match="did you mean 'steps'"):
        recipe_of("parity", ["step=7"])
    with pytest.raises(UserError, match="lanes 100 do not divide"):
        recipe_of("parity", ["lanes=100"])


LENGTHS, STEPS = (4, 70), 60


def words(output: Path, *more: str) -> list[str]:
    given = ["--task", "parity", "--seeds", "0,1", "--lengths", ",".join(map(str, LENGTHS))]
    given += ["--programs", "300", "--output", str(output), *more]
    return ["experiment", "state-tracking", *given, *SMALL, f"steps={STEPS}"]


def run_of(output: Path, seed: int) -> Path:
    return output / "runs" / f"parity-every-rlt1-{seed}"


def kill_on_the_way(output: Path) -> None:
    """Start the experiment with one seed, and kill it when a few steps are done."""
    command = [sys.executable, "-m", "rlt_dist", *words(output, "--seeds", "0")]
    process = subprocess.Popen(command)
    while last_record(run_of(output, 0) / METRICS).get("step", 0) < 10:
        assert process.poll() is None
        time.sleep(0.02)
    process.kill()
    process.wait()
    while holder(run_of(output, 0)):  # its own process is asked to end, and saves
        time.sleep(0.05)


@pytest.fixture
def shown(once: Once, command: Any) -> Path:
    """The folder of an experiment that was killed and gone on with, and how that ended."""

    def make(folder: Path) -> None:
        kill_on_the_way(folder / "out")
        given = ("--json", "--target", "0.999", "--target-length", "70")
        code, out, _ = command(*words(folder / "out", *given))
        (folder / "said.jsonl").write_text(out)
        (folder / "status").write_text(str(code))

    return once("state_tracking", make)


def test_what_was_killed_goes_on_and_a_missed_target_is_told(shown: Path) -> None:
    for seed in (0, 1):
        folder = run_of(shown / "out", seed)
        log = folder.with_name(f"{folder.name}.log").read_text()
        assert ("resumed from" in log) == (seed == 0)
        steps = [record["step"] for record in read_records(folder / METRICS)]
        assert steps == list(range(1, STEPS + 1))
    assert (shown / "status").read_text() == "1"


def test_each_row_says_what_it_took(shown: Path, strict_json: Any) -> None:
    rows = [strict_json(line) for line in (shown / "said.jsonl").read_text().splitlines()]
    places = {(row["seed"], row["length"], row["cut"]) for row in rows}
    # As far as in training, but for what has nothing else to go by.
    assert all(row["reach"] == (row["length"] if row["cut"] else 5) for row in rows)
    assert places == {(s, n, cut) for s in (0, 1) for n in LENGTHS for cut in (False, True)}
    assert len(rows) == len(places)
    for row in rows:
        assert (row["task"], row["model"], row["supervised"]) == ("parity", "rlt1", "every")
        assert 0 <= row["whole"] <= min(row["final"], row["prefix"]) <= 1
        assert row["tokens"] == STEPS * 8 * (3 + 4 + 6)
        assert row["trained_on"] == STEPS * 8 * 3
        assert row["flops"] > 6 * row["parameters"] * row["tokens"] * 0.9
        assert row["recipe"]["lengths"] == [2, 3, 5]
        assert row["config"]["model"]["d_model"] == 16
        assert row["seconds"] > 0
    assert strict_json((shown / "out" / "results.json").read_text()) == {"state_tracking": rows}
    with (shown / "out" / "results.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [float(each["final"]) for each in table] == [row["final"] for row in rows]
    assert table[0]["recipe.lengths"] == "2 3 5"
    assert (shown / "out" / "parity-every.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_done_is_not_done_again(command: Any, shown: Path) -> None:
    files = [run_of(shown / "out", seed) / name for seed in (0, 1) for name in (METRICS, SCORES)]
    before = [file.read_bytes() for file in files]
    code, out, _ = command(*words(shown / "out", "--target", "0"))
    assert code == 0
    assert "feedback cut" in out
    assert [file.read_bytes() for file in files] == before


def test_mistakes_are_told_before_anything_is_made(
    command: Any, is_one_error: Any, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    is_one_error(command(*words(output, "--target-length", "5")), "--target-length 5")
    is_one_error(command(*words(output, "--seeds", "0,x")), "--seeds 0,x")
    is_one_error(command(*words(output, "--lengths", "0")), "--lengths 0")
    odd = words(output, "--task", "mod5", "--lengths", "4")
    is_one_error(command(*odd, "lengths=[3]"), "of length 4", "odd")
    is_one_error(command(*words(output), "width=15"), "rlt1 by the recipe", "15")
    is_one_error(command(*words(output), "lengths=[]"), "lengths", "at least 1 item")
    is_one_error(command(*words(output), "tested=[]"), "tested", "at least 1 item")
    is_one_error(command(*words(output), "ffn=9000"), "ffn", "less than or equal to 4096")
    for task in ("mod5", "addition"):
        final = words(output, "--task", task, "--supervise", "final", "--lengths", "5")
        is_one_error(command(*final, "lengths=[3]"), f"{task} has no states on the way")
    for share in ("nan", "99.9", "-0.1"):
        assert command(*words(output, "--target", share))[0] == 2
    assert not output.exists()


def test_what_cannot_be_compared_is_not_put_together(
    command: Any, is_one_error: Any, shown: Path
) -> None:
    other = words(shown / "out", "--seeds", "7", "--model", "gru")
    is_one_error(command(*other, "rate=0.5"), "runs of parity by another recipe", "-> 0.5")
    assert not list((shown / "out" / "runs").glob("*gru*"))


def test_a_seed_is_tested_by_one_process_at_a_time(command: Any, shown: Path) -> None:
    with locked(run_of(shown / "out", 1), "tests what was trained"):
        code, _, said = command(*words(shown / "out"))
    assert code == 1
    assert "tests what was trained here" in said


def test_a_plot_has_each_test_of_a_seed_once() -> None:
    about = {"task": "parity", "supervised": "every", "model": "rlt1", "cut": False, "length": 8}
    rows: list[dict[str, Any]] = [
        about | {"seed": 0, "programs": 2048, "final": 0.2},
        about | {"seed": 0, "programs": 2048, "final": 0.3},
        about | {"seed": 0, "programs": 8, "final": 0.4},
        about | {"seed": 1, "programs": 8, "final": 0.5},
    ]
    assert {row["seed"]: row["final"] for row in decisive(rows)} == {0: 0.3, 1: 0.5}


@pytest.mark.parametrize("model", MODELS)
def test_every_model_can_be_as_large_as_the_largest_recipe(model: str) -> None:
    recipe = recipe_of("parity", ["width=4096", "ffn=4096"])
    wanted = parameters_of(fitted("rlt1", recipe, 5, 32), 5)
    assert wanted <= parameters_of(fitted(model, recipe, 5, 32), 5) < 1.01 * wanted


def test_scores_do_not_depend_on_the_pieces_that_are_scored(
    shown: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, trial = run_of(shown / "out", 0), Trial("parity", 70, 50, 70, cut=False)
    _, _, at_once = score.score(folder, trial)
    monkeypatch.setattr(score, "_ROWS", 7)
    monkeypatch.setattr(score, "_TOKENS", 11)
    assert score.score(folder, trial)[2] == at_once
    for other in (replace(trial, cut=True), replace(trial, reach=5)):
        assert score.score(folder, other)[2] != at_once


@pytest.mark.parametrize("model", MODELS)
def test_every_model_is_trained_and_tested(command: Any, tmp_path: Path, model: str) -> None:
    recipe, task = recipe_of("five_state", [*SMALL, "steps=2"]), TASKS["five_state"]()
    corpus = Corpus(tmp_path, "five_state", recipe, every=True)
    corpus.make()
    vocabulary, folder = task.tokenizer.vocabulary, tmp_path / "run"
    given = (recipe, model, vocabulary, recipe.lengths)
    (tmp_path / "run.yaml").write_text(run_config(folder, corpus.path, 0, *given).to_yaml())
    assert command("train", tmp_path / "run.yaml")[0] == 0
    reach = None if model == "gru" else 20
    for cut in (False, True)[: 1 + (model in FED_BACK)]:
        _, _, found = score.score(folder, Trial("five_state", 20, 50, reach, cut))
        assert 0 < found.prefix < 1


def test_an_answer_that_is_right_after_each_of_its_tokens_is_the_one_decoded(
    command: Any, tmp_path: Path
) -> None:
    given = ["--task", "addition", "--model", "gru", "--seeds", "0", "--lengths", "1", "--json"]
    recipe = ["lengths=[1]", "steps=100", "lanes=32", "rows=320", "rate=0.01", "warmup=10"]
    code, out, _ = command(
        *("experiment", "state-tracking", *given, "--output", tmp_path), *recipe, "width=32"
    )
    row = json.loads(out)
    assert code == 0
    assert 0.1 < row["whole"] == row["decoded"] < row["prefix"]
    assert row["final"] == 1
