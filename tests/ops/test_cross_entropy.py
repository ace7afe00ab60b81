"""The loss that keeps no logits is the plain one, gradients included."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlt_dist.ops.cross_entropy import linear_cross_entropy, linear_nll
from rlt_dist.ops.seam import Seam

aten = torch.ops.aten

BLOCK = 512  # tokens: sizes below lie around it

tokens = st.sampled_from([0, 1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 1100]) | st.integers(0, 1100)


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> Iterator[None]:
    """So few logits would all be one block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlt_dist.ops.cross_entropy._LEAST_LOGITS", 1)
        yield


@dataclass
class Problem:
    """A linear softmax, its targets, and what each needs for a gradient."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor

    @property
    def operands(self) -> list[Tensor]:
        bias = [] if self.bias is None else [self.bias]
        return [self.hidden, self.weight, *bias]

    def plain(self) -> Tensor:
        """The definition, written down without blocks."""
        logits = F.linear(self.hidden, self.weight, self.bias)
        return -logits.log_softmax(-1).gather(1, self.targets[:, None]).sum()

    def blocked(self) -> Tensor:
        return linear_nll(self.hidden, self.weight, self.bias, self.targets).sum()

    def fast(self) -> Tensor:
        return linear_cross_entropy(self.hidden, self.weight, self.bias, self.targets)


def problem(
    count: int, vocabulary: int, *, bias: bool = True, scale: float = 1.0, strided: bool = False
) -> Problem:
    generator = torch.Generator().manual_seed(count * 1000 + vocabulary)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    hidden = random(5, 2 * count)[:, ::2].T if strided else random(count, 5)
    weight = scale * random(vocabulary, 5)
    targets = torch.randint(vocabulary, (count,), generator=generator)
    leaves = [tensor.requires_grad_() for tensor in (hidden.detach(), weight, random(vocabulary))]
    return Problem(leaves[0], leaves[1], leaves[2] if bias else None, targets)


def assert_close(x: Tensor, y: Tensor, tolerance: float) -> None:
    assert x.shape == y.shape
    if y.numel():
        assert (x - y).abs().max() <= tolerance * y.abs().max().clamp(min=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    count=tokens,
    vocabulary=st.integers(1, 300),
    bias=st.booleans(),
    scale=st.sampled_from([0.1, 1.0, 30.0]),
    strided=st.booleans(),
    upstream=st.sampled_from([1.0, -0.37, 0.0]),
)
def test_loss_and_gradients_are_those_of_the_definition(
    count: int, vocabulary: int, bias: bool, scale: float, strided: bool, upstream: float
) -> None:
    given_ = problem(count, vocabulary, bias=bias, scale=scale, strided=strided)
    expected = given_.plain()
    gradients = torch.autograd.grad(upstream * expected, given_.operands)
    for loss in (given_.blocked(), given_.fast()):
        assert_close(loss, expected, 1e-12)
        found = torch.autograd.grad(upstream * loss, given_.operands)
        for x, y in zip(found, gradients, strict=True):
            assert_close(x, y, 1e-12)


def test_a_target_of_no_float_probability_has_a_finite_loss_and_gradient() -> None:
    weight = torch.tensor([[5000.0], [0.0], [-5000.0]], requires_grad=True)
    hidden = torch.ones(1, 1, requires_grad=True)
    loss = linear_cross_entropy(hidden, weight, None, torch.tensor([2]))
    loss.backward()
    assert loss.item() == 10000
    assert hidden.grad is not None and hidden.grad.item() == 10000
    assert weight.grad is not None and weight.grad.flatten().tolist() == [1, 0, -1]


def test_gradients_add_to_those_of_a_weight_that_is_also_read_elsewhere() -> None:
    given_ = problem(600, 9, bias=False)
    gradients = []
    for nll in (given_.plain, given_.fast):
        given_.hidden = given_.weight[given_.targets] * 0.5
        gradients += torch.autograd.grad(nll() / 600, given_.weight)
    assert_close(gradients[1], gradients[0], 1e-12)


def test_nothing_of_tokens_by_vocabulary_is_kept_for_backward() -> None:
    given_ = problem(1100, 200)

    def largest_kept(fast: bool) -> int:
        sizes = [0]

        def keep(tensor: Tensor) -> Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept):
            given_.fast() if fast else given_.plain()
        return max(sizes)

    assert largest_kept(fast=False) == 1100 * 200
    assert largest_kept(fast=True) == max(1100 * 5, 200 * 5)


@pytest.mark.parametrize("retain", [False, True])
def test_a_second_backward_is_an_error_and_never_a_wrong_gradient(retain: bool) -> None:
    given_ = problem(3, 4)
    loss = given_.fast()
    torch.autograd.grad(loss, given_.hidden, retain_graph=retain)
    with pytest.raises(RuntimeError, match="only once"):
        torch.autograd.grad(loss, given_.weight)


@pytest.mark.parametrize("wrong", [-100, -1, 4, 10**6])
@pytest.mark.parametrize("at", [0, BLOCK])
def test_a_target_outside_the_vocabulary_is_refused(wrong: int, at: int) -> None:
    given_ = problem(BLOCK + 1, 4)
    given_.targets[at] = wrong
    for nll in (given_.blocked, given_.fast, torch.no_grad()(given_.fast)):
        with pytest.raises(IndexError, match=f"target {wrong} is none of the ids 0 .. 3"):
            nll()


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.count += op.overloadpacket in (aten.mm, aten.addmm, aten.addmm_)
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("needed", list(product([False, True], repeat=3)))
def test_only_the_gradients_asked_for_are_formed(needed: tuple[bool, ...]) -> None:
    given_ = problem(600, 9)
    for operand, need in zip(given_.operands, needed, strict=True):
        operand.requires_grad_(need)
    with Products() as products:
        loss = given_.fast()
    assert products.count == 2 * (1 + sum(needed[:2]))  # of two blocks
    assert loss.requires_grad == any(needed)
    assert_close(loss, given_.plain(), 1e-12)
    asked = [operand for operand in given_.operands if operand.requires_grad]
    if asked:
        found = torch.autograd.grad(loss, asked)
        for x, y in zip(found, torch.autograd.grad(given_.plain(), asked), strict=True):
            assert_close(x, y, 1e-12)


def test_without_gradients_the_loss_is_the_same_and_has_none() -> None:
    given_ = problem(600, 9)
    with torch.no_grad():
        loss = given_.fast()
    assert not loss.requires_grad
    assert_close(loss, given_.fast(), 1e-14)


@pytest.mark.parametrize("bias", [False, True])
def test_bfloat16_products_leave_sums_and_gradients_of_weights_in_float32(bias: bool) -> None:
    exact = problem(700, 40, bias=bias)
    expected = torch.autograd.grad(exact.plain(), exact.operands)
    leaves = [operand.detach().float().requires_grad_() for operand in exact.operands]
    single = Problem(leaves[0], leaves[1], leaves[2] if bias else None, exact.targets)
    errors = []
    for nll in (single.blocked, single.fast):
        with torch.autocast("cpu", torch.bfloat16):
            loss = nll()
        found = torch.autograd.grad(loss, single.operands)
        assert {loss.dtype, *(x.dtype for x in found)} == {torch.float32}
        assert_close(loss, exact.plain().float(), 1e-3)
        pairs = zip(found, expected, strict=True)
        errors.append([float((x - y).abs().max() / y.abs().max()) for x, y in pairs])
    # As near to the truth as autograd, which rounds at the same places.
    for plain, fast in zip(*errors, strict=True):
        assert fast <= 1.2 * plain < 0.05


# The vocabulary cut over processes


def part(whole: Problem, seam: Seam) -> Problem:
    """What one process has of a problem: its rows, and numbers relative to the first of them."""
    own = seam.own(len(whole.weight))
    weight, bias = (
        None if x is None else x.detach()[own.start : own.stop].clone().requires_grad_()
        for x in (whole.weight, whole.bias)
    )
    assert weight is not None
    hidden = whole.hidden.detach().clone().requires_grad_()
    return Problem(hidden, weight, bias, whole.targets - own.start)


def on_each(seams: ModuleType, size: int, whole: Problem, nll: Any, upstream: float) -> Any:
    """Of each process the loss and its gradients; that of `hidden` is summed at the seam."""

    def work(seam: Any) -> list[Tensor]:
        own = part(whole, seam)
        loss = nll(seam.enter(own.hidden), own.weight, own.bias, own.targets, seam).sum()
        return [loss.detach(), *torch.autograd.grad(upstream * loss, own.operands)]

    return seams.run(size, work)


@settings(max_examples=30, deadline=None)
@given(
    size=st.integers(2, 4),
    count=tokens,
    vocabulary=st.sampled_from([1, 2, 5, 7]) | st.integers(1, 300),
    bias=st.booleans(),
    scale=st.sampled_from([0.1, 1.0, 30.0]),
    upstream=st.sampled_from([1.0, -0.37]),
)
def test_rows_on_several_processes_give_the_loss_and_gradients_of_the_whole(
    seams: ModuleType,
    size: int,
    count: int,
    vocabulary: int,
    bias: bool,
    scale: float,
    upstream: float,
) -> None:
    """Also where they have different numbers of rows, and some none."""
    whole = problem(count, vocabulary, bias=bias, scale=scale)
    loss = whole.plain()
    expected = [loss, *torch.autograd.grad(upstream * loss, whole.operands)]
    for nll in (linear_nll, linear_cross_entropy):
        found = on_each(seams, size, whole, nll, upstream)
        for losses_and_dx in zip(*(of_one[:2] for of_one in found), strict=True):
            for x in losses_and_dx[1:]:
                assert torch.equal(x, losses_and_dx[0])
        rows = [torch.cat(cuts) for cuts in zip(*(of_one[2:] for of_one in found), strict=True)]
        for x, y in zip([*found[0][:2], *rows], expected, strict=True):
            assert_close(x, y, 1e-12)


def test_a_block_costs_a_message_for_the_maximum_and_one_for_the_sums(seams: ModuleType) -> None:
    whole = problem(BLOCK + 1, 7)

    def work(seam: Any) -> int:
        own = part(whole, seam)
        linear_cross_entropy(own.hidden, own.weight, own.bias, own.targets, seam)
        return seam.messages

    assert seams.run(3, work) == [1 + 2 * 2] * 3  # one agrees on the size of a block


@pytest.mark.parametrize("wrong", [-100, -1, 7, 10**6])
@pytest.mark.parametrize("nll", [linear_nll, linear_cross_entropy])
def test_a_target_that_no_process_has_is_refused_by_all(
    seams: ModuleType, wrong: int, nll: Any
) -> None:
    whole = problem(BLOCK + 1, 7)
    whole.targets[BLOCK] = wrong

    def work(seam: Any) -> None:
        own = part(whole, seam)
        with pytest.raises(IndexError, match="a row of 0 processes"):
            nll(own.hidden, own.weight, own.bias, own.targets, seam)

    seams.run(3, work)


def test_bfloat16_products_of_rows_on_several_processes_are_summed_in_float32(
    seams: ModuleType,
) -> None:
    exact = problem(700, 40)
    expected = [exact.plain(), *torch.autograd.grad(exact.plain(), exact.operands)]
    leaves = [operand.detach().float() for operand in exact.operands]
    single = Problem(leaves[0], leaves[1], leaves[2], exact.targets)

    def nll(*arguments: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return linear_cross_entropy(*arguments)

    found = on_each(seams, 3, single, nll, 1.0)
    assert {x.dtype for of_one in found for x in of_one} == {torch.float32}
    rows = [torch.cat(cuts) for cuts in zip(*(of_one[2:] for of_one in found), strict=True)]
    assert_close(found[0][0], expected[0].float(), 1e-3)
    for x, y in zip([found[0][1], *rows], expected[1:], strict=True):
        assert_close(x.double(), y, 0.05)
