"""What the prepared check of a GPU does, on a CPU: every case, interpreted, at tiny shapes."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from rlt_dist.bench.kernels import cases
from rlt_dist.bench.kernels.case import BYTES_A_SECOND, Case, Floor, Made, check
from rlt_dist.ops.triton.shapes import Shapes

RLT = Shapes(
    model="rlt",
    d=16,
    heads=4,
    kv_heads=2,
    width=8,
    inner=24,
    lanes=3,
    tokens=5,
    memory=4,
    softmaxes=((30, 16),),
    dtype="fp32",
    window=3,
    chunk=1,
    part=3,
)
TRANSFORMER_XL = Shapes(
    model="transformer_xl",
    d=16,
    heads=2,
    kv_heads=2,
    width=8,
    inner=24,
    lanes=2,
    tokens=5,
    memory=6,
    softmaxes=((12, 16), (20, 4)),
    dtype="fp32",
)
HERE = torch.device("cpu")
RLT_2 = replace(RLT, kv_heads=4, chunk=2, part=4)
ALL = [(shapes, case) for shapes in (RLT, RLT_2, TRANSFORMER_XL) for case in cases(shapes)]


@pytest.mark.parametrize(("shapes", "case"), ALL, ids=lambda x: getattr(x, "name", ""))
def test_kernels_are_right_in_float64(shapes: Shapes, case) -> None:
    checked = check(case, shapes, HERE, timed=False)
    assert checked.right
    assert checked.error < 1e-5
    assert 0 < case.floor.microseconds < 1


def test_a_kernel_that_is_wrong_or_not_finite_is_found() -> None:
    case = ALL[0][1]
    for wrong in (1.01, float("nan")):

        def made(wrong: float = wrong) -> Made:
            right = case.make()
            return right._replace(kernel=lambda *x: [y * wrong for y in right.kernel(*x)])

        assert not check(replace(case, make=made), RLT, HERE, timed=False).right


def test_a_kernel_may_err_as_plain_torch_does_but_not_much_more() -> None:
    """A result each: what the loop rounds in bfloat16 is no measure for a product."""
    exact = torch.ones(4, dtype=torch.float64)

    def case(off: float, plain_off: float) -> Case:
        def plain(x: Tensor) -> list[Tensor]:
            return [x, x if x.dtype == torch.float64 else x + plain_off]

        made = Made([exact.bfloat16()], lambda x: [x, x + off], plain)
        return Case("made up", Floor(1), lambda: made)

    narrow = replace(RLT, dtype="bf16")
    assert check(case(0.25, 0.25), narrow, HERE, timed=False).right
    assert check(case(0.4375, 0.25), narrow, HERE, timed=False).right
    assert not check(case(0.75, 0.25), narrow, HERE, timed=False).right
    assert not check(case(0.25, 0), narrow, HERE, timed=False).right
    assert not check(case(0.25, float("nan")), narrow, HERE, timed=False).right


def test_a_floor_is_what_takes_longer() -> None:
    assert Floor(BYTES_A_SECOND, 1).microseconds == 1e6
    assert Floor(1, 790e12).microseconds == 1e6


def test_floors_are_those_of_the_kernels_files_counted_by_hand() -> None:
    """48 + 48 in bfloat16: 8 lanes, 16 heads of 128, window 8, memory 512, d 2048, f 5461."""
    large = Shapes(
        **{"model": "rlt", "d": 2048, "heads": 16, "kv_heads": 16, "width": 128, "inner": 5461},
        **{"lanes": 8, "tokens": 512, "memory": 512, "softmaxes": ((32000, 2048),)},
        **{"window": 8, "chunk": 1, "part": 64},
    )
    floors = {case.name: case.floor for case in cases(large)}
    assert floors["memory_forward"] == Floor(33_619_968, 33_619_968)
    assert floors["memory_backward"] == Floor(34_145_280, 50_429_952)
    assert floors["window_forward"] == Floor(1_245_184)
    assert floors["window_backward"] == Floor(1_310_720 + 2_293_760)
    assert floors["residual_norm"] == Floor(262_144)
    assert floors["swiglu"] == Floor(611_632)
    assert floors["merge"] == Floor(327_680)
    assert floors["band_forward"].operations <= 4 * 8 * 16 * 512 * 513 * 128
    whole = {case.name: case.floor for case in cases(replace(large, chunk=64))}["memory_forward"]
    assert whole == Floor(37_748_736, 64 * 33_619_968)
    assert whole.microseconds == pytest.approx(7.9, abs=0.05)
    loop = 64 * (67_106_816 + 2 * 8 * 2048 * 513), 64 * (2 * 8 * 67_106_816 + 4 * 8 * 2048 * 513)
    assert floors["loop_forward"] == Floor(2 * loop[0], loop[1])
    assert floors["loop_forward_backward"] == Floor(4 * loop[0], 3 * loop[1])
    xl = {case.name: case.floor.operations for case in cases(TRANSFORMER_XL)}
    weights_again, gradients = 2 + 2 + 2, 2 + 2 + 2 + (2 + 2)  # dv, dk, dr; dq by key and distance
    backward = weights_again + gradients
    assert xl["relative_forward_backward"] == xl["relative_forward"] / 6 * (6 + backward)
    few = {case.name: case.floor for case in cases(replace(large, kv_heads=2))}
    assert few["memory_forward"] == Floor(4_202_496, 33_619_968)


@pytest.mark.parametrize(("name", "chunk"), [("loop_replayed", 1), ("loop_of_chunks", 4)])
def test_a_part_is_computed_again_all_at_once_and_the_last_is_not(name: str, chunk: int) -> None:
    """Counted one by one: lane b's documents start at tokens b, b + 29, ..., behind a memory."""
    shapes = replace(RLT, part=20, memory=7)
    weights = 16 * (4 * 32 + 2 * 16 + 3 * 24 + 2 * 16)

    def one_pass(tokens: range, chunk: int) -> tuple[int, int]:
        chunks: dict[tuple[int, int], set[int]] = {}
        operations = 0
        for lane in range(shapes.lanes):
            number = -1
            for token in tokens:
                position = (token - lane) % 29 if token >= lane else 7 + token
                number += token == tokens.start or (chunk > 0 and position % chunk == 0)
                seen = range(7 + token - min(position, 7), 7 + token + 1)
                chunks.setdefault((lane, number), set()).update(seen)
                operations += 2 * weights + 4 * 32 * len(seen)
        steps = len({number for _, number in chunks})
        return 4 * (steps * weights + 2 * 16 * sum(map(len, chunks.values()))), operations

    first, last = one_pass(range(20), chunk), one_pass(range(20, 40), chunk)
    again = one_pass(range(20), 0)
    (floor,) = (case.floor for case in cases(shapes) if case.name == name)
    assert floor.bytes == 2 * first[0] + 2 * last[0] + again[0]
    assert floor.operations == 3 * first[1] + 3 * last[1] + again[1]
