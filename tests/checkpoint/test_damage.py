"""A checkpoint that is not whole is named and passed over; the one before it is used."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlt_dist.checkpoint.load import find_checkpoint
from rlt_dist.checkpoint.manifest import latest, verify
from rlt_dist.config.run import RunConfig
from rlt_dist.util.errors import UserError

OTHER = r"the manifest is that of another run \(train.seed: 1 -> 0\)"

Damage = Callable[[Path], str]
"""Damages a checkpoint folder; a part of what must be said of it."""


def largest(folder: Path) -> Path:
    return max(
        (p for p in folder.iterdir() if p.name != "manifest.json"), key=lambda p: p.stat().st_size
    )


def flip_a_bit(folder: Path) -> str:
    path = largest(folder)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return f"{path.name}: content does not match"


def truncate(folder: Path) -> str:
    path = largest(folder)
    path.write_bytes(path.read_bytes()[:-1])
    return f"{path.name}: "


def lengthen(folder: Path) -> str:
    path = largest(folder)
    path.write_bytes(path.read_bytes() + b"\0")
    return f"{path.name}: "


def empty(folder: Path) -> str:
    largest(folder).write_bytes(b"")
    return "0 bytes where the manifest says"


def remove_a_file(folder: Path) -> str:
    path = largest(folder)
    path.unlink()
    return f"file {path.name} is missing"


def remove_the_metadata(folder: Path) -> str:
    (folder / ".metadata").unlink()
    return "file .metadata is missing"


def remove_the_manifest(folder: Path) -> str:
    (folder / "manifest.json").unlink()
    return "it has no manifest.json"


def cut_the_manifest(folder: Path) -> str:
    path = folder / "manifest.json"
    path.write_bytes(path.read_bytes()[:40])
    return "manifest.json: damaged"


def fill_the_manifest_with_noise(folder: Path) -> str:
    (folder / "manifest.json").write_bytes(bytes(range(256)))
    return "manifest.json: damaged"


def remove_everything(folder: Path) -> str:
    shutil.rmtree(folder)
    folder.mkdir()
    return "it has no manifest.json"


KINDS = [
    flip_a_bit,
    truncate,
    lengthen,
    empty,
    remove_a_file,
    remove_the_metadata,
    remove_the_manifest,
    cut_the_manifest,
    fill_the_manifest_with_noise,
    remove_everything,
]
NAMES = [damage.__name__ for damage in KINDS]


def checkpoint(config: RunConfig, step: int) -> Path:
    return config.run_folder / "checkpoints" / f"step-{step:08}"


@pytest.mark.parametrize("damage", KINDS, ids=NAMES)
def test_the_newest_is_passed_over_by_name(
    run: RunConfig, capsys: pytest.CaptureFixture[str], damage: Damage
) -> None:
    said = damage(checkpoint(run, 5))
    assert latest(run.run_folder / "checkpoints") == checkpoint(run, 4)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("rlt-dist: damaged checkpoint passed over: ")
    assert "step-00000005" in lines[0]
    assert said in lines[0]


@pytest.mark.parametrize("damage", KINDS, ids=NAMES)
def test_a_damaged_checkpoint_asked_for_by_name_is_refused(run: RunConfig, damage: Damage) -> None:
    said = damage(checkpoint(run, 3))
    for use in (verify, find_checkpoint):
        with pytest.raises(UserError) as raised:
            use(checkpoint(run, 3))
        assert said in str(raised.value)
        assert "\n" not in str(raised.value)


def test_a_manifest_of_another_run_is_called_that(
    run: RunConfig, configure: Any, driver: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also of the same step, of files of the same names."""
    other = configure(tmp_path / "other", "rlt1", "checkpoint.every=1", "train.seed=1")
    driver.train(other)
    for step in (4, 5):
        shutil.copy(checkpoint(other, step) / "manifest.json", checkpoint(run, step))
        with pytest.raises(UserError, match=rf"step-0000000{step}/.*{OTHER}"):
            verify(checkpoint(run, step))
    capsys.readouterr()
    assert latest(run.run_folder / "checkpoints") == checkpoint(run, 3)
    first, second = capsys.readouterr().err.splitlines()
    assert re.search(f"step-00000005/.*{OTHER}", first)
    assert re.search(f"step-00000004/.*{OTHER}", second)


