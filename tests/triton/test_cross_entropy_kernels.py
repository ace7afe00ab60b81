"""The loss by kernels is the loss in torch, gradients included, on any number of processes."""

import threading
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from rlt_dist.ops.cross_entropy import linear_cross_entropy, linear_nll
from rlt_dist.ops.triton import cross_entropy


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that few tokens and ids are several blocks, on several programs."""
    monkeypatch.setattr(cross_entropy, "blocks", lambda _: cross_entropy.Blocks(16, 16, 16, 4, 1))
    monkeypatch.setattr(cross_entropy, "_PROGRAMS", 6)
    monkeypatch.setattr("rlt_dist.ops.cross_entropy._LEAST_TOKENS", 20)
    monkeypatch.setattr("rlt_dist.ops.cross_entropy._OF_KERNELS", 1)
    monkeypatch.setenv("RLT_DIST_OPS", "triton")
    alone, launch = threading.Lock(), cross_entropy.launch

    def launched(*arguments: Any, **constants: Any) -> None:
        """The interpreter has one grid for all threads."""
        with alone:
            launch(*arguments, **constants)

    monkeypatch.setattr(cross_entropy, "launch", launched)


def problem(tokens: int, vocabulary: int, bias: bool) -> tuple[list[Tensor], Tensor]:
    """Leaves in float64: hidden, weight, bias; and targets."""
    chance = torch.Generator().manual_seed(tokens + vocabulary)
    shapes = [(tokens, 21), (vocabulary, 21), (vocabulary,)][: 3 if bias else 2]
    leaves = [torch.randn(shape, generator=chance, dtype=torch.float64) for shape in shapes]
    return [x.requires_grad_() for x in leaves], torch.randint(
        vocabulary, (tokens,), generator=chance
    )


def definition(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
    logits = torch.nn.functional.linear(hidden, weight, bias)
    return -logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]


def operands(leaves: list[Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
    return leaves[0], leaves[1], leaves[2] if len(leaves) == 3 else None


def assert_close(x: Tensor, y: Tensor, tolerance: float = 1e-5) -> None:
    assert x.shape == y.shape
    assert (x.double() - y).abs().max() <= tolerance * y.abs().max().clamp(min=1e-6)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("tokens", "vocabulary"), [(43, 53), (5, 100), (1, 1), (16, 32)])
def test_loss_and_gradients_are_those_of_the_definition(
    tokens: int, vocabulary: int, bias: bool
) -> None:
    leaves, targets = problem(tokens, vocabulary, bias)
    expected = definition(*operands(leaves), targets)
    single = [x.detach().float().requires_grad_() for x in leaves]
    loss = linear_cross_entropy(*operands(single), targets)
    assert_close(loss, expected.sum())
    pairs = zip(
        torch.autograd.grad(-0.7 * loss, single),
        torch.autograd.grad(-0.7 * expected.sum(), leaves),
        strict=True,
    )
    for x, y in pairs:
        assert_close(x, y)
    with torch.no_grad():
        assert_close(linear_nll(*operands(single), targets), expected)


@pytest.mark.parametrize("size", [2, 4])
def test_rows_on_several_processes_give_the_loss_and_gradients_of_the_whole(
    seams: ModuleType, size: int
) -> None:
    """With 5 rows, four processes have two, two, one and none."""
    leaves, targets = problem(23, 33 if size == 2 else 5, True)
    expected = definition(*operands(leaves), targets)
    gradients = torch.autograd.grad(expected.sum(), leaves)

    def work(seam: Any) -> list[Tensor]:
        own = seam.own(len(leaves[1]))
        parts = [leaves[0], *(x[own.start : own.stop] for x in leaves[1:])]
        single = [x.detach().float().requires_grad_() for x in parts]
        hidden, local = seam.enter(single[0]), targets - own.start
        loss = linear_cross_entropy(hidden, single[1], single[2], local, seam)
        found = torch.autograd.grad(loss, single)
        with torch.no_grad():
            return [loss.detach(), *found, linear_nll(*operands(single), local, seam)]

    found = seams.run(size, work)
    for loss, dx, _, _, nll in found:
        assert_close(loss, expected.sum())
        assert_close(dx, gradients[0])
        assert_close(nll, expected)
    for place in (1, 2):
        rows = torch.cat([of_one[1 + place] for of_one in found])
        assert_close(rows, gradients[place])


def test_a_target_that_is_no_id_is_refused(seams: ModuleType) -> None:
    leaves, targets = problem(5, 4, False)
    targets[3] = 4
    single = [x.detach().float() for x in leaves]
    with pytest.raises(IndexError, match=r"none of the ids 0 \.\. 3"), torch.no_grad():
        linear_nll(*operands(single), targets)

    def work(seam: Any) -> None:
        own = seam.own(4)
        with pytest.raises(IndexError, match="a row of 0 processes"), torch.no_grad():
            rows = single[1][own.start : own.stop]
            linear_nll(single[0], rows, None, targets - own.start, seam)

    seams.run(2, work)


def test_products_in_bfloat16_have_their_sums_in_float32() -> None:
    leaves, targets = problem(40, 60, True)
    expected = definition(*operands(leaves), targets).sum()
    single = [x.detach().float().requires_grad_() for x in leaves]
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(*operands(single), targets)
    found = torch.autograd.grad(loss, single)
    assert {loss.dtype, *(x.dtype for x in found)} == {torch.float32}
    assert_close(loss, expected, 1e-2)
    for x, y in zip(found, torch.autograd.grad(expected, leaves), strict=True):
        assert_close(x, y, 0.05)
