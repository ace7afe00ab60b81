"""What the encoder's layers run is what it is defined to be, gradients included, and keeps less."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlt_dist.ops.norm import norm_linear, norm_linear_plain
from rlt_dist.ops.swiglu import swiglu_linear, swiglu_linear_plain

Function = Callable[..., Tensor]

shapes = st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple)
sizes = st.integers(1, 9)


def leaf(*shape: int, scale: float = 1.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * sum(shape) + seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return (scale * x).requires_grad_()


def normed(function: Callable[..., tuple[Tensor, ...]], eps: float = 1e-6) -> Function:
    """The outputs of all projections as one tensor."""
    return lambda x, gain, *weights: torch.cat(function(x, gain, eps, weights), dim=-1)


def results(function: Function, operands: list[Tensor]) -> list[Tensor]:
    """The output, and the gradients under an upstream gradient that differs everywhere."""
    output = function(*operands)
    upstream = torch.linspace(-1, 1, output.numel()).view_as(output).to(output.dtype)
    return [output, *torch.autograd.grad(output, operands, upstream)]


def assert_close(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for x, y in zip(found, expected, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        assert (x - y).abs().max() <= tolerance * y.abs().max().clamp(min=0.1)


@settings(max_examples=60, deadline=None)
@given(
    rows=shapes,
    width=sizes,
    outputs=st.lists(sizes, min_size=1, max_size=3),
    eps=st.sampled_from([1e-6, 1e-3, 1.0]),
    scale=st.sampled_from([0.1, 1.0, 30.0]),
)
def test_projections_of_a_norm_are_those_of_the_definition(
    rows: tuple[int, ...], width: int, outputs: list[int], eps: float, scale: float
) -> None:
    weights = [leaf(n, width) for n in outputs]
    operands = [leaf(*rows, width, scale=scale), leaf(width), *weights]
    found, expected = (
        results(normed(function, eps), operands) for function in (norm_linear, norm_linear_plain)
    )
    assert_close(found, expected, 1e-12)


@settings(max_examples=60, deadline=None)
@given(rows=shapes, inner=sizes, width=sizes, scale=st.sampled_from([0.1, 1.0, 30.0]))
def test_swiglu_and_its_projection_are_those_of_the_definition(
    rows: tuple[int, ...], inner: int, width: int, scale: float
) -> None:
    gate, up = (scale * leaf(2, *rows, inner)).detach().unbind(0)
    operands = [gate.requires_grad_(), up.requires_grad_(), leaf(width, inner)]
    found, expected = (
        results(function, operands) for function in (swiglu_linear, swiglu_linear_plain)
    )
    assert_close(found, expected, 1e-12)


CASES = [
    (normed(norm_linear), normed(norm_linear_plain), [(90, 16), (16,), (7, 16), (5, 16)]),
    (swiglu_linear, swiglu_linear_plain, [(90, 16), (90, 16), (7, 16)]),
]


def test_a_gain_of_zero_passes_its_gradient_on() -> None:
    operands = [leaf(5, 4), torch.zeros(4, dtype=torch.float64).requires_grad_(), leaf(3, 4)]
    found, expected = (
        results(normed(function), operands) for function in (norm_linear, norm_linear_plain)
    )
    assert_close(found, expected, 1e-12)
    assert found[2].abs().min() > 0


def test_an_output_that_nothing_reads_has_no_part_in_the_gradients() -> None:
    x, gain, *weights = operands = [leaf(5, 4), leaf(4), leaf(3, 4), leaf(2, 4)]
    found, expected = (
        results(lambda *_, f=function: f(x, gain, 1e-6, weights)[0], operands[:3])
        for function in (norm_linear, norm_linear_plain)
    )
    assert_close(found, expected, 1e-12)


@pytest.mark.parametrize(("fast", "plain", "shapes"), CASES, ids=["norm", "swiglu"])
def test_bfloat16_products_leave_gradients_in_the_operands_type(
    fast: Function, plain: Function, shapes: list[tuple[int, ...]]
) -> None:
    exact = [leaf(*shape, seed=i) for i, shape in enumerate(shapes)]
    expected = results(plain, exact)
    single = [operand.detach().float().requires_grad_() for operand in exact]
    errors = []
    for function in (plain, fast):
        with torch.autocast("cpu", torch.bfloat16):
            output = function(*single)
        assert output.dtype == torch.bfloat16
        upstream = torch.linspace(-1, 1, output.numel()).view_as(output).bfloat16()
        found = [output, *torch.autograd.grad(output, single, upstream)]
        assert {x.dtype for x in found[1:]} == {torch.float32}
        pairs = zip(found, expected, strict=True)
        errors.append([((x - y).norm() / y.norm()).item() for x, y in pairs])
    # As near to the truth as autograd; the gain's gradient reads an n that is rounded.
    for of_plain, of_fast in zip(*errors, strict=True):
        assert of_fast <= 1.4 * of_plain < 0.01


@pytest.mark.parametrize(("fast", "plain", "shapes"), CASES, ids=["norm", "swiglu"])
def test_at_most_half_of_what_autograd_keeps_is_kept(
    fast: Function, plain: Function, shapes: list[tuple[int, ...]]
) -> None:
    operands = [leaf(*shape) for shape in shapes]

    def kept(function: Function) -> int:
        """Numbers of arrays of the input's size that are kept, the input among them."""
        arrays: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            if tensor.numel() == operands[0].numel():
                arrays[tensor.data_ptr()] = tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = function(*operands)
        assert output.requires_grad
        return sum(arrays.values())

    assert 0 < kept(fast) * 2 <= kept(plain)
