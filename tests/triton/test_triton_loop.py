"""The loop in Triton kernels leaves on a tape what the loop in torch leaves there."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from rlt_dist.ops.reach import segment_positions
from rlt_dist.ops.recurrence import graphs
from rlt_dist.ops.recurrence.chunks import plan_chunks
from rlt_dist.ops.recurrence.function import run_with
from rlt_dist.ops.recurrence.graphs import At, Steps
from rlt_dist.ops.recurrence.loop import Loop, PythonLoop
from rlt_dist.ops.recurrence.parts import Cut
from rlt_dist.ops.recurrence.problem import (
    Border,
    FedBack,
    FeedbackInputs,
    LayerMasks,
    LayerWeights,
    Memory,
    Operands,
    Plan,
    Shape,
)
from rlt_dist.ops.recurrence.reference import run_reference
from rlt_dist.ops.recurrence.tape import Store, Tape
from rlt_dist.ops.recurrence.triton_loop import TritonLoop
from rlt_dist.ops.rotary import rotary_tables
from rlt_dist.ops.seam import WHOLE, Seam


@dataclass(frozen=True)
class Case:
    """A segment of a decoder; lanes start documents at the tokens of `starts`."""

    tokens: int
    feedback: int
    starts: tuple[tuple[int, ...], ...]
    heads: int = 2
    kv_heads: int = 1
    window: int = 3
    past: int = 2
    carried: int = 5
    reach: int | None = None
    groups: tuple[int, ...] = (0,)
    dropout: bool = False
    seam: Seam = WHOLE


class Two(Seam):
    """The seam of the second of two processes, the other of which always finds the same."""

    def own(self, size: int) -> range:
        return range(size // 2, size)

    def total(self, x: Tensor) -> Tensor:
        return 2 * x


D, WIDTH, INNER = 10, 6, 7

ONE_BY_ONE = Case(4, 1, ((2,), ()), heads=3, kv_heads=3, reach=3, dropout=True)
RAGGED = Case(5, 3, ((2,), (4,)), heads=3, window=2, past=0, carried=0)
RUNNING_ON = Case(4, 4, ((), (1,)), window=5, carried=6, dropout=True)
WHOLE_SEGMENT = Case(4, 0, ((3,), ()), window=4, past=1)
CUT = Case(3, 2, ((), (1,)), seam=Two())
ONE_TOKEN = Case(1, 1, ((), (0,)), window=1, past=0, carried=0)


def problem(case: Case, dtype: torch.dtype) -> tuple[Plan, Operands]:
    """The same numbers in every type, but for rounding."""
    chance = torch.Generator().manual_seed(0)
    t, b, layers = case.tokens, len(case.starts), len(case.groups)

    def random(*shape: int) -> Tensor:
        return (0.5 * torch.randn(shape, generator=chance, dtype=torch.float64)).to(dtype)

    start = torch.zeros(b, t, dtype=torch.bool)
    for lane, tokens in enumerate(case.starts):
        start[lane, list(tokens)] = True
    position, _ = segment_positions(start, torch.full((b,), case.carried))
    cos, sin = (x.transpose(0, 1).to(dtype) for x in rotary_tables(position, WIDTH, 1e4, dtype))

    def mask() -> Tensor | None:
        keep = torch.rand(t, b, D, generator=chance) < 0.7
        return keep / 0.7 if case.dropout else None

    plan = Plan(
        Shape(case.heads, case.kv_heads, WIDTH, case.window, 1e-5),
        *(position.T, cos, sin, case.feedback, case.past),
        carried=min(case.carried, case.window - 1),
        reach=case.reach,
        groups=case.groups,
        masks=[LayerMasks(mask(), mask(), mask()) for _ in case.groups],
        alpha=0.5,
        seam=case.seam,
    )
    queries, rows = case.heads * WIDTH, (case.heads + 2 * case.kv_heads) * WIDTH
    sizes = ((rows, D), (D, queries), (queries, D), (D, queries), (2 * INNER, D), (D, INNER))
    columns = len(case.seam.own(D))
    fed = [random(t, b, columns), random(2 * columns, D) / 2, *(random(b, D) for _ in range(3))]
    entries = (b, case.kv_heads, case.past + t, WIDTH)
    operands = Operands(
        random(t, b, D),
        FeedbackInputs(*fed) if case.feedback else None,
        [Memory(random(*entries), random(*entries)) for _ in set(case.groups)],
        [random(case.window - 1, b, 2, case.kv_heads, WIDTH) for _ in range(layers)],
        [LayerWeights(*(random(*size) / 2 for size in sizes)) for _ in range(layers)],
    )
    return plan, operands


def incoming(operands: Operands) -> tuple[Tensor, list[Tensor], Tensor]:
    """Gradients of outputs, of the windows left behind, and of a state fed back."""
    chance = torch.Generator().manual_seed(1)
    like = (operands.e, *operands.windows, operands.e[0])
    ds, *dwindows, dh = (
        torch.randn(x.shape, generator=chance, dtype=torch.float64).to(x.dtype) for x in like
    )
    return ds, dwindows, dh


def filled(make: type[Loop], plan: Plan, operands: Operands) -> Tape:
    """A tape after both passes."""
    tape, (ds, dwindows, dh) = Tape.blank(plan, operands, Store()), incoming(operands)
    every = range(len(plan.chunks))
    make(operands).forward(tape)(every)
    tape.begin_backward(ds, Border(dwindows, operands.fed and FedBack(dh, dh)), Store())
    make(operands).backward(tape)(every)
    return tape


def left(tape: Tape) -> Iterator[tuple[str, Tensor]]:
    """All that stands on a tape of real tokens, but for what the loop in torch does without."""
    t, own = tape.plan.chunks.tokens, tape.plan.shape.window - 1
    for j, layer in enumerate(tape.layers):
        for name in layer.kept.keys() - {"cross_log"}:
            yield f"{j}.{name}", layer.whole(name)
        yield f"{j}.entries", layer.entries[: own + t]
        yield f"{j}.dentries", layer.dentries[: own + t]
    fed = tape.feedback
    for name in ("y", "de", "dgate_e"):
        if hasattr(fed, name):
            yield name, getattr(fed, name)[:t]
    for name in ("r", "r_scale", "fed", "dfed", "dinitial", "dboundary"):
        if hasattr(fed, name):
            yield name, getattr(fed, name)
    if fed.inputs is not None:
        yield "ds", fed.ds[: t + 1]


def assert_close(found: Tensor, expected: Tensor, name: str) -> None:
    """To 1e-5 of the largest number, or of 1 where all are small."""
    assert found.shape == expected.shape, name
    if expected.numel():
        size = max(1.0, expected.abs().max().item())
        assert (found - expected).abs().max().item() <= 1e-5 * size, name


@pytest.fixture(autouse=True)
def _empty_memory_holds_nan() -> Iterator[None]:
    """What nobody wrote is garbage that is finite by chance; here it is not."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


