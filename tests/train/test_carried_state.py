"""What a lane carries from one segment to the next, as the model's forward sees it."""

import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

MODELS = ["rlt1", "rlt2", "xl"]


def pairs(forwards: list[Any]) -> list[tuple[Any, Any]]:
    return list(pairwise(forwards))


@pytest.mark.parametrize("model", MODELS)
def test_state_in_is_the_state_out_before_and_is_not_zero(
    driver: Any, configure: Any, tmp_path: Path, model: str
) -> None:
    watched = driver.train(configure(tmp_path, model))
    assert [forward.step for forward in watched.forwards] == [1, 2, 3, 4, 5]
    for before, after in pairs(watched.forwards):
        assert before.state_out.keys() == after.state_in.keys()
        for name, tensor in after.state_in.items():
            assert torch.equal(tensor, before.state_out[name])
            assert tensor.numel() and tensor.any(), f"{name} is zero"


@pytest.mark.parametrize("model", MODELS)
def test_state_is_carried_across_a_resume(
    driver: Any, configure: Any, tmp_path: Path, model: str
) -> None:
    config = configure(tmp_path, model, "checkpoint.every=3")
    before = driver.train(config).forwards
    shutil.rmtree(config.run_folder / "checkpoints" / "step-00000005")
    after = driver.train(config).forwards
    assert [forward.step for forward in after] == [4, 5]
    for name, tensor in after[0].state_in.items():
        assert torch.equal(tensor, before[2].state_out[name])
        assert tensor.any()
    assert torch.equal(after[0].tokens, before[3].tokens)


def test_micro_batches_carry_each_their_own_lanes(
    driver: Any, configure: Any, tmp_path: Path
) -> None:
    forwards = driver.train(configure(tmp_path, "rlt1", "train.micro_batch=2")).forwards
    for lanes in ([0, 1], [2, 3], [4, 5], [6, 7]):
        mine = [forward for forward in forwards if forward.lanes == lanes]
        assert len(mine) == 5
        for before, after in pairs(mine):
            assert torch.equal(after.state_in["s"], before.state_out["s"])


@pytest.mark.parametrize("model", MODELS)
def test_no_gradient_crosses_the_border_of_two_segments(
    driver: Any, configure: Any, tmp_path: Path, model: str
) -> None:
    attached = []

    def look(session: Any) -> None:
        session.model.register_forward_pre_hook(
            lambda _, inputs: attached.extend(t.requires_grad for t in inputs[2].values())
        )

    driver.train(configure(tmp_path, model), prepare=look)
    assert attached
    assert not any(attached)


def test_cursors_and_state_count_the_same_tokens(
    driver: Any, configure: Any, tmp_path: Path
) -> None:
    session = driver.train(configure(tmp_path)).session
    assert session.cursors[:, 0, 3].tolist() == [5 * 10] * 8
    assert torch.equal(session.state["tokens"], session.cursors[:, 0, 3])


def test_a_document_start_restarts_the_positions_unless_reset_is_never(
    driver: Any, configure: Any, tmp_path: Path
) -> None:
    by_document = driver.train(configure(tmp_path / "document"))
    never = driver.train(configure(tmp_path / "never", "rlt1", "state.reset=never"))
    assert any(forward.document_start.any() for forward in by_document.forwards)
    assert not any(forward.document_start.any() for forward in never.forwards)
    assert by_document.session.state["position"].min() < 10
    assert never.session.state["position"].tolist() == [50] * 8
    for one, other in zip(by_document.forwards, never.forwards, strict=True):
        assert torch.equal(one.tokens, other.tokens)


@pytest.mark.parametrize("model", ["rlt1", "xl"])
def test_a_bfloat16_run_keeps_float32_and_trains(
    driver: Any, configure: Any, tmp_path: Path, metrics: Any, model: str
) -> None:
    steps = ("train.precision=bfloat16", "train.steps=30", "schedule.warmup=3")
    kinds: dict[str, set[torch.dtype]] = {"gradient": set(), "state": set()}

    def look(session: Any) -> None:
        for parameter in session.model.parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda tensor: kinds["gradient"].add(tensor.grad.dtype)
            )

    watched = driver.train(configure(tmp_path, model, *steps), prepare=look)
    carried = [t for t in watched.session.state.values() if t.is_floating_point()]
    assert {tensor.dtype for tensor in watched.parameters.values()} == {torch.float32}
    assert {tensor.dtype for tensor in carried} == {torch.float32}
    assert {t.dtype for t in watched.session.optimizer.tensors().values()} == {torch.float32}
    assert kinds["gradient"] == {torch.float32}
    losses = [record["loss"] for record in metrics(tmp_path / "run")]
    assert sum(losses[-5:]) / 5 < losses[0] - 1.0


def test_bfloat16_products_are_really_bfloat16(
    driver: Any, configure: Any, tmp_path: Path, metrics: Any
) -> None:
    for precision in ("bfloat16", "float32"):
        driver.train(configure(tmp_path / precision, "rlt1", f"train.precision={precision}"))
    low, high = (metrics(tmp_path / name / "run") for name in ("bfloat16", "float32"))
    differences = [abs(a["loss"] - b["loss"]) for a, b in zip(low, high, strict=True)]
    assert 0 < max(differences) < 0.05
