"""Kernels of attention over segments give what plain attention gives, gradients included."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
import triton.language as tl

from rlt_dist.ops.attention import attend, attend_within
from rlt_dist.ops.noise import Noise, WeightMask
from rlt_dist.ops.reach import Reach
from rlt_dist.ops.relative import attend_relative as attend_relative_plain
from rlt_dist.ops.relative_function import attend_relative_within
from rlt_dist.ops.triton import band, relative
from rlt_dist.ops.triton.band import attend_band
from rlt_dist.ops.triton.launch import launch
from rlt_dist.ops.triton.relative import attend_relative
from rlt_dist.ops.triton.tiles import start_of


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few tokens are several blocks; some of more keys than queries."""
    monkeypatch.setattr(band, "blocks", lambda *_: band.Blocks(16, 16, 4, 1))

    def blocks(kernel: str, *_: object) -> relative.Blocks:
        return relative.Blocks(16, 16 if kernel in ("forward", "key") else 64, 4, 1)

    monkeypatch.setattr(relative, "blocks", blocks)


@dataclass(frozen=True)
class Case:
    """A segment of `queries` tokens behind `past` keys, with documents that start anywhere."""

    lanes: int
    queries: int
    past: int
    heads: int
    width: int
    limit: int | None = None
    shared: int = 1
    starts: float = 0.1

    @property
    def reach(self) -> Reach:
        chance = torch.Generator().manual_seed(self.queries)
        position = torch.randint(self.past + 1, (self.lanes,), generator=chance)
        columns = []
        for _ in range(self.queries):
            fresh = torch.rand(self.lanes, generator=chance) < self.starts
            position = torch.where(fresh, 0, position)
            columns.append(position)
            position = position + 1
        return Reach(torch.stack(columns, 1), self.past, self.limit, torch.float64)


CASES = [
    Case(lanes=2, queries=35, past=14, heads=2, width=8, shared=2),
    Case(lanes=1, queries=40, past=0, heads=1, width=16, limit=7, starts=0),
    Case(lanes=1, queries=33, past=40, heads=2, width=5, limit=0, shared=2),
    Case(lanes=3, queries=1, past=18, heads=1, width=3, starts=0),
    Case(lanes=1, queries=1, past=0, heads=2, width=4),
    Case(lanes=1, queries=64, past=16, heads=1, width=17, limit=79, starts=0),
    Case(lanes=1, queries=20, past=3, heads=2, width=8, starts=1),
]


def random(*shape: int) -> Tensor:
    chance = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=chance, dtype=torch.float64)


def with_gradients(attention: Callable[..., Tensor], operands: Sequence[Tensor]) -> list[Tensor]:
    """The output, and the gradient of a weighted sum of it for every operand."""
    leaves = [x.detach().clone().requires_grad_() for x in operands]
    output = attention(*leaves)
    weight = random(*output.shape).to(output.dtype)
    return [output.detach(), *torch.autograd.grad(output, leaves, weight)]


