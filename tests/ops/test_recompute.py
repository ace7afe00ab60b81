"""Parts of a segment that backward computes again: how long they are, and that they are checked.

That they change no gradient, whatever the options, is in test_recurrence.py.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rlt_dist.ops.reach import segment_positions
from rlt_dist.ops.recurrence.dispatch import Recurrence
from rlt_dist.ops.recurrence.parts import Cut, cut
from rlt_dist.ops.recurrence.problem import (
    FeedbackInputs,
    LayerMasks,
    LayerWeights,
    Memory,
    Operands,
    Plan,
    Shape,
)
from rlt_dist.ops.recurrence.tape import bytes_of_border, bytes_of_token
from rlt_dist.ops.rotary import rotary_tables

T, B, D, F, LAYERS = 12, 2, 8, 10, 2
SHAPE = Shape(heads=2, kv_heads=1, head_width=4, window=3, eps=1e-5)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64) * 0.5


def weights() -> LayerWeights:
    sizes = [(16, D), (D, 8), (8, D), (D, 8), (2 * F, D), (D, F)]
    return LayerWeights(*(random(*size) for size in sizes))


@pytest.fixture
def problem() -> tuple[Plan, Operands]:
    torch.manual_seed(1)
    position = segment_positions(torch.zeros(B, T, dtype=torch.bool), torch.zeros(B).long())[0]
    cos, sin = (x.transpose(0, 1) for x in rotary_tables(position, 4, 1e4, torch.float64))
    plan = Plan(
        *(SHAPE, position.T, cos, sin, 1),
        past=0,
        carried=0,
        reach=None,
        groups=[0] * LAYERS,
        masks=[LayerMasks()] * LAYERS,
        alpha=0.5,
    )
    fed = FeedbackInputs(random(T, B, D), random(2 * D, D), *(random(B, D) for _ in range(3)))
    memory, windows = Memory(random(B, 1, T, 4), random(B, 1, T, 4)), [random(2, B, 2, 1, 4)] * 2
    operands = Operands(random(T, B, D), fed, [memory], windows, [weights(), weights()])
    return plan, operands.like([tensor.requires_grad_() for tensor in operands.flat()])


@pytest.mark.parametrize("backend", ["python", "native"])
def test_what_is_recomputed_must_give_the_same_outputs(problem, backend):
    plan, operands = problem
    s, _ = Recurrence(backend, decoder_chunk=4).run(plan, operands)
    operands.e.data[5] += 1.0
    with pytest.raises(RuntimeError, match=r"tokens 4 \.\. 7 .* were weights or inputs changed"):
        s.sum().backward()


@pytest.mark.parametrize("backend", ["python", "native"])
def test_a_state_that_is_not_finite_is_left_to_the_step_s_guard(problem, backend):
    plan, operands = problem
    operands.e.data[5, 1] = torch.nan
    s, _ = Recurrence(backend, decoder_chunk=4).run(plan, operands)
    s.sum().backward()
    assert not operands.e.grad[5, 1].isfinite().any()
    assert operands.e.grad[:, 0].isfinite().all()


@pytest.mark.parametrize("backend", ["python", "native"])
def test_recomputed_products_are_formed_in_the_precision_of_forward(problem, backend):
    plan, operands = problem
    operands = operands.like([x.detach().float().requires_grad_() for x in operands.flat()])
    plan = replace(plan, cos=plan.cos.float(), sin=plan.sin.float())
    found = []
    for chunk in ("none", 5):
        with torch.autocast("cpu", torch.bfloat16):
            s, _ = Recurrence(backend, chunk).run(plan, operands)
        s.square().sum().backward()
        found.append(operands.e.grad.clone())
        operands.e.grad = None
    # Other rows stand beside a token in the recomputation, which may round a product otherwise.
    assert (found[0] - found[1]).abs().max() <= 0.02 * found[0].abs().max()


def test_auto_keeps_everything_that_fits_and_takes_the_longest_parts_that_do(problem):
    forward, backward = bytes_of_token(*problem)
    both, border = forward + backward, bytes_of_border(problem[1])
    assert cut("auto", T * both, *problem).keep
    assert not cut("auto", T * both - 1, *problem).keep
    assert cut("auto", 5 * both + 2 * border, *problem) == Cut(5, keep=False)
    assert cut("auto", 5 * both + 2 * border - 1, *problem) == Cut(4, keep=False)
    assert not cut("auto", 1, *problem).keep


def test_a_chunk_is_taken_as_asked_for_and_none_keeps_everything(problem):
    assert cut(5, 1, *problem) == Cut(5, keep=False)
    assert cut(100, 1, *problem).keep
    assert cut("none", 1, *problem).keep


def test_without_gradients_nothing_grows_with_the_segment(problem):
    plan, operands = problem
    plan = replace(plan, position=torch.arange(1000)[:, None].expand(-1, B))
    with torch.no_grad():
        assert cut("none", 1, plan, operands).length < 200
        assert not cut("none", 1, plan, operands).keep


@pytest.mark.parametrize("backend", ["python", "native"])
def test_what_was_freed_in_a_first_backward_is_recomputed_in_a_second(problem, backend):
    plan, operands = problem
    s, _ = Recurrence(backend, "none").run(plan, operands)
    s.sum().backward(retain_graph=True)
    first = operands.e.grad.clone()
    s.sum().backward()
    assert (operands.e.grad - 2 * first).abs().max() <= 1e-12 * first.abs().max()


@pytest.mark.parametrize("backend", ["python", "native"])
@pytest.mark.parametrize("chunk", ["none", 4])
def test_a_weight_changed_before_backward_is_an_error(problem, backend, chunk):
    plan, operands = problem
    s, _ = Recurrence(backend, chunk).run(plan, operands)
    with torch.no_grad():
        operands.weights[0].down.mul_(3.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        s.sum().backward()


@pytest.mark.parametrize("backend", ["python", "native"])
def test_a_gradient_of_the_gradient_is_an_error_not_a_number(problem, backend):
    plan, operands = problem
    s, _ = Recurrence(backend).run(plan, operands)
    (gradient,) = torch.autograd.grad(s.square().sum(), operands.e, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.square().sum().backward()