def test_a_manifest_of_another_step_or_number_of_lanes_is_not_called_that(
    run: RunConfig, configure: Any, driver: Any, tmp_path: Path
) -> None:
    """`--reset-state` changes lanes within a run."""
    shutil.copy(checkpoint(run, 4) / "manifest.json", checkpoint(run, 5))
    with pytest.raises(UserError, match=r"step-00000005: its manifest is of step 4$"):
        verify(checkpoint(run, 5))
    other = configure(tmp_path / "other", "rlt1", "data.lanes=4", "checkpoint.every=1")
    driver.train(other)
    shutil.copy(checkpoint(other, 5) / "manifest.json", checkpoint(run, 5))
    with pytest.raises(UserError, match=r"step-00000005/.*manifest('s hash| says \d+)$"):
        verify(checkpoint(run, 5))
    assert latest(run.run_folder / "checkpoints") == checkpoint(run, 4)


@pytest.mark.parametrize("damage", [flip_a_bit, remove_the_manifest])
def test_training_goes_on_from_the_one_before_and_ends_the_same(
    run: RunConfig, driver: Any, metrics: Any, finished: Path, damage: Damage
) -> None:
    for step in (4, 5):
        damage(checkpoint(run, step))
    watched = driver.train(run)
    assert [forward.step for forward in watched.forwards] == [4, 5]
    assert metrics(run.run_folder) == metrics(finished)
    for step in (4, 5):
        verify(checkpoint(run, step))


def test_when_all_are_damaged_training_stops_and_does_not_start_afresh(
    run: RunConfig, driver: Any, metrics: Any
) -> None:
    for step in range(1, 6):
        truncate(checkpoint(run, step))
    before = metrics(run.run_folder)
    with pytest.raises(UserError, match="none of its 5 checkpoints is whole"):
        driver.train(run)
    assert metrics(run.run_folder) == before


def test_a_folder_that_only_looks_like_a_partial_write_is_no_checkpoint(
    run: RunConfig, driver: Any
) -> None:
    folder = run.run_folder / "checkpoints"
    checkpoint(run, 5).rename(folder / ".step-00000005.partial")
    assert latest(folder) == checkpoint(run, 4)
    driver.train(run)
    assert not list(folder.glob(".*"))


def test_every_number_of_the_manifest_is_checked(run: RunConfig) -> None:
    path = checkpoint(run, 5) / "manifest.json"
    manifest = json.loads(path.read_text())
    name = next(iter(manifest["files"]))
    for key, value in (("bytes", 1), ("sha256", "0" * 64)):
        spoilt = json.loads(json.dumps(manifest))
        spoilt["files"][name][key] = value
        path.write_text(json.dumps(spoilt))
        with pytest.raises(UserError):
            verify(checkpoint(run, 5))


def test_only_the_newest_are_kept_and_the_one_just_written_always_is(
    run: RunConfig, configure: Any, driver: Any, tmp_path: Path
) -> None:
    """Also where damaged ones of later steps lie about from before."""
    for step in (4, 5):
        flip_a_bit(checkpoint(run, step))
    waiting = "checkpoint.asynchronous=false"
    config = configure(tmp_path, "rlt1", "checkpoint.every=1", "checkpoint.keep=1", waiting)
    kept = []

    def look(session: Any) -> None:
        session.model.register_forward_pre_hook(
            lambda *_: kept.append(latest(config.run_folder / "checkpoints"))
        )

    driver.train(config, prepare=look)
    assert kept == [checkpoint(run, 3), checkpoint(run, 4)]
    assert list((config.run_folder / "checkpoints").iterdir()) == [checkpoint(run, 5)]


def test_a_number_of_checkpoints_is_kept(configure: Any, driver: Any, tmp_path: Path) -> None:
    config = configure(tmp_path, "xl", "checkpoint.every=1", "checkpoint.keep=2")
    driver.train(config)
    names = sorted(path.name for path in (config.run_folder / "checkpoints").iterdir())
    assert names == ["step-00000004", "step-00000005"]
