"""A run stopped at any step and resumed is the run that was never stopped, to the last bit."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp

from rlt_dist.checkpoint.load import find_checkpoint, stored_tensors
from rlt_dist.checkpoint.manifest import verify
from rlt_dist.mesh.world import open_world
from rlt_dist.util.errors import UserError

EVERY = ("checkpoint.every=1", "validation.every=2", "train.log_every=1")


class Stop(Exception):
    pass


def stop_in_step(step: int) -> Any:
    def prepare(session: Any) -> None:
        def stop(_: object, inputs: tuple[Any, ...]) -> None:
            if len(inputs) > 3 and inputs[3].step == step:  # validation has no noise
                raise Stop

        session.model.register_forward_pre_hook(stop)

    return prepare


def saved(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint."""
    kinds = stored_tensors(folder).items()
    tensors = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in kinds}
    dcp.load(tensors, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return tensors


@pytest.mark.parametrize("model", ["rlt1", "rlt2", "xl", "token", "gru"])
def test_stopped_after_any_step_and_resumed_nothing_differs(
    driver: Any, configure: Any, tmp_path: Path, metrics: Any, model: str
) -> None:
    whole = configure(tmp_path / "whole", model, *EVERY)
    driver.train(whole)
    expected = metrics(whole.run_folder)
    assert [record["step"] for record in expected] == [1, 2, 3, 4, 5]
    assert [record["step"] for record in expected if "validation" in record] == [2, 4, 5]
    for last in range(1, 5):
        config = configure(tmp_path / f"{last}", model, *EVERY)
        with pytest.raises(Stop):
            driver.train(config, prepare=stop_in_step(last + 1))
        assert len(metrics(config.run_folder)) == last
        resumed = driver.train(config)
        assert [forward.step for forward in resumed.forwards] == list(range(last + 1, 6))
        assert metrics(config.run_folder) == expected
        final = Path("checkpoints", "step-00000005")
        one, other = saved(whole.run_folder / final), saved(config.run_folder / final)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_stopped_in_every_step_a_run_still_arrives(
    driver: Any, configure: Any, tmp_path: Path, metrics: Any
) -> None:
    driver.train(configure(tmp_path / "whole"))
    config = configure(tmp_path / "broken", "rlt1", "checkpoint.every=1")
    for step in range(1, 6):
        with pytest.raises(Stop):
            driver.train(config, prepare=stop_in_step(step))
    driver.train(config)
    assert metrics(tmp_path / "broken" / "run") == metrics(tmp_path / "whole" / "run")


def test_steps_after_the_checkpoint_are_done_again_and_recorded_once(
    driver: Any, configure: Any, tmp_path: Path, metrics: Any
) -> None:
    config = configure(tmp_path, "xl", "checkpoint.every=2")
    driver.train(config)
    expected = metrics(config.run_folder)
    for later in ("step-00000004", "step-00000005"):
        shutil.rmtree(config.run_folder / "checkpoints" / later)
    driver.train(config)
    assert metrics(config.run_folder) == expected


def test_a_finished_run_has_nothing_left_to_do(
    driver: Any, configure: Any, tmp_path: Path, metrics: Any
) -> None:
    config = configure(tmp_path)
    driver.train(config)
    before = metrics(config.run_folder)
    again = driver.train(config)
    assert again.forwards == []
    assert metrics(config.run_folder) == before
    assert any("nothing left to do" in note for note in again.notes)


def test_the_learning_rate_goes_on_where_it_was(
    driver: Any, configure: Any, tmp_path: Path, metrics: Any
) -> None:
    config = configure(tmp_path, "xl", "checkpoint.every=3")
    driver.train(config)
    before = [record["learning_rate"] for record in metrics(config.run_folder)]
    shutil.rmtree(config.run_folder / "checkpoints" / "step-00000005")
    driver.train(config)
    assert [record["learning_rate"] for record in metrics(config.run_folder)] == before
    assert len(set(before)) == 5


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("model.window=5", "model.window"),
        ("model.dropout=0.2", "model.dropout"),
        ("data.lanes=4", "data.lanes"),
        ("data.segment=5", "data.segment"),
        ("data.max_document=30", "data.max_document"),
        ("train.seed=1", "train.seed"),
        ("state.reset=never", "state.reset"),
    ],
)
def test_what_makes_it_another_run_is_refused_by_name_and_nothing_is_changed(
    driver: Any, configure: Any, tmp_path: Path, override: str, named: str
) -> None:
    config = configure(tmp_path, "rlt1", "train.steps=2")
    driver.train(config)
    recorded = (config.run_folder / "config.yaml").read_bytes()
    changed = configure(tmp_path, "rlt1", "train.steps=2", override)
    with pytest.raises(UserError, match=named):
        driver.train(changed)
    assert (config.run_folder / "config.yaml").read_bytes() == recorded
    driver.train(config)


