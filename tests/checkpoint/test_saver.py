"""Saved while training goes on: the state of exactly one step, never two at once."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp

from rlt_dist.checkpoint import saver as saving
from rlt_dist.checkpoint.load import stored_tensors
from rlt_dist.checkpoint.manifest import Facts, checkpoints, read_manifest, verify
from rlt_dist.checkpoint.pieces import Pieces, pieces
from rlt_dist.checkpoint.saver import Saver
from rlt_dist.config.run import CheckpointConfig
from rlt_dist.mesh.world import World, open_world
from rlt_dist.util.errors import UserError
from rlt_dist.util.records import read_records

Tensors = dict[str, torch.Tensor]
TENSOR_BYTES = 4 * (7 * 5 + 3)


@pytest.fixture
def world() -> Iterator[World]:
    with open_world({"OMP_NUM_THREADS": "1"}) as alone:
        yield alone


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Nothing is written until it is open."""
    opened, write = threading.Event(), saving.save_checkpoint

    def behind_the_gate(*arguments: Any) -> Any:
        assert opened.wait(60)
        return write(*arguments)

    monkeypatch.setattr(saving, "save_checkpoint", behind_the_gate)
    return opened


def some_tensors() -> Tensors:
    """The first is cut into rows that lie apart, as a fused weight is."""
    return {"a": torch.randn(7, 5), "b": torch.randn(3)}


def as_pieces(tensors: Tensors) -> dict[str, Pieces]:
    cuts = {"a": {0: [range(4), range(4, 7)]}, "b": {}}
    return {name: pieces(t, t.shape, cuts[name]) for name, t in tensors.items()}


def facts(step: int) -> Facts:
    return Facts(
        step=step, tokens=0, tokenizer="t", corpus="c", identity={}, mesh="1x1x1", engine="t"
    )


def config(**choices: Any) -> CheckpointConfig:
    return CheckpointConfig.model_validate(choices)


