"""The recurrent loop's kernels one by one, at sizes that a small segment does not have.

That they give what the steps in torch give, whatever the options, is in test_triton_loop.py.
"""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from rlt_dist.ops.recurrence.arithmetic import normalise, normalise_backward
from rlt_dist.ops.rotary import rotate
from rlt_dist.ops.triton import feed_forward, memory, merge

few = settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype)


def assert_close(found: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    """`expected` in float64; relative to its largest number, or to 1 where all are small."""
    assert found.shape == expected.shape
    size = max(1.0, expected.abs().max().item())
    assert (found.double() - expected).abs().max().item() <= tolerance * size


# -- (1) the memory ----------------------------------------------------------------------------


def crossing(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, tables: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """The query under its rotary, scores and the result, of q [C, B, H, w], k and v [B, KV, M, w].

    `seen` is bool [C, B, M]; tables are [C, B, 1, w / 2].
    """
    together = q.shape[2] // k.shape[1]
    k, v = (x.repeat_interleave(together, dim=1) for x in (k, v))
    query = rotate(q, *tables)
    score = torch.einsum("cbhw,bhmw->cbhm", query, k)
    score = score.masked_fill(~seen[:, :, None], -torch.inf)
    return query, score, torch.einsum("cbhm,bhmw->cbhw", score.softmax(-1), v)


@few
@given(
    tokens=st.sampled_from([1, 3]),
    heads=st.sampled_from([(2, 2), (3, 1)]),
    width=st.sampled_from([2, 6, 20]),
    entries=st.sampled_from([1, 65, 200]),
    seed=st.integers(0, 99),
)
def test_tokens_that_see_any_ranges_of_a_memory_that_is_shared_out(
    tokens: int, heads: tuple[int, int], width: int, entries: int, seed: int
) -> None:
    check_memory(tokens, *heads, width, entries, seed)


def test_more_queries_than_a_block_has_rows() -> None:
    check_memory(tokens=17, heads=4, kv_heads=1, width=4, entries=70, seed=0, lanes=1)


def test_a_memory_that_grows_is_split_in_few_ways() -> None:
    """Each is compiled anew: a lane with one key/value head is the one with most."""
    ways = {memory.blocks(1, 1, 1, 1, seen) for seen in range(1, 40_000)}
    assert {blocks.splits for blocks in ways} == {2**i for i in range(10)}


def test_a_memory_in_bfloat16_is_multiplied_in_float32() -> None:
    """The interpreter would multiply its bits as integers, and say nothing."""
    check_memory(tokens=2, heads=2, kv_heads=1, width=6, entries=9, seed=0, dtype=torch.bfloat16)


def check_memory(
    tokens: int,
    heads: int,
    kv_heads: int,
    width: int,
    entries: int,
    seed: int,
    lanes: int = 2,
    dtype: torch.dtype = torch.float32,
) -> None:
    torch.manual_seed(seed)
    slots = tokens + 2
    index = torch.stack([torch.randperm(slots - 1)[:tokens] for _ in range(lanes)], dim=1)
    of = (index, torch.arange(lanes))
    ends = torch.randint(entries, (2, slots, lanes), dtype=torch.int32).sort(dim=0).values
    k, v = (random(lanes, kv_heads, entries + 3, width, dtype=dtype) for _ in "kv")
    k, v = k[:, :, :entries], v[:, :, :entries]
    reading = memory.Reading(k, v, *ends)
    tables = random(slots, lanes, 1, width // 2), random(slots, lanes, 1, width // 2)
    q, d = (random(tokens * lanes, heads * width, dtype=dtype) for _ in "qd")

    blocks = memory.blocks(tokens, lanes, heads, kv_heads, entries)
    partial = memory.Partial.room(blocks, tokens * lanes, heads, width, q)
    room = {name: torch.empty_like(q) for name in ("crossed", "dq")}
    kept = (
        random(slots, lanes, heads, width),
        random(slots, lanes, heads * width),
        random(slots, lanes, heads),
    )
    memory.memory_forward(index, q, tables, reading, partial, room["crossed"], kept)
    taped = (
        torch.zeros(slots, lanes, heads, entries),
        torch.zeros(slots, lanes, heads, entries),
        random(slots, lanes, heads, width),
        random(slots, lanes, heads * width),
    )
    memory.memory_backward(index, d, tables, reading, partial, kept, room["dq"], taped)

    by_head = (tokens, lanes, heads, width)
    entry = torch.arange(entries)
    seen = (entry >= ends[0][of][..., None]) & (entry <= ends[1][of][..., None])
    leaf = q.double().view(by_head).requires_grad_()
    here = tuple(table.double()[of] for table in tables)
    query, score, crossed = crossing(leaf, k.double(), v.double(), seen, here)
    d = d.double().view(by_head)
    dq, d_score = torch.autograd.grad(crossed, (leaf, score), d)
    rounding = 1e-5 if dtype == torch.float32 else 1e-2
    assert_close(room["crossed"].view(by_head), crossed.detach(), rounding)
    assert_close(room["dq"].view(by_head), dq, rounding)
    assert_close(kept[0][of], query.detach())
    assert_close(kept[1].unflatten(-1, (heads, width))[of], crossed.detach())
    assert_close(kept[2][of] * torch.log(torch.tensor(2.0)), score.detach().logsumexp(-1))
    assert_close(taped[0][of], score.detach().softmax(-1))
    assert_close(taped[1][of], d_score)
    assert_close(taped[2][of], d)
    assert_close(taped[3].unflatten(-1, (heads, width))[of], dq)
    assert (taped[0][of] != 0).sum() <= seen.sum() * heads


# -- (3), (4) merge and feed-forward -----------------------------------------------------------

SLOTS, LANES = 4, 2
INDEX = torch.tensor([[1, 0], [2, 3]])
"""Of two tokens of two lanes; slot 3 is padding."""
AT = (INDEX, torch.arange(LANES))


def test_a_residual_and_its_norm_and_their_gradients_as_autograd_has_them() -> None:
    """Once as a sublayer's, gathered from the tape and masked; the gradients likewise."""
    d = 10
    source, mask = random(SLOTS, LANES, d), random(SLOTS, LANES, d).relu()
    out, x, n = random(4, d), random(4, d), random(4, d)
    n_tape, scale = random(SLOTS, LANES, d), random(SLOTS, LANES, 1)
    feed_forward.residual_norm(INDEX, source, out, mask, x, (n, n_tape, scale), 1e-5)
    expected = source.double()[AT].flatten(0, 1) + out.double() * mask.double()[AT].flatten(0, 1)
    n_expected, scale_expected = normalise(expected, 1e-5)
    assert_close(x, expected)
    assert_close(n, n_expected)
    assert_close(n_tape[AT].flatten(0, 1), n_expected)
    assert_close(scale[AT].flatten(0, 1), scale_expected)

    dy, dn = random(SLOTS, LANES, d), random(4, d)
    dx, d_out, d_out_tape = random(4, d), random(4, d), random(SLOTS, LANES, d)
    norm = (dn, n_tape, scale)
    feed_forward.residual_norm_backward(INDEX, dy, norm, mask, dx, (d_out, d_out_tape))
    dy, dn = dy.double()[AT].flatten(0, 1), dn.double()
    expected = normalise_backward(dy, dn, n_expected, scale_expected)
    assert_close(dx, expected)
    expected = expected * mask.double()[AT].flatten(0, 1)
    assert_close(d_out, expected)
    assert_close(d_out_tape[AT].flatten(0, 1), expected)


def test_swiglu_wider_than_a_block_also_where_its_products_are_bfloat16() -> None:
    f = 1030
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        gate_up, d_hidden = random(4, 2 * f, dtype=dtype), random(4, f, dtype=dtype)
        tape, hidden = random(SLOTS, LANES, 2 * f), torch.empty_like(d_hidden)
        feed_forward.swiglu(INDEX, gate_up, tape, hidden)
        d_gate_up, d_tape = torch.empty_like(gate_up), random(SLOTS, LANES, 2 * f)
        feed_forward.swiglu_backward(INDEX, d_hidden, tape, d_gate_up, d_tape)
        leaf = gate_up.double().requires_grad_()
        gate, up = leaf.chunk(2, dim=-1)
        expected = F.silu(gate) * up
        (gradient,) = torch.autograd.grad(expected, leaf, d_hidden.double())
        assert_close(hidden, expected.detach(), tolerance)
        assert_close(tape[AT].flatten(0, 1), leaf.detach(), 0.0)
        assert_close(d_gate_up, gradient, tolerance)
        assert_close(d_tape[AT].flatten(0, 1), gradient)


@pytest.mark.parametrize("own", [slice(0, 300), slice(290, 300)])
def test_a_merge_wider_than_a_block_or_of_some_columns(own: slice) -> None:
    d, columns, alpha = 300, own.stop - own.start, 0.5
    chunk = torch.tensor([1])
    gate_e, fed = random(SLOTS, LANES, columns), random(LANES, 2 * columns)
    fed_tape, added = random(3, LANES, 2 * columns), random(4, d)
    merge.merge(INDEX, chunk, gate_e, fed, fed_tape, added, own.start, alpha)
    du, dgate_e = random(4, d), torch.zeros(SLOTS, LANES, columns)
    dfed, dfed_tape = random(LANES, 2 * columns), random(3, LANES, 2 * columns)
    merge.merge_backward(
        *(INDEX, chunk, du, gate_e, fed_tape, dgate_e, dfed, dfed_tape, own.start, alpha)
    )

    leaves = gate_e.double()[AT].requires_grad_(), fed.double().requires_grad_()
    gate_h, value = leaves[1].chunk(2, dim=-1)
    expected = alpha * torch.sigmoid(leaves[0] + gate_h) * value
    is_token = (INDEX < SLOTS - 1)[..., None]
    d_expected = du.double().view(2, LANES, d)[..., own] * is_token
    d_gate, d_fed = torch.autograd.grad(expected, leaves, d_expected)
    assert_close(added.view(2, LANES, d)[..., own], expected.detach())
    others = torch.ones(d, dtype=torch.bool)
    others[own] = False
    assert not added[:, others].any()
    assert torch.equal(fed_tape[1], fed)
    assert_close(dgate_e[AT], d_gate)
    assert_close(dfed, d_fed)
    assert_close(dfed_tape[1], d_fed)