def assert_close(found: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> None:
    """Relative to the largest number, which for a gradient is at least that of the output."""
    for x, y in zip(found, expected, strict=True):
        assert x.shape == y.shape
        scale = max(y.abs().max(), expected[0].abs().max())
        assert (x.double() - y).abs().max() <= tolerance * scale


def band_operands(case: Case) -> list[Tensor]:
    keys, heads = case.past + case.queries, case.heads // case.shared
    query = random(case.lanes, case.queries, case.heads, case.width)
    key = random(case.heads // case.shared, case.lanes, keys, case.width).permute(1, 2, 0, 3)
    return [query, key, random(case.lanes, keys, heads, case.width)]


def relative_operands(case: Case) -> list[Tensor]:
    keys, heads = case.past + case.queries, (case.heads, case.width)
    query, value = random(case.lanes, case.queries, *heads), random(case.lanes, keys, *heads)
    key = random(case.heads, case.lanes, keys, case.width).permute(1, 2, 0, 3)
    return [query, key, value, random(keys, *heads), random(*heads), random(*heads) + 1]


def relative_pair(
    case: Case, dropped: WeightMask | None
) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """The kernels and the definition."""
    reach, keys = case.reach, case.past + case.queries
    keep = None if dropped is None else dropped.drawn(case.queries, keys)

    def kernels(q: Tensor, k: Tensor, v: Tensor, r: Tensor, *biases: Tensor) -> Tensor:
        return attend_relative(q, k, v, r, (biases[0], biases[1]), reach, dropped)

    def plain(q: Tensor, k: Tensor, v: Tensor, r: Tensor, *biases: Tensor) -> Tensor:
        return attend_relative_plain(q, k, v, r, (biases[0], biases[1]), reach.mask == 0, keep)

    return kernels, plain


@pytest.mark.parametrize("case", CASES)
def test_a_band_of_keys_gives_what_a_mask_gives(case: Case) -> None:
    reach, operands = case.reach, band_operands(case)
    expected = with_gradients(lambda *x: attend(*x, reach.mask), operands)
    single = [x.float() for x in operands]
    assert_close(with_gradients(lambda *x: attend_band(*x, reach), single), expected, 1e-5)


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_relative_attention_gives_what_its_definition_gives(case: Case, drops: bool) -> None:
    """With dropped weights, as the second half of a model's heads."""
    streams = Noise(3, 5, torch.arange(case.lanes) + 9).lane_streams("attn.weights", 2)
    heads = range(case.heads, 2 * case.heads)
    dropped = WeightMask(streams, 0.3, heads, 2 * case.heads) if drops else None
    kernels, plain = relative_pair(case, dropped)
    expected = with_gradients(plain, relative_operands(case))
    single = [x.float() for x in relative_operands(case)]
    assert_close(with_gradients(kernels, single), expected, 1e-5)


@pytest.mark.parametrize("kind", ["band", "relative"])
def test_bfloat16_is_read_as_float32_and_rounded_once(kind: str) -> None:
    """The interpreter's own bfloat16 arithmetic is wrong, and must not be met."""
    case = CASES[0] if kind == "band" else CASES[1]
    kernels, plain = relative_pair(case, None)
    operands = band_operands(case) if kind == "band" else relative_operands(case)
    if kind == "band":
        reach = case.reach
        kernels, plain = lambda *x: attend_band(*x, reach), lambda *x: attend(*x, reach.mask)
    narrow = [x.bfloat16() for x in operands]
    found = with_gradients(kernels, narrow)
    assert {x.dtype for x in found} == {torch.bfloat16}
    assert_close(found, with_gradients(plain, [x.double() for x in narrow]), 0.02)


def test_products_have_autocasts_type_in_kernels_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of the rotary are float32, and so are queries."""
    case = CASES[0]
    q, k, v = (x.float() for x in band_operands(case))
    reach = Reach(case.reach.position, case.past, None, torch.bfloat16)
    found = []
    for wish in ("reference", "triton"):
        monkeypatch.setenv("RLT_DIST_OPS", wish)
        with torch.autocast("cpu", torch.bfloat16):
            found.append(attend_within(q, k, v, reach))
    assert found[0].dtype == found[1].dtype == torch.bfloat16
    assert_close(found[1:], [found[0].double()], 0.02)


def test_the_same_attention_is_formed_twice_to_the_bit() -> None:
    case = CASES[0]
    kernels, _ = relative_pair(case, None)
    operands = [x.float() for x in relative_operands(case)]
    first, second = (with_gradients(kernels, operands) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def test_models_take_the_kernels_where_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[0]
    reach = Reach(case.reach.position, case.past, None, torch.float32)
    q, k, v = (x.float() for x in band_operands(case))
    query, key, value, r, *biases = (x.float() for x in relative_operands(case))
    found = []
    for wish in ("reference", "triton"):
        monkeypatch.setenv("RLT_DIST_OPS", wish)
        masked = reach.__dict__.pop("mask", None)
        outputs = attend_within(q, k, v, reach)
        both = (biases[0], biases[1])
        found.append((outputs, attend_relative_within(query, key, value, r, both, reach)))
        assert ("mask" in reach.__dict__) == (masked is None)  # kernels never form one
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


@triton.jit
def _bytes_to_head(x, found, head_stride):
    head = tl.program_id(0)
    start = start_of(x, head, 0, head, head_stride)
    tl.store(found + head, start.to(tl.int64) - x.to(tl.int64))


def test_a_head_may_begin_farther_than_int32_counts() -> None:
    found = torch.zeros(4, dtype=torch.int64)
    launch(_bytes_to_head, (4,), torch.zeros(1), found, 2**30)
    assert found.tolist() == [head * 4 * 2**30 for head in range(4)]
