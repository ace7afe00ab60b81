"""What training learns from a batch: its unmasked targets and nothing else."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlt_dist.data.stream.loader import Batch
from rlt_dist.inference.forward import batch_loss, batch_nll
from rlt_dist.models.build import Model, initial_model
from rlt_dist.ops.noise import Noise

VOCABULARY = 11
MASKED = torch.tensor([[1, 1, 0, 1, 1], [0, 0, 0, 0, 0], [1, 1, 1, 1, 0]]) == 0


def batch(mask: Tensor = ~MASKED) -> Batch:
    tokens = torch.randint(VOCABULARY, (3, 6), generator=torch.Generator().manual_seed(0))
    start = torch.zeros(3, 5, dtype=torch.bool)
    cursors = torch.zeros(3, 4, dtype=torch.int64)
    return Batch(tokens, tokens[:, 1:], start, mask, torch.arange(3), cursors)


def learnt(model: Model, config: Any, of: Batch) -> list[Tensor]:
    """The loss and its gradients."""
    state, noise = model.empty_state(len(of.tokens)), Noise(0, 0, of.lanes)
    loss, _ = batch_loss(model, of, state, config, noise)
    gradients = torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True)
    return [loss.detach(), *gradients]


@pytest.fixture(params=["rlt1", "rlt2", "xl"])
def case(request: Any, configure: Any, tmp_path: Path) -> tuple[Model, Any]:
    dropped = ["model.dropout=0.0"] + ["model.dropatt=0.0"] * (request.param == "xl")
    config = configure(tmp_path, request.param, "train.precision=float64", *dropped)
    return initial_model(config.bounded_model, VOCABULARY, 0, torch.float64), config


def test_the_loss_is_the_sum_over_unmasked_targets(case: Any) -> None:
    model, config = case
    loss, *_ = learnt(model, config, batch())
    nll, _ = batch_nll(model, batch(), model.empty_state(3), config)
    assert abs(loss - nll[~MASKED].sum()) <= 1e-12 * loss


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_masked_token_that_is_not_finite_reaches_no_loss_and_no_gradient(
    case: Any, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, config = case
    expected = learnt(model, config, batch())
    forward = model.forward

    def spoilt(*inputs: Any) -> tuple[Tensor, Any]:
        output, state = forward(*inputs)
        return output.masked_fill(MASKED[..., None], value), state

    monkeypatch.setattr(model, "forward", spoilt)
    nll, _ = batch_nll(model, batch(), model.empty_state(3), config)
    assert not nll[MASKED].isfinite().any()
    for x, y in zip(learnt(model, config, batch()), expected, strict=True):
        assert torch.equal(x, y)


def test_a_batch_without_targets_teaches_nothing(case: Any) -> None:
    model, config = case
    nothing = learnt(model, config, batch(torch.zeros_like(MASKED)))
    assert all((tensor == 0).all() for tensor in nothing)


def test_losses_and_gradients_of_micro_batches_sum_to_those_of_the_batch(case: Any) -> None:
    model, config = case
    whole = learnt(model, config, batch())
    lanes = [learnt(model, config, batch().rows(slice(i, i + 1))) for i in range(3)]
    for x, *parts in zip(whole, *lanes, strict=True):
        assert (sum(parts) - x).abs().max() <= 1e-10 * x.abs().max().clamp(min=1e-6)
