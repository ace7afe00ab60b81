"""A step whose loss or gradient is not finite changes nothing but the data's position."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rlt_dist.mesh.world import open_world
from rlt_dist.util.errors import UserError

ALONE = {"OMP_NUM_THREADS": "1"}


def spoil_state(name: str, lane: int) -> Any:
    def prepare(session: Any) -> None:
        session.state[name][lane] = torch.nan

    return prepare


@pytest.mark.parametrize("model", ["rlt1", "xl"])
def test_a_spoilt_gradient_leaves_parameters_and_optimizer_to_the_bit(
    driver: Any, configure: Any, tmp_path: Path, metrics: Any, model: str
) -> None:
    watched = driver.train(
        configure(tmp_path, model, "validation.every=1"),
        prepare=lambda session: driver.spoil_gradient(session, {3}, 0),
    )
    records = metrics(tmp_path / "run")
    assert [record["skipped"] for record in records] == [0, 0, 1, 0, 0]
    assert [record["restarted_lanes"] for record in records] == [0, 0, 0, 0, 0]
    assert records[1]["validation"] == records[2]["validation"] != records[3]["validation"]
    before, after = watched.at(3), watched.at(4)
    for name, tensor in before.parameters.items():
        assert torch.equal(after.parameters[name], tensor)
    for name, tensor in before.optimizer.items():
        assert torch.equal(after.optimizer[name], tensor)
    assert watched.session.cursors[:, 0, 3].tolist() == [50] * 8


def test_after_a_spoilt_gradient_every_lane_keeps_its_new_state(
    driver: Any, configure: Any, tmp_path: Path
) -> None:
    watched = driver.train(
        configure(tmp_path), prepare=lambda session: driver.spoil_gradient(session, {3}, 0)
    )
    for name, tensor in watched.at(3).state_out.items():
        assert torch.equal(watched.at(4).state_in[name], tensor)
    assert not torch.equal(watched.at(4).tokens, watched.at(3).tokens)


@pytest.mark.parametrize(("model", "name"), [("rlt1", "decoder.0.k"), ("xl", "memory.1")])
def test_a_lane_with_spoilt_state_restarts_and_the_others_keep_theirs(
    driver: Any, configure: Any, tmp_path: Path, metrics: Any, model: str, name: str
) -> None:
    with open_world(ALONE) as world:
        driver.train(configure(tmp_path, model, "train.steps=2"), world)
        watched = driver.train(configure(tmp_path, model), world, spoil_state(name, lane=5))
    records = metrics(tmp_path / "run")
    assert [record["skipped"] for record in records] == [0, 0, 1, 0, 0]
    assert [record["restarted_lanes"] for record in records] == [0, 0, 1, 0, 0]
    left, taken = watched.at(3).state_out, watched.at(4).state_in
    others = [lane for lane in range(8) if lane != 5]
    for key, tensor in taken.items():
        assert torch.equal(tensor[others], left[key][others])
        if key != "tokens":
            assert not tensor[5].any(), f"{key} of the restarted lane is not as at a start"
    assert taken["tokens"].tolist() == [30] * 8
    assert watched.session.cursors[:, 0, 3].tolist() == [50] * 8


def test_a_restarted_lane_counts_its_positions_from_there(
    driver: Any, configure: Any, tmp_path: Path
) -> None:
    never = ("state.reset=never",)
    with open_world(ALONE) as world:
        driver.train(configure(tmp_path, "rlt1", "train.steps=2", *never), world)
        watched = driver.train(configure(tmp_path, "rlt1", *never), world, spoil_state("s", 2))
    assert watched.session.state["position"].tolist() == [50, 50, 20, 50, 50, 50, 50, 50]


def test_too_many_skips_in_a_row_stop_the_run_with_one_clear_line(
    driver: Any, configure: Any, tmp_path: Path, metrics: Any
) -> None:
    config = configure(tmp_path, "rlt1", "guard.max_skips=2", "checkpoint.every=1")
    with pytest.raises(UserError, match="not finite in 2 steps in a row, up to step 4") as raised:
        driver.train(config, prepare=lambda s: driver.spoil_gradient(s, {3, 4}, 0))
    assert "\n" not in str(raised.value)
    assert [record["step"] for record in metrics(config.run_folder)] == [1, 2, 3, 4]


def test_skips_that_are_not_in_a_row_do_not_stop_it(
    driver: Any, configure: Any, tmp_path: Path, metrics: Any
) -> None:
    config = configure(tmp_path, "rlt1", "guard.max_skips=2")
    driver.train(config, prepare=lambda s: driver.spoil_gradient(s, {1, 3, 5}, 0))
    assert [record["skipped"] for record in metrics(config.run_folder)] == [1, 0, 1, 0, 1]


def test_a_step_that_was_skipped_is_skipped_again_after_a_restart(
    driver: Any, configure: Any, tmp_path: Path, metrics: Any
) -> None:
    """State and cursors come from the checkpoint: nothing of the lost attempt is left."""
    every = ("checkpoint.every=2",)

    def spoil(session: Any) -> None:
        driver.spoil_gradient(session, {4}, 0)

    driver.train(configure(tmp_path / "whole", "xl", *every), prepare=spoil)
    config = configure(tmp_path / "broken", "xl", *every, "guard.max_skips=1")
    with pytest.raises(UserError):
        driver.train(config, prepare=spoil)
    driver.train(configure(tmp_path / "broken", "xl", *every), prepare=spoil)
    assert metrics(tmp_path / "broken" / "run") == metrics(tmp_path / "whole" / "run")


def test_metrics_of_a_skipped_step_are_json_that_every_reader_takes(
    driver: Any, configure: Any, tmp_path: Path, strict_json: Any
) -> None:
    driver.train(configure(tmp_path), prepare=lambda s: driver.spoil_gradient(s, {3}, 0))
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        strict_json(line)