def test_another_corpus_or_tokenizer_is_refused_and_nothing_is_changed(
    driver: Any, configure: Any, tmp_path: Path, words_corpus: Path, other_corpus: Path
) -> None:
    config = configure(tmp_path, "rlt1", "train.steps=2")
    driver.train(config)
    recorded = (config.run_folder / "config.yaml").read_bytes()
    for path in (words_corpus, other_corpus):
        changed = configure(tmp_path, "rlt1", "train.steps=2", f"data.path={path}")
        with pytest.raises(UserError, match="was trained on another"):
            driver.train(changed)
        assert (config.run_folder / "config.yaml").read_bytes() == recorded


def test_a_corpus_that_was_moved_is_the_same_corpus(
    driver: Any, configure: Any, tmp_path: Path, small_corpus: Path, metrics: Any
) -> None:
    driver.train(configure(tmp_path / "whole", "xl", "checkpoint.every=3"))
    config = configure(tmp_path / "moved", "xl", "checkpoint.every=3")
    with pytest.raises(Stop):
        driver.train(config, prepare=stop_in_step(5))
    shutil.copytree(small_corpus, tmp_path / "elsewhere")
    path = f"data.path={tmp_path / 'elsewhere'}"
    driver.train(configure(tmp_path / "moved", "xl", "checkpoint.every=3", path))
    assert metrics(tmp_path / "moved" / "run") == metrics(tmp_path / "whole" / "run")


def test_more_steps_and_another_learning_rate_are_allowed_and_announced(
    driver: Any, configure: Any, tmp_path: Path, metrics: Any
) -> None:
    driver.train(configure(tmp_path, "rlt1", "train.steps=3"))
    more = ("train.steps=6", "optimizer.learning_rate=0.02")
    resumed = driver.train(configure(tmp_path, "rlt1", *more))
    said = "\n".join(resumed.notes)
    assert "changed since the last start: train.steps: 3 -> 6" in said
    assert "changed since the last start: optimizer.learning_rate: 0.01 -> 0.02" in said
    assert [record["step"] for record in metrics(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float64"])
def test_another_precision_goes_on_or_is_refused_in_one_line(
    driver: Any, configure: Any, tmp_path: Path, metrics: Any, precision: str
) -> None:
    """Whatever the choice, it is no crash."""
    first = "float64" if precision != "float64" else "float32"
    driver.train(configure(tmp_path, "rlt1", "train.steps=2", f"train.precision={first}"))
    changed = configure(tmp_path, "rlt1", f"train.precision={precision}")
    try:
        driver.train(changed)
    except UserError as error:
        assert "train.precision" in str(error)
    else:
        assert [record["step"] for record in metrics(tmp_path / "run")] == [1, 2, 3, 4, 5]


def test_checkpoints_of_another_model_are_refused_where_no_configuration_says_so(
    driver: Any, configure: Any, tmp_path: Path
) -> None:
    """Their folder was copied into a run of another shape."""
    driver.train(configure(tmp_path / "one", "rlt1", "train.steps=2"))
    for number, (model, change) in enumerate((("xl", []), ("rlt1", ["model.ffn=32"]))):
        other = configure(tmp_path / f"other{number}", model, *change)
        other.run_folder.mkdir(parents=True)
        source = tmp_path / "one" / "run" / "checkpoints"
        shutil.copytree(source, other.run_folder / "checkpoints")
        with pytest.raises(UserError, match=r"another (model|run)"):
            driver.train(other)


def test_a_checkpoint_whose_state_and_cursors_disagree_is_refused(
    driver: Any, configure: Any, tmp_path: Path
) -> None:
    config = configure(tmp_path, "rlt1", "train.steps=2")
    with open_world({"OMP_NUM_THREADS": "1"}) as world:
        session = driver.train(config, world).session
        session.cursors[3, 0, 3] += 1
        with session.saver() as saver:
            session.save(saver)
        verify(find_checkpoint(config.run_folder))
    with pytest.raises(UserError, match="state and data cursors do not agree"):
        driver.train(configure(tmp_path, "rlt1"))


def test_a_run_folder_without_checkpoints_starts_afresh_with_its_new_tokenizer(
    driver: Any, configure: Any, tmp_path: Path, words_corpus: Path, metrics: Any
) -> None:
    with pytest.raises(Stop):
        driver.train(configure(tmp_path), prepare=stop_in_step(3))
    config = configure(tmp_path, "rlt1", f"data.path={words_corpus}")
    driver.train(config)
    assert [record["step"] for record in metrics(config.run_folder)] == [1, 2, 3, 4, 5]
    tokenizer = (config.run_folder / "tokenizer.json").read_bytes()
    assert tokenizer == (words_corpus / "tokenizer.json").read_bytes()


def test_opening_a_session_does_not_move_it(configure: Any, driver: Any, tmp_path: Path) -> None:
    config = configure(tmp_path, "rlt1", "train.steps=2")
    driver.train(config)
    for _ in range(2):
        alone = open_world({"OMP_NUM_THREADS": "1"})
        with alone as world, driver.opened(config, world) as session:
            assert session.step == 2
