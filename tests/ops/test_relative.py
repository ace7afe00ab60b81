"""Relative attention at speed gives what the plain one gives, gradients included."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlt_dist.ops.reach import reach_mask
from rlt_dist.ops.relative import attend_relative
from rlt_dist.ops.relative_function import relative_attention

NAMES = ("query", "key", "value", "relative", "u", "v")
some = settings(max_examples=80, deadline=None)


@dataclass(frozen=True)
class Case:
    """A segment of `queries` tokens behind `past` memory positions."""

    lanes: int
    queries: int
    past: int
    heads: int
    width: int
    limit: int | None
    dropatt: bool
    heads_first: bool
    seed: int


cases = st.builds(
    Case,
    lanes=st.integers(1, 3),
    queries=st.integers(1, 9),
    past=st.integers(0, 14),
    heads=st.integers(1, 3),
    width=st.sampled_from([1, 2, 5, 8]),
    limit=st.one_of(st.none(), st.integers(0, 12)),
    dropatt=st.booleans(),
    heads_first=st.booleans(),
    seed=st.integers(0, 5),
)


def operands(case: Case, dtype: torch.dtype = torch.float64) -> tuple[dict[str, Tensor], Tensor]:
    """Operands by name, and bool [b, Q, K]: what each query may see, documents cut anywhere."""
    chance = torch.Generator().manual_seed(case.seed)
    keys = case.past + case.queries

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=chance, dtype=torch.float64).to(dtype)

    def laid_out(length: int) -> Tensor:
        if case.heads_first:
            return random(case.heads, case.lanes, length, case.width).permute(1, 2, 0, 3)
        return random(case.lanes, length, case.heads, case.width)

    found = {"query": laid_out(case.queries), "key": laid_out(keys), "value": laid_out(keys)}
    found["relative"] = random(keys, case.heads, case.width)
    found |= {name: random(case.heads, case.width) for name in "uv"}
    if case.dropatt:
        kept = torch.rand(case.lanes, case.heads, case.queries, keys, generator=chance) < 0.7
        found["keep"] = kept.to(dtype) / 0.7
    position = torch.randint(keys + 1, (case.lanes, 1), generator=chance)
    position = position + torch.arange(case.queries)
    started = torch.randint(case.queries, (case.lanes, 1), generator=chance)
    index = torch.arange(case.queries)
    position = torch.where(index >= started, index - started, position)
    return found, reach_mask(position, case.past, case.limit)


def plain(given: dict[str, Tensor], allowed: Tensor) -> Tensor:
    q, k, v, r, bias_u, bias_v = (given[name] for name in NAMES)
    return attend_relative(q, k, v, r, (bias_u, bias_v), allowed, given.get("keep"))


def fast(given: dict[str, Tensor], allowed: Tensor) -> Tensor:
    q, k, v, r, bias_u, bias_v = (given[name] for name in NAMES)
    mask = torch.zeros(allowed.shape, dtype=torch.promote_types(q.dtype, torch.float32))
    mask = mask.masked_fill(~allowed, -torch.inf)
    return relative_attention(q, k, v, r, (bias_u, bias_v), mask, given.get("keep"))


def with_gradients(
    attention: Callable[[dict[str, Tensor], Tensor], Tensor],
    given: dict[str, Tensor],
    allowed: Tensor,
) -> dict[str, Tensor]:
    """The output, and the gradient of a weighted sum of it with respect to every operand."""
    leaves = {name: x.detach().clone().requires_grad_(name != "keep") for name, x in given.items()}
    output = attention(leaves, allowed)
    weight = torch.linspace(-1, 2, output.numel(), dtype=output.dtype).view(output.shape)
    (output * weight).sum().backward()
    found = {name: x.grad for name, x in leaves.items() if x.grad is not None}
    return {"output": output.detach()} | found


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest relative error; small gradients are differences, and round as what is large."""
    assert found.keys() == expected.keys() >= {"output", *NAMES}
    sizes = {name: x.abs().max().item() for name, x in expected.items()}
    largest = max(1e-6, *sizes.values())  # all weights may be dropped
    return max(
        (found[name] - expected[name]).abs().max().item() / max(size, 0.01 * largest)
        for name, size in sizes.items()
    )


@some
@example(case=Case(1, 2, 2, 1, 5, None, dropatt=True, heads_first=False, seed=0))
@given(case=cases)
def test_outputs_and_gradients_are_those_of_the_plain_attention(case: Case) -> None:
    given, allowed = operands(case)
    expected = with_gradients(plain, given, allowed)
    assert worst(with_gradients(fast, given, allowed), expected) <= 1e-12


@some
@given(case=cases, scratch=st.sampled_from([1, 40, 1 << 19]))
def test_without_gradients_the_output_is_the_same(case: Case, scratch: int) -> None:
    given, allowed = operands(case)
    expected = fast(given, allowed)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr("rlt_dist.ops.relative_function._SCRATCH", scratch)
        patch.setattr("rlt_dist.ops.relative_function._FEWEST_QUERIES", 2)
        assert (fast(given, allowed) - expected).abs().max() <= 1e-13 * expected.abs().max()


@pytest.mark.parametrize("dropatt", [False, True])
def test_bfloat16_products_have_their_softmax_in_float32(dropatt: bool) -> None:
    case = Case(2, 8, 8, 2, 16, None, dropatt, True, 0)
    given, allowed = operands(case)
    narrow = {
        name: x.to(torch.bfloat16 if name in NAMES[:4] else torch.float32)
        for name, x in given.items()
    }
    found = with_gradients(fast, narrow, allowed)
    assert {found[name].dtype for name in ("output", *NAMES[:4])} == {torch.bfloat16}
    found = {name: x.double() for name, x in found.items()}
    assert worst(found, with_gradients(plain, given, allowed)) <= 0.05


def test_a_query_s_output_hangs_on_no_later_key() -> None:
    """Scores of later keys are other queries' numbers before they are masked."""
    case = Case(1, 6, 3, 1, 4, None, False, True, 0)
    given, _ = operands(case)
    allowed = torch.ones(1, 6, 9, dtype=torch.bool).tril(3)
    expected = fast(given, allowed)
    for later in range(1, 6):
        key = given["key"].clone()
        key[:, 3 + later :] += 100.0
        found = fast(given | {"key": key}, allowed)
        assert torch.equal(found[:, :later], expected[:, :later])