CASES = (ONE_BY_ONE, RAGGED, RUNNING_ON, WHOLE_SEGMENT, CUT, ONE_TOKEN)


@pytest.mark.parametrize("case", CASES)
def test_everything_on_a_tape_is_what_the_loop_in_torch_leaves(case: Case) -> None:
    found = dict(left(filled(TritonLoop, *problem(case, torch.float32))))
    expected = dict(left(filled(PythonLoop, *problem(case, torch.float64))))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_close(found[name], tensor, name)


def test_bfloat16_products_are_formed_and_the_rest_is_float32() -> None:
    plan, operands = problem(RUNNING_ON, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = dict(left(filled(TritonLoop, plan, operands)))
    for name, tensor in left(filled(PythonLoop, *problem(RUNNING_ON, torch.float64))):
        size = max(1.0, tensor.abs().max().item())
        assert found[name].dtype == torch.float32
        assert (found[name] - tensor).abs().max().item() <= 0.05 * size, name
    assert not torch.equal(found["y"], dict(left(filled(TritonLoop, plan, operands)))["y"])


@pytest.mark.parametrize(
    ("case", "cut"),
    [
        (replace(ONE_BY_ONE, heads=2, kv_heads=1, groups=(0, 1)), Cut(4, keep=True)),
        (replace(RAGGED, heads=2, reach=2, groups=(0, 0)), Cut(3, keep=False)),
    ],
)
def test_a_segment_in_parts_has_the_reference_s_outputs_and_gradients(case: Case, cut: Cut) -> None:
    results = []
    for dtype in (torch.float32, torch.float64):
        plan, operands = problem(case, dtype)
        operands = operands.like([x.requires_grad_() for x in operands.flat()])
        ds, dwindows, _ = incoming(operands)
        if dtype == torch.float32:
            s, windows = run_with(TritonLoop, cut, plan, operands)
        else:
            s, windows = run_reference(plan, operands)
        outputs, tensors = [s, *windows], operands.flat()
        gradients = torch.autograd.grad(outputs, tensors, [ds, *dwindows], materialize_grads=True)
        results.append([*outputs, *gradients])
    for number, (found, expected) in enumerate(zip(*results, strict=True)):
        assert_close(found, expected, str(number))


def test_a_memory_of_one_head_is_read_as_the_model_lays_it_out() -> None:
    """There what is one head's is a head apart, and torch calls it contiguous none the less."""
    case = replace(ONE_BY_ONE, heads=2, kv_heads=1)
    plan, operands = problem(case, torch.float32)
    by_token = [Memory(*(_by_token(x) for x in memory)) for memory in operands.memories]
    found = dict(left(filled(TritonLoop, plan, operands._replace(memories=by_token))))
    for name, tensor in left(filled(PythonLoop, *problem(case, torch.float64))):
        assert_close(found[name], tensor, name)


def _by_token(x: Tensor) -> Tensor:
    """[B, 1, M, w] as a view of [B, M, 1, w]."""
    moved = x.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)
    assert moved.is_contiguous()
    assert moved.stride(1) == x.shape[-1]
    return moved


