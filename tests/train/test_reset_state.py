"""`--reset-state`: what goes on, what starts afresh, and how many tokens have been seen."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlt_dist.checkpoint.explain import after_reset, seen
from rlt_dist.checkpoint.load import load_whole
from rlt_dist.checkpoint.manifest import read_manifest
from rlt_dist.data.stream.lanes import Cursor
from rlt_dist.mesh.world import open_world
from rlt_dist.util.errors import UserError

FEWER = ("train.steps=4", "data.lanes=4", "checkpoint.every=1")


def checkpoint(run_folder: Path, step: int) -> Path:
    return run_folder / "checkpoints" / f"step-{step:08}"


def cursors(run_folder: Path, step: int) -> torch.Tensor:
    return load_whole(checkpoint(run_folder, step), ["cursors"])["cursors"]


def told(watched: Any) -> str:
    return next(note for note in watched.notes if note.startswith("--reset-state"))


@pytest.fixture
def saved(driver: Any, configure: Any, tmp_path: Path) -> Path:
    """The folder of a run of 8 lanes, two steps of 10 tokens done, which goes on in `run`."""
    driver.train(configure(tmp_path, "rlt1", "train.steps=2"))
    return tmp_path


def test_another_number_of_lanes_needs_to_be_asked_for(
    driver: Any, configure: Any, saved: Path
) -> None:
    with pytest.raises(UserError, match=r"data.lanes: 8 -> 4.*--reset-state"):
        driver.train(configure(saved, "rlt1", *FEWER))


def test_parameters_and_optimizer_go_on_and_all_lanes_start_an_epoch_with_empty_state(
    driver: Any, configure: Any, saved: Path
) -> None:
    config = configure(saved, "rlt1", *FEWER)
    before = checkpoint(config.run_folder, 2)
    watched = driver.train(config, reset_state=True)
    first = watched.at(3)
    assert first.lanes == [0, 1, 2, 3]
    for name, tensor in first.parameters.items():
        assert torch.equal(tensor, load_whole(before, [f"model.{name}"])[f"model.{name}"])
    for name, tensor in first.optimizer.items():
        whole = load_whole(before, [f"optimizer.{name}"])[f"optimizer.{name}"]
        assert torch.equal(tensor, whole)
    assert first.document_start[:, 0].all()
    assert not any(tensor.any() for tensor in first.state_in.values() if tensor.numel())
    begun = cursors(config.run_folder, 2)[..., 0].max()
    after = cursors(config.run_folder, 3)
    assert (after[..., 0] == begun + 1).all()
    assert seen(after).tolist() == [10] * 4
    assert "8 lanes became 4" in told(watched)
    assert f"epoch {begun + 1}," in told(watched)


def test_tokens_seen_are_counted_on_in_metrics_and_later_checkpoints(
    driver: Any, configure: Any, saved: Path, metrics: Any
) -> None:
    config = configure(saved, "rlt1", *FEWER)
    driver.train(config, reset_state=True)
    driver.train(configure(saved, "rlt1", *FEWER, "train.steps=5"))
    counted = [record["tokens"] for record in metrics(config.run_folder)]
    assert counted == [80, 160, 200, 240, 280]
    steps = (2, 3, 4, 5)
    facts = [read_manifest(checkpoint(config.run_folder, step)).facts.tokens for step in steps]
    assert facts == [160, 200, 240, 280]


def test_after_the_change_a_stopped_run_is_the_run_that_was_not_stopped(
    driver: Any, configure: Any, tmp_path: Path, metrics: Any
) -> None:
    for name, stops in (("whole", (6,)), ("stopped", (4, 6))):
        driver.train(configure(tmp_path / name, "xl", "train.steps=2"))
        for number, last in enumerate(stops):
            steps = ("train.steps=6", "schedule.warmup=2", f"checkpoint.every={last}")
            config = configure(tmp_path / name, "xl", "data.lanes=12", *steps)
            stop = stop_after(last) if last < 6 else lambda _: None
            try:
                driver.train(config, prepare=stop, reset_state=not number)
            except Stop:
                continue
    assert metrics(tmp_path / "stopped" / "run") == metrics(tmp_path / "whole" / "run")


class Stop(Exception):
    pass


def stop_after(step: int) -> Any:
    def prepare(session: Any) -> None:
        def stop(_: object, inputs: tuple[Any, ...]) -> None:
            if inputs[3].step > step:
                raise Stop

        session.model.register_forward_pre_hook(stop)

    return prepare


@pytest.mark.parametrize("lanes", [4, 8])
def test_the_same_command_goes_on_without_emptying_the_state_again(
    driver: Any, configure: Any, saved: Path, lanes: int
) -> None:
    same = (f"data.lanes={lanes}", "checkpoint.every=1")
    driver.train(configure(saved, "rlt1", *same, "train.steps=3"), reset_state=True)
    longer = configure(saved, "rlt1", *same, "train.steps=4")
    watched = driver.train(longer, reset_state=True)
    assert told(watched).endswith("the state was emptied at step 2, and goes on")
    assert watched.at(4).state_in["s"].any()
    driver.train(configure(saved, "rlt1", *same, "train.steps=5"))
    asked_again = driver.train(configure(saved, "rlt1", *same, "train.steps=6"), reset_state=True)
    assert not asked_again.at(6).state_in["s"].any()


def test_with_the_same_lanes_each_goes_on_where_it_was_with_empty_state(
    driver: Any, configure: Any, saved: Path
) -> None:
    config = configure(saved, "rlt1", "train.steps=3")
    driver.train(configure(saved / "whole", "rlt1", "train.steps=3"))
    watched = driver.train(config, reset_state=True)
    first = watched.at(3)
    assert "go on where they were" in told(watched)
    assert first.state_in["tokens"].tolist() == [20] * 8
    others = {name: x for name, x in first.state_in.items() if name != "tokens" and x.numel()}
    assert not any(tensor.any() for tensor in others.values())
    expected = cursors(saved / "whole" / "run", 3)
    assert torch.equal(cursors(config.run_folder, 3), expected)


def test_state_that_disagrees_with_its_cursor_is_refused_by_lane_and_can_be_left_behind(
    driver: Any, configure: Any, tmp_path: Path
) -> None:
    config = configure(tmp_path, "rlt1", "train.steps=2")
    with open_world({"OMP_NUM_THREADS": "1"}) as world:
        session = driver.train(config, world).session
        session.state["tokens"][3] -= 4
        with session.saver() as saver:
            session.save(saver)
    longer = configure(tmp_path, "rlt1", "train.steps=3")
    with pytest.raises(UserError, match="lane 3 carries state of 16 tokens and has read 20"):
        driver.train(longer)
    first = driver.train(longer, reset_state=True).at(3)
    assert first.state_in["tokens"].tolist() == [20] * 8


def test_of_a_mixture_each_corpus_begins_an_epoch_of_its_own(
    driver: Any, configure: Any, tmp_path: Path, mixed: str
) -> None:
    both = ("data.path=null", mixed, "data.segment=220", "checkpoint.every=1")
    config = configure(tmp_path, "rlt1", *both, "train.steps=2")
    driver.train(config)
    before = cursors(config.run_folder, 2)
    begun = before[..., 0] + (before[..., 1:3] > 0).any(-1)
    watched = driver.train(
        configure(tmp_path, "rlt1", *both, "train.steps=3", "data.lanes=4"), reset_state=True
    )
    epochs = begun.amax(0).tolist()
    assert f"epoch {epochs[0]}, {epochs[1]}," in told(watched)
    assert seen(cursors(config.run_folder, 3)).tolist() == [220] * 4


@settings(max_examples=30)
@given(
    st.lists(st.tuples(*[st.integers(0, 3)] * 3), min_size=1, max_size=6),
    st.integers(1, 8),
)
def test_no_lane_starts_an_epoch_that_another_had_begun(
    places: list[tuple[int, int, int]], lanes: int
) -> None:
    stored = torch.tensor([[[*place, 7]] for place in places])
    found, _ = after_reset(stored, lanes)
    if lanes == len(places):
        assert torch.equal(found, stored)
        return
    begun = max((epoch + 1 if document or offset else epoch) for epoch, document, offset in places)
    assert found.tolist() == [[list(Cursor(epoch=begun).to_tuple())]] * lanes
