"""The recurrence core gives with weights cut over processes what it gives with whole ones."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from recurrence_problem import (
    WIDTH,
    Case,
    D,
    Result,
    assert_same,
    cases,
    differentiated,
    incoming,
    problem,
    reference,
    some,
)
from torch import Tensor

from rlt_dist.ops.recurrence.dispatch import Kind, Recurrence
from rlt_dist.ops.recurrence.parts import Cut
from rlt_dist.ops.recurrence.problem import Memory, Operands, Plan
from rlt_dist.ops.seam import Seam
from rlt_dist.util.errors import UserError

pytestmark = pytest.mark.usefixtures("empty_memory_holds_nan")


Places = dict[str, tuple[int, list[int]]]
"""By name of an operand, the dimension it is cut in, and what of that one process has."""


def places(seam: Seam, case: Case) -> Places:
    """A single K/V head is held by all."""

    def columns(heads: range, before: int = 0) -> list[int]:
        return [before + h * WIDTH + c for h in heads for c in range(WIDTH)]

    heads, d, ffn = seam.own(case.heads), seam.own(D), seam.own(case.ffn)
    kv, rows = (heads, case.heads) if case.kv_heads > 1 else (range(1), 1)
    keys, values = case.heads * WIDTH, (case.heads + rows) * WIDTH
    return {
        "qkv": (0, [*columns(heads), *columns(kv, keys), *columns(kv, values)]),
        "o": (1, columns(heads)),
        "cross_q": (0, columns(heads)),
        "cross_o": (1, columns(heads)),
        "gate_up": (0, [*ffn, *(case.ffn + column for column in ffn)]),
        "down": (1, list(ffn)),
        "weight": (0, [*d, *(D + column for column in d)]),
        "gate_e": (2, list(d)),
        "memory": (1, list(kv)),
        "window": (3, list(kv)),
    }


def take(mine: Places, name: str, x: Tensor) -> Tensor:
    """A process's part of an operand."""
    if name not in mine:
        return x
    dim, index = mine[name]
    return x.index_select(dim, torch.tensor(index))


def put(mine: Places, name: str, x: Tensor, whole: Tensor) -> Tensor:
    """A process's part of a gradient, in its place."""
    if name not in mine:
        return x
    dim, index = mine[name]
    return torch.zeros_like(whole).index_add(dim, torch.tensor(index), x)


def mapped(function: Callable[..., Tensor], *many: Operands) -> Operands:
    """A function of the name and the tensors of each operand."""

    def fields(*given: Any) -> Any:
        names = type(given[0])._fields
        return type(given[0])(*map(function, names, *given))

    def each(name: str) -> Callable[..., Tensor]:
        return partial(function, name)

    first = many[0]
    return Operands(
        function("e", *(one.e for one in many)),
        first.fed and fields(*(one.fed for one in many)),
        [
            Memory(*map(each("memory"), *group))
            for group in zip(*(one.memories for one in many), strict=True)
        ],
        [*map(each("window"), *(one.windows for one in many))],
        [fields(*layer) for layer in zip(*(one.weights for one in many), strict=True)],
    )


def cut_problem(case: Case, seam: Any) -> tuple[Plan, Operands]:
    """What one process is given."""
    plan, whole = problem(case)
    mine, heads = places(seam, case), len(seam.own(case.heads))
    shape = replace(plan.shape, heads=heads, kv_heads=heads if case.kv_heads > 1 else 1)
    operands = mapped(lambda name, x: take(mine, name, x.detach()).clone().requires_grad_(), whole)
    return replace(plan, shape=shape, seam=seam), operands


def run_cut(case: Case, recurrence: Recurrence, seam: Any) -> Result:
    """One process's outputs, and its part of the gradients in its place."""
    (_, whole), mine = problem(case), places(seam, case)
    plan, operands = cut_problem(case, seam)
    ds, dwindows = incoming(case, whole)
    # What several processes hold has one gradient, which one of them brings in.
    there = case.kv_heads > 1 or seam.rank == 0
    dwindows = [take(mine, "window", window) * there for window in dwindows]
    outputs, gradients = differentiated(recurrence.run, plan, operands, ds, dwindows)
    return outputs, mapped(partial(put, mine), gradients, whole)


@some
@given(
    case=cases,
    kv_heads=st.sampled_from([1, 5]),
    processes=st.integers(2, 3),
    backend=st.sampled_from(["reference", "python", "auto"]),
    parts=st.sampled_from(["none", 1, 3]),
)
def test_cut_weights_give_what_whole_ones_do(seams, case, kv_heads, processes, backend, parts):
    case = replace(case, heads=5, kv_heads=kv_heads, ffn=7)
    recurrence = Recurrence(backend, parts)
    found = seams.run(processes, lambda seam: (places(seam, case), run_cut(case, recurrence, seam)))
    outputs, gradients = reference(case)
    windows = slice(1, 1 + case.layers)
    for mine, (left, _) in found:
        expected = list(outputs)
        expected[windows] = (take(mine, "window", x) for x in outputs[windows])
        assert_same((left, gradients), (expected, gradients))

    def total(name: str, *parts: Tensor) -> Tensor:
        if name in found[0][0]:
            return torch.stack(parts).sum(dim=0)
        assert all(torch.equal(part, parts[0]) for part in parts), "not alike on all processes"
        return parts[0]

    cut_gradients = [gradients for _, (_, gradients) in found]
    assert_same((outputs, mapped(total, *cut_gradients)), (outputs, gradients))


def test_parts_are_those_of_the_process_with_most(seams):
    """Each has its own sizes, and all must meet at the same sums."""
    case = Case(tokens=40, heads=5, kv_heads=5, ffn=7)

    def parts(seam: Any) -> list[Cut]:
        plan, operands = cut_problem(case, seam)
        return [Recurrence("python", "auto", budget).cut(plan, operands) for budget in budgets]

    budgets = range(20_000, 400_000, 20_000)
    one, other = seams.run(2, parts)
    assert one == other
    assert len({cut.length for cut in one}) > 5


def test_the_compiled_loop_refuses_cut_weights(seams):
    def run(seam: Any) -> None:
        plan, operands = cut_problem(Case(heads=2, kv_heads=2), seam)
        refused = r"ops\.recurrence: native .* mesh\.tensor .* auto or python"
        with pytest.raises(UserError, match=refused):
            Recurrence("native").run(plan, operands)
        with pytest.raises(UserError, match=refused):
            Recurrence("native").prepare(Kind("cpu"), seam)

    seams.run(2, run)
