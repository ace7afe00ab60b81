"""A run keeps to its own folder: it overwrites nobody's files and shares with no other run."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from rlt_dist.config.run import RunConfig
from rlt_dist.mesh.world import open_world
from rlt_dist.util.errors import UserError

ALONE = {"OMP_NUM_THREADS": "1"}


def test_a_second_training_in_the_same_folder_is_refused_and_changes_nothing(
    configure: Any, driver: Any, tmp_path: Path, metrics: Any
) -> None:
    config = configure(tmp_path, "rlt1", "train.steps=2")
    driver.train(config)
    before = metrics(config.run_folder)
    with open_world(ALONE) as world, driver.opened(config, world):
        second = driver.opened(config, world)
        with pytest.raises(UserError, match=r"process \d+ on .* trains here"):
            second.__enter__()
    assert metrics(config.run_folder) == before
    with open_world(ALONE) as world, driver.opened(config, world) as session:
        assert session.step == 2


@pytest.mark.parametrize("name", ["config.yaml", "tokenizer.json", "notes.txt"])
def test_a_folder_with_a_persons_own_files_is_refused_and_they_stay(
    configure: Any, driver: Any, tmp_path: Path, name: str
) -> None:
    config = configure(tmp_path, "rlt1")
    config.run_folder.mkdir()
    mine = config.run_folder / name
    mine.write_text("# mine\n")
    with pytest.raises(UserError, match=f"holds {name}, which no run made"):
        driver.train(config)
    assert [path.name for path in config.run_folder.iterdir()] == [name]
    assert mine.read_text() == "# mine\n"


def test_a_corpus_is_no_run_folder(
    configure: Any, driver: Any, small_corpus: Path, tmp_path: Path
) -> None:
    corpus = shutil.copytree(small_corpus, tmp_path / "run")
    before = {path.name: path.read_bytes() for path in corpus.iterdir()}
    with pytest.raises(UserError, match="which no run made"):
        driver.train(configure(tmp_path, "rlt1"))
    assert {path.name: path.read_bytes() for path in corpus.iterdir()} == before


@pytest.mark.parametrize("folder", ["", ".", "/"])
def test_a_run_needs_a_folder_of_its_own(configure: Any, tmp_path: Path, folder: str) -> None:
    content = configure(tmp_path, "rlt1").model_dump()
    with pytest.raises(ValueError, match="no folder of its own"):
        RunConfig.model_validate(content | {"run_folder": folder})


def test_a_moved_run_goes_on_where_it_is_and_only_when_told(
    configure: Any, driver: Any, command: Any, is_one_error: Any, metrics: Any, tmp_path: Path
) -> None:
    config = configure(tmp_path, "rlt1", "train.steps=2")
    driver.train(config)
    moved = tmp_path / "moved"
    config.run_folder.rename(moved)
    told = command("train", moved / "config.yaml", "train.steps=3")
    is_one_error(told, f"add run_folder={moved}")
    assert not config.run_folder.exists()
    code, _, _ = command("train", moved / "config.yaml", "train.steps=3", f"run_folder={moved}")
    assert code == 0
    assert [record["step"] for record in metrics(moved)] == [1, 2, 3]


def test_what_makes_it_this_run_is_in_the_checkpoint_and_not_only_in_its_configuration(
    configure: Any, driver: Any, tmp_path: Path
) -> None:
    config = configure(tmp_path, "rlt1", "train.steps=2")
    driver.train(config)
    (config.run_folder / "config.yaml").unlink()
    for change in ("train.seed=5", "data.segment=4", "state.reset=never", "data.lanes=4"):
        with pytest.raises(UserError, match=f"another run .*{change.partition('=')[0]}"):
            driver.train(configure(tmp_path, "rlt1", change))


def test_recorded_paths_mean_the_same_from_everywhere(
    configure: Any, driver: Any, small_corpus: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(small_corpus.parent)
    config = configure(tmp_path, "rlt1", f"data.path={small_corpus.name}", "train.steps=2")
    driver.train(config)
    assert f"path: {small_corpus}" in (config.run_folder / "config.yaml").read_text()
