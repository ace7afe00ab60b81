"""Random problems for the recurrence core, and what the reference makes of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor

from rlt_dist.ops.reach import segment_positions
from rlt_dist.ops.recurrence.problem import (
    FeedbackInputs,
    LayerMasks,
    LayerWeights,
    Memory,
    Operands,
    Plan,
    Shape,
)
from rlt_dist.ops.recurrence.reference import boundary_after, run_reference
from rlt_dist.ops.rotary import rotary_tables

D, WIDTH = 10, 4


@dataclass(frozen=True)
class Case:
    """A segment of a decoder, random but for these."""

    tokens: int = 7
    lanes: int = 2
    layers: int = 2
    feedback: int = 1
    heads: int = 4
    kv_heads: int = 2
    ffn: int = 6
    groups: int = 1
    window: int = 3
    past: int = 2
    reach: int | None = None
    documents: float = 0.2
    dropout: float = 0.2
    seed: int = 0


cases = st.builds(
    Case,
    tokens=st.integers(1, 8),
    lanes=st.integers(1, 3),
    layers=st.integers(1, 5),
    feedback=st.sampled_from([0, 1, 2, 3, 5]),
    kv_heads=st.sampled_from([1, 2, 4]),
    groups=st.integers(1, 2),
    window=st.integers(1, 4),
    past=st.integers(0, 3),
    reach=st.sampled_from([None, 0, 2]),
    documents=st.sampled_from([0.0, 0.3]),
    dropout=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 1000),
)
some = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


def problem(case: Case) -> tuple[Plan, Operands]:
    """Weights are alike for all seeds, so that cases may be micro-batches of one step."""
    chance = torch.Generator().manual_seed(case.seed)
    shared = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=chance, dtype=torch.float64) * 0.5

    def weight(outputs: int, inputs: int) -> Tensor:
        return torch.randn(outputs, inputs, generator=shared, dtype=torch.float64) * 0.25

    def chosen(chance_of_one: float, *shape: int) -> Tensor:
        return torch.rand(shape, generator=chance) < chance_of_one

    def layer() -> LayerWeights:
        rows = (case.heads + 2 * case.kv_heads) * WIDTH
        sizes = [
            (rows, D),
            (D, case.heads * WIDTH),
            (case.heads * WIDTH, D),
            (D, case.heads * WIDTH),
        ]
        sizes += [(2 * case.ffn, D), (D, case.ffn)]
        return LayerWeights(*(weight(*size) for size in sizes))

    def mask() -> Tensor | None:
        keep = chosen(1 - case.dropout, t, b, D).double() / (1 - case.dropout)
        return keep if case.dropout else None

    t, b = case.tokens, case.lanes
    carried = torch.randint(0, 6, (b,), generator=chance)
    position = segment_positions(chosen(case.documents, b, t), carried)[0]
    cos, sin = (x.transpose(0, 1) for x in rotary_tables(position, WIDTH, 1e4, torch.float64))
    plan = Plan(
        Shape(case.heads, case.kv_heads, WIDTH, case.window, 1e-5),
        *(position.T, cos, sin, case.feedback),
        past=case.past,
        carried=min(case.past, case.window - 1),
        reach=case.reach,
        groups=[j * case.groups // case.layers for j in range(case.layers)],
        masks=[LayerMasks(mask(), mask(), mask()) for _ in range(case.layers)],
        alpha=0.5,
    )
    fed = [random(t, b, D), weight(2 * D, D), *(random(b, D) for _ in range(3))]
    entries = (b, case.kv_heads, case.past + t, WIDTH)
    operands = Operands(
        random(t, b, D),
        FeedbackInputs(*fed) if case.feedback else None,
        [Memory(random(*entries), random(*entries)) for _ in range(case.groups)],
        [random(case.window - 1, b, 2, case.kv_heads, WIDTH) for _ in range(case.layers)],
        [layer() for _ in range(case.layers)],
    )
    return plan, operands.like([tensor.requires_grad_() for tensor in operands.flat()])


def incoming(case: Case, operands: Operands) -> tuple[Tensor, list[Tensor]]:
    """Gradients of the outputs and of the windows left behind."""
    chance = torch.Generator().manual_seed(case.seed + 1)
    like = [operands.e, *operands.windows]
    ds, *dwindows = (torch.randn(x.shape, generator=chance, dtype=x.dtype) for x in like)
    return ds, dwindows


Result = tuple[list[Tensor], Operands]
"""Outputs, windows and what is fed back behind the segment; and the gradients of the operands."""
Run = Callable[[Plan, Operands], tuple[Tensor, list[Tensor]]]


def differentiated(
    run: Run, plan: Plan, operands: Operands, ds: Tensor, dwindows: Sequence[Tensor]
) -> Result:
    """By autograd."""
    s, windows = run(plan, operands)
    left = [s, *windows, *after(plan, operands, s)]
    found = torch.autograd.grad(
        [s, *windows], operands.flat(), [ds, *dwindows], materialize_grads=True
    )
    return [x.detach() for x in left], operands.like(found)


def after(plan: Plan, operands: Operands, s: Tensor) -> list[Tensor]:
    """What is fed back behind the segment."""
    return [] if operands.fed is None else [s[-1], boundary_after(plan, operands.fed, s)]


def reference(case: Case) -> Result:
    plan, operands = problem(case)
    return differentiated(run_reference, plan, operands, *incoming(case, operands))


def assert_close(found: Sequence[Tensor], expected: Sequence[Tensor], largest: float) -> None:
    """To 1e-12 of each tensor, or of the `largest` where a tensor is but rounding."""
    for x, y in zip(found, expected, strict=True):
        assert x.shape == y.shape
        if y.numel():
            size = y.abs().max().item()
            size = size if size > 1e-12 * largest else largest
            assert (x - y).abs().max().item() <= 1e-12 * size


def assert_same(found: Result, expected: Result) -> None:
    for x, y in zip((found[0], found[1].flat()), (expected[0], expected[1].flat()), strict=True):
        assert_close(x, y, max(tensor.abs().max().item() for tensor in y if tensor.numel()))