def test_a_lane_with_fewer_tokens_makes_nobody_read_more_of_a_memory() -> None:
    """Entries that no token sees hold NaN, which a product with a weight of 0 would let through."""
    case = replace(RAGGED, past=3, heads=2)
    tapes = []
    for unseen in (0.0, float("nan")):
        plan, operands = problem(case, torch.float32)
        first = int(plan.ranges()[1].min())
        assert first > 0
        for tensor in (tensor for memory in operands.memories for tensor in memory):
            tensor[:, :, :first] = unseen
        tapes.append(dict(left(filled(TritonLoop, plan, operands))))
    for name, tensor in tapes[0].items():
        assert torch.equal(tapes[1][name], tensor), name


# -- steps -------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    starts=st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=1, max_size=3),
    feedback=st.integers(0, 4),
    carried=st.integers(0, 5),
)
def test_steps_are_told_where_their_tokens_stand_in_memory_that_stays(
    starts: list[list[bool]], feedback: int, carried: int
) -> None:
    """A recorded launch reads the same addresses in each of its replays."""
    flags = torch.tensor(starts)
    position, _ = segment_positions(flags, torch.full((len(starts),), carried))
    chunks = plan_chunks(position.T, feedback)
    time = torch.arange(chunks.tokens + 1)[:, None].expand(-1, len(starts)).contiguous()
    told: list[tuple[int, Tensor]] = []
    addresses: dict[int, set[int]] = {}

    def step(at: At) -> None:
        told.append((int(at.chunk), at.slots.clone()))
        addresses.setdefault(len(at.slots), set()).add(at.slots.data_ptr())

    every = range(len(chunks))
    Steps(chunks, step, record=True)(reversed(every))
    assert [k for k, _ in told] == list(reversed(every))
    for k, slots in told:
        assert slots.tolist() == chunks.slots[k].get(time).tolist()
    assert all(len(of_count) == 1 for of_count in addresses.values())
    assert all(address % 16 == 0 for of_count in addresses.values() for address in of_count)


def test_room_for_a_step_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made, empty_like = [], torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda x: made.append(len(x)) or empty_like(x))
    chunks = plan_chunks(torch.arange(7)[:, None], 3)
    Steps(chunks, lambda _: None, record=True)(range(len(chunks)))
    assert made == [5, 3]


def test_a_step_that_fails_ends_its_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else whatever a process does next on its GPU fails too."""
    done = []

    class Graph:
        def capture_begin(self, **_: object) -> None:
            done.append("begin")

        def capture_end(self) -> None:
            done.append("end")

    class Stream(AbstractContextManager):  # type: ignore[type-arg]
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, other: "Stream") -> None:
            done.append(f"{self.name} waits for {other.name}")

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream("here"))
    monkeypatch.setattr(graphs, "_stream", lambda _: Stream("aside"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    fails = False

    def step(_: At) -> None:
        if fails:
            raise RuntimeError("out of memory")

    steps = Steps(plan_chunks(torch.arange(2)[:, None], 1), step, record=True)
    steps._record = True  # as on a GPU
    steps([0])
    done.clear()
    fails = True
    with pytest.raises(RuntimeError, match="out of memory"):
        steps([1])
    assert done == ["aside waits for here", "begin", "end", "here waits for aside"]