def saved(folder: Path) -> Tensors:
    """Every tensor of a checkpoint."""
    kinds = stored_tensors(folder).items()
    tensors = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in kinds}
    dcp.load(tensors, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return tensors


def assert_same(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    different = [name for name in found if not torch.equal(found[name], expected[name])]
    assert different == []


def names(folder: Path) -> list[int]:
    return [int(path.name[-8:]) for path in checkpoints(folder)]


def test_what_is_saved_is_one_step_though_later_ones_change_it_before_it_is_written(
    world: World, tmp_path: Path, gate: threading.Event
) -> None:
    tensors, expected = some_tensors(), []
    with Saver(tmp_path, world, config()) as saver:
        for step in (1, 2, 3):
            expected.append({name: tensor.clone() for name, tensor in tensors.items()})
            saver.save(as_pieces(tensors), facts(step))
            for tensor in tensors.values():
                tensor.add_(1)
            assert names(tmp_path) == list(range(1, step))
            gate.set()
            saver.wait()
            gate.clear()
    for folder, whole in zip(checkpoints(tmp_path), expected, strict=True):
        assert_same(saved(folder), whole)
        assert verify(folder).tensor_bytes == TENSOR_BYTES


def test_loaded_is_what_was_saved_at_fifty_steps_of_a_run(
    configure: Any, driver: Any, tmp_path: Path
) -> None:
    run = configure(tmp_path, "rlt1", "checkpoint.every=1", "train.steps=50")
    expected: list[Tensors] = []

    def remember(session: Any) -> None:
        save = session.save

        def remembering(saver: Saver) -> None:
            contents = session.contents().pieces(session.local_model, session.mesh)
            whole = ((name, *of.blocks.values()) for name, of in contents.items())
            expected.append({name: only.clone() for name, only in whole})
            save(saver)

        session.save = remembering

    driver.train(run, prepare=remember)
    folders = checkpoints(run.run_folder / "checkpoints")
    assert len(folders) == len(expected) == 50
    for folder, whole in zip(folders, expected, strict=True):
        assert_same(saved(folder), whole)


def test_the_next_save_waits_for_the_one_before_and_training_does_not(
    world: World, tmp_path: Path, gate: threading.Event
) -> None:
    with Saver(tmp_path, world, config()) as saver:
        saver.save(as_pieces(some_tensors()), facts(1))
        assert saver.finished() == []
        assert names(tmp_path) == []
        threading.Timer(0.1, gate.set).start()
        saver.save(as_pieces(some_tensors()), facts(2))
        assert 1 in names(tmp_path)
        saver.wait()
        assert [saved.step for saved in saver.finished()] == [1, 2]
    assert names(tmp_path) == [1, 2]
    assert read_manifest(checkpoints(tmp_path)[0]).facts == facts(1)


def test_memory_of_the_copy_is_kept_and_new_shapes_get_new_memory() -> None:
    copy, tensors = saving.HostCopy(), some_tensors()
    once = copy.take(as_pieces(tensors))
    places = {name: [t.data_ptr() for t in of.blocks.values()] for name, of in once.items()}
    tensors["b"] = torch.randn(4)
    again = copy.take(as_pieces(tensors))
    assert [block.data_ptr() for block in again["a"].blocks.values()] == places["a"]
    (b,) = again["b"].blocks.values()
    assert torch.equal(b, tensors["b"])


@pytest.mark.parametrize("asynchronous", [True, False])
def test_failures_in_a_row_are_counted_and_a_success_forgets_them(
    world: World, tmp_path: Path, asynchronous: bool
) -> None:
    """The folder of checkpoints is a file, until it is not."""
    folder = tmp_path / "checkpoints"
    folder.touch()
    choices = config(asynchronous=asynchronous, max_failures=2)
    with Saver(folder, world, choices) as saver:

        def save(step: int) -> str | None:
            saver.save(as_pieces(some_tensors()), facts(step))
            saver.wait()
            (only,) = saver.finished()
            return only.failure

        assert "Not a directory" in str(save(1))
        assert not saver.gave_up
        with pytest.raises(UserError, match="step 1 could not be saved"):
            saver.check()
        folder.unlink()
        assert save(2) is None
        saver.check()
        (folder / "step-00000002").rename(tmp_path / "step-00000002")
        folder.rmdir()
        folder.touch()
        assert save(3)
        assert not saver.gave_up
        assert save(4)
        assert saver.gave_up
        folder.unlink()
        saver.save(as_pieces(some_tensors()), facts(5))
        assert saver.finished() == []
        with pytest.raises(UserError, match="step 4 could not be saved, like 1 before it") as ended:
            saver.check()
    assert ended.value.shared


def test_an_error_in_training_leaves_a_whole_checkpoint_and_no_thread(
    world: World, tmp_path: Path, gate: threading.Event
) -> None:
    before = threading.active_count()
    threading.Timer(0.1, gate.set).start()
    with pytest.raises(ZeroDivisionError), Saver(tmp_path, world, config()) as saver:
        saver.save(as_pieces(some_tensors()), facts(1))
        raise ZeroDivisionError
    verify(checkpoints(tmp_path)[0])
    assert threading.active_count() <= before


def test_a_defect_of_the_writer_is_raised_where_it_is_waited_for(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def defect(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(saving, "save_checkpoint", defect)
    with pytest.raises(ZeroDivisionError), Saver(tmp_path, world, config()) as saver:
        saver.save(as_pieces(some_tensors()), facts(1))
        saver.wait()


@pytest.mark.parametrize(
    ("keep", "keep_every", "left"),
    [(1, None, [6]), (2, None, [5, 6]), (1, 2, [2, 4, 6]), (2, 3, [3, 5, 6])],
)
def test_the_newest_stay_and_every_so_manyth_for_ever(
    world: World, tmp_path: Path, keep: int, keep_every: int | None, left: list[int]
) -> None:
    choices = config(every=1, keep=keep, keep_every=keep_every)
    with Saver(tmp_path, world, choices) as saver:
        for step in range(1, 7):
            saver.save(as_pieces(some_tensors()), facts(step))
    assert names(tmp_path) == left


def test_what_is_kept_for_ever_must_be_written_at_all(tmp_path: Path, configure: Any) -> None:
    choices = ("checkpoint.every=100", "checkpoint.keep_every=250")
    with pytest.raises(UserError, match=r"checkpoint.keep_every 250 is no multiple of"):
        configure(tmp_path, "rlt1", *choices)


def test_what_becomes_of_saves_is_in_the_metrics(
    configure: Any, driver: Any, tmp_path: Path
) -> None:
    run = configure(tmp_path, "rlt1", "checkpoint.every=1", "checkpoint.asynchronous=false")
    driver.train(run)
    records = read_records(run.run_folder / "metrics.jsonl")
    told = [record["checkpoint"] for record in records if "checkpoint" in record]
    assert [one["step"] for one in told] == [1, 2, 3, 4]
    assert all(one["failed"] == 0 and one["bytes"] > 0 and one["seconds"] > 0 for one in told)
