"""The recurrence core in pieces: ranges of chunks, stages of a pipeline, cut weights.

Stages are driven by the schedules that `parallel` makes, in one process; processes of tensor
parallelism are threads. All must give what the reference gives for the whole.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from threading import Barrier
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlt_dist.ops.reach import segment_positions
from rlt_dist.ops.recurrence.dispatch import Recurrence
from rlt_dist.ops.recurrence.gradients import WeightSums, zero_weights
from rlt_dist.ops.recurrence.loop import MakeLoop, PythonLoop
from rlt_dist.ops.recurrence.native.loop import NativeLoop
from rlt_dist.ops.recurrence.parts import Cut
from rlt_dist.ops.recurrence.problem import (
    Border,
    FeedbackInputs,
    LayerMasks,
    LayerWeights,
    Memory,
    Operands,
    Plan,
    Shape,
)
from rlt_dist.ops.recurrence.reference import boundary_after, run_reference
from rlt_dist.ops.recurrence.stage import StageDecoder, steps_of_parts
from rlt_dist.ops.recurrence.tape import Store, Tape
from rlt_dist.ops.rotary import rotary_tables
from rlt_dist.ops.seam import Seam
from rlt_dist.parallel.schedule.instructions import Kind, Receive, Schedule, Send, Value, Work
from rlt_dist.parallel.schedule.looped import looped
from rlt_dist.util.errors import UserError

D, WIDTH = 10, 4
LOOPS: list[MakeLoop] = [PythonLoop, NativeLoop]


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


def detached(operands: Operands) -> Operands:
    return operands.like([x.detach() for x in operands.flat()])


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


@pytest.fixture(scope="module", autouse=True)
def empty_memory_holds_nan():
    """What nobody wrote is garbage that is finite by chance; here it is not."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


# -- ranges of chunks --------------------------------------------------------------------------


def passed(make: MakeLoop, case: Case, ranges: Callable[[range], list[range]]) -> list[Tensor]:
    """Everything on a tape after both passes over it, range by range."""
    plan, operands = problem(case)
    operands = detached(operands)
    ds, dwindows = incoming(case, operands)
    tape = Tape.blank(plan, operands, Store())
    chunks, loop = range(len(plan.chunks)), make(operands)
    forward = loop.forward(tape)
    for some_chunks in ranges(chunks):
        forward(some_chunks)
    tape.begin_backward(ds, Border(dwindows), Store())
    backward = loop.backward(tape)
    for some_chunks in reversed(ranges(chunks)):
        backward(some_chunks)
    feedback = [tape.feedback.y, tape.feedback.dy, tape.feedback.de]
    return feedback + [x for layer in tape.layers for x in (layer.dentries, *layer.kept.values())]


@some
@given(case=cases, make=st.sampled_from(LOOPS), cut=st.integers(0, 8))
def test_ranges_of_chunks_give_the_bits_of_all_at_once(case, make, cut):
    whole = passed(make, case, lambda chunks: [chunks])
    one_by_one = passed(make, case, lambda chunks: [range(k, k + 1) for k in chunks])
    in_two = passed(make, case, lambda chunks: [chunks[:cut], chunks[cut:]])
    assert all(torch.equal(x, y) for x, y in zip(whole, one_by_one, strict=True))
    assert all(torch.equal(x, y) for x, y in zip(whole, in_two, strict=True))


# -- stages ------------------------------------------------------------------------------------

Key = tuple[Value, int, int]
RING = {Value.U, Value.S, Value.DU, Value.DS}
"""The decoder's values; those of the encoder and of memories are not made here."""


@dataclass
class Stage:
    """What the executor of a pipeline does with a stage's decoders, by micro-batch.

    Attributes:
        values: made here or received.
        begin: of a micro-batch, its `begin_backward`.
        early: gradients when those of the memories' entries are asked for.
    """

    first: bool
    last: bool
    decoders: Sequence[StageDecoder]
    begin: Callable[[int], None]
    values: dict[Key, Tensor]
    early: dict[int, Operands]

    def do(self, kind: Kind, i: int, step: int) -> None:
        decoder = self.decoders[i]
        if kind == Kind.DECODE:
            self.decode(decoder, i, step)
        elif kind == Kind.CARRY and not self.last:
            decoder.feed(step - 1, self.values[Value.S, i, step - 1])
        elif kind == Kind.REPLAY:
            decoder.replay(step)
        elif kind == Kind.DECODE_BACKWARD:
            self.decode_backward(decoder, i, step)
        elif kind == Kind.MEMORY_GRADIENT:
            decoder.add_inputs(step)
        elif kind == Kind.WEIGHTS:
            decoder.add_weights(step)
        elif kind == Kind.MEMORY_BACKWARD:
            found = decoder.gradients
            self.early[i] = found.like([x.clone() for x in found.flat()])

    def decode(self, decoder: StageDecoder, i: int, step: int) -> None:
        if self.first and (fed := self.values.get((Value.S, i, step - 1))) is not None:
            decoder.feed(step - 1, fed)
        self.values[Value.U, i, step] = decoder.decode(step, self.values.get((Value.U, i, step)))
        if self.last and not self.first:
            self.values[Value.S, i, step] = decoder.newest(step)

    def decode_backward(self, decoder: StageDecoder, i: int, step: int) -> None:
        if step == decoder.parts[-1][-1]:
            self.begin(i)
        dy = self.values.get((Value.DU, i, step))
        ds = self.values.get((Value.DS, i, step)) if self.last else None
        self.values[Value.DU, i, step] = decoder.decode_backward(step, dy, ds)
        if self.first and not self.last and decoder.gradients.fed is not None:
            self.values[Value.DS, i, step - 1] = decoder.fed_gradient(step)


def drive(schedule: Schedule, stages: Sequence[Stage]) -> None:
    """Carry out all lists, each as far as its messages are there."""
    lists, sent = [deque(instructions) for instructions in schedule], set()
    while any(lists):
        for p, left in enumerate(lists):
            while left and (not isinstance(left[0], Receive) or left[0].message in sent):
                what = left.popleft()
                if isinstance(what, Work):
                    stages[p].do(what.kind, what.micro, what.step)
                elif isinstance(what, Send):
                    sent.add(what.message)
                elif (m := what.message).value in RING:
                    key = (m.value, m.micro, m.step)
                    stages[p].values[key] = stages[m.source].values[key].clone()


def stage_of(
    case: Case, make: MakeLoop, cut: Cut, layers: range, problems: Sequence[tuple[Plan, Operands]]
) -> tuple[Stage, WeightSums]:
    """The stage of some layers, for a micro-batch of each problem, and its weight gradients."""
    mine = slice(layers.start, layers.stop)
    ends = {"first": layers.start == 0, "last": layers.stop == case.layers}
    wanted = [incoming(replace(case, seed=case.seed + i), p[1]) for i, p in enumerate(problems)]
    operands = [
        detached(given._replace(windows=given.windows[mine], weights=given.weights[mine]))
        for _, given in problems
    ]
    plans = [
        replace(plan, groups=plan.groups[mine], masks=plan.masks[mine]) for plan, _ in problems
    ]
    sums = zero_weights(operands[0])
    loop = make(operands[0])
    decoders = [
        StageDecoder(loop, cut, plan, given, **ends)
        for plan, given in zip(plans, operands, strict=True)
    ]

    def begin(i: int) -> None:
        ds, dwindows = wanted[i]
        ds = ds if ends["last"] else None
        decoders[i].begin_backward(loop, sums, ds, Border(dwindows[mine]))

    return Stage(**ends, decoders=decoders, begin=begin, values={}, early={}), sums


def joined(stages: Sequence[Stage], sums: Sequence[WeightSums], i: int) -> Result:
    """Micro-batch i's result, out of the stages' pieces; weight gradients are of all."""
    decoders = [stage.decoders[i] for stage in stages]
    early, late = [stage.early[i] for stage in stages], [d.gradients for d in decoders]
    after, fed = [d.after for d in decoders], late[0].fed
    if fed is not None:  # those of what was fed in come last, of the others early
        fed = early[0].fed._replace(weight=fed.weight, s=fed.s, boundary=fed.boundary)
    windows = [window for border in after for window in border.windows]
    memories = [
        Memory(*map(sum, zip(*group, strict=True)))
        for group in zip(*(found.memories for found in early), strict=True)
    ]
    gradients = Operands(
        early[0].e,
        fed,
        memories,
        [window for found in late for window in found.windows],
        [layer for of_stage in sums for layer in of_stage.layers],
    )
    return [decoders[-1].outputs(), *windows, *(after[0].fed or ())], gradients


def of_all(results: Sequence[Result]) -> list[Result]:
    """The same with the sums of all weight gradients, which micro-batches share."""
    found = [gradients for _, gradients in results]
    layers = [
        LayerWeights(*map(sum, zip(*of_layer, strict=True)))
        for of_layer in zip(*(gradients.weights for gradients in found), strict=True)
    ]
    merge = sum(gradients.fed.weight for gradients in found) if found[0].fed else None
    return [
        (outputs, one._replace(weights=layers, fed=one.fed and one.fed._replace(weight=merge)))
        for outputs, one in results
    ]


@st.composite
def splits(draw: st.DrawFn) -> tuple[Case, list[range]]:
    """A case and the layers of each stage."""
    case = draw(cases)
    borders = draw(st.sets(st.integers(1, max(1, case.layers - 1)), max_size=3))
    ends = [0, *sorted(borders - {case.layers}), case.layers]
    return case, [range(a, b) for a, b in pairwise(ends)]


@some
@given(
    split=splits(),
    make=st.sampled_from(LOOPS),
    length=st.integers(1, 8),
    keep=st.booleans(),
    micro_batches=st.integers(1, 3),
)
def test_a_ring_of_stages_gives_the_gradients_of_the_whole(
    split, make, length, keep, micro_batches
):
    case, layers = split
    all_cases = [replace(case, seed=case.seed + i) for i in range(micro_batches)]
    problems, cut = [problem(one) for one in all_cases], Cut(length, keep)
    made = [stage_of(case, make, cut, mine, problems) for mine in layers]
    stages, sums = [stage for stage, _ in made], [of_stage for _, of_stage in made]
    steps = [
        [len(tokens) for tokens in steps_of_parts(cut, plan.position, case.feedback)]
        for plan, _ in problems
    ]
    assert steps == [[len(part) for part in decoder.parts] for decoder in stages[-1].decoders]
    drive(looped(len(layers), steps, feedback=case.feedback > 0), stages)
    wanted = of_all([reference(one) for one in all_cases])
    for i, expected in enumerate(wanted):
        assert_same(joined(stages, sums, i), expected)


# -- processes that weights are cut over -------------------------------------------------------


class Team:
    """What the threads that stand for processes share."""

    def __init__(self, size: int) -> None:
        self.barrier, self.shown = Barrier(size), [torch.empty(0)] * size

    def gather(self, rank: int, x: Tensor) -> list[Tensor]:
        self.shown[rank] = x
        self.barrier.wait(timeout=60)
        found = list(self.shown)
        self.barrier.wait(timeout=60)
        return found


class Threads(Seam):
    """The seam as one thread of a team sees it."""

    def __init__(self, rank: int, team: Team) -> None:
        self.rank, self.team = rank, team

    def own(self, size: int) -> range:
        each = -(-size // len(self.team.shown))
        return range(size)[self.rank * each : (self.rank + 1) * each]

    def total(self, x: Tensor) -> Tensor:
        return torch.stack(self.team.gather(self.rank, x)).sum(dim=0)

    def largest(self, x: Tensor) -> Tensor:
        return torch.stack(self.team.gather(self.rank, x)).amax(dim=0)

    def enter(self, x: Tensor) -> Tensor:
        return Enter.apply(x, self)

    def leave(self, x: Tensor) -> Tensor:
        return Leave.apply(x, self)


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seam):
        ctx.seam = seam
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        return ctx.seam.total(dy), None


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(_, x, seam):
        return seam.total(x)

    @staticmethod
    def backward(_, dy):
        return dy, None


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


def run_cut(case: Case, recurrence: Recurrence, seam: Threads) -> Result:
    """One process's outputs, and its part of the gradients in its place."""
    plan, whole = problem(case)
    mine, heads = places(seam, case), len(seam.own(case.heads))
    shape = replace(plan.shape, heads=heads, kv_heads=heads if case.kv_heads > 1 else 1)
    operands = mapped(lambda name, x: take(mine, name, x.detach()).clone().requires_grad_(), whole)
    ds, dwindows = incoming(case, whole)
    # What several processes hold has one gradient, which one of them brings in.
    there = case.kv_heads > 1 or seam.rank == 0
    dwindows = [take(mine, "window", window) * there for window in dwindows]
    outputs, gradients = differentiated(
        recurrence.run, replace(plan, shape=shape, seam=seam), operands, ds, dwindows
    )
    return outputs, mapped(partial(put, mine), gradients, whole)


@some
@given(
    case=cases,
    kv_heads=st.sampled_from([1, 5]),
    processes=st.integers(2, 3),
    backend=st.sampled_from(["reference", "python", "auto"]),
    parts=st.sampled_from(["none", 1, 3]),
)
def test_cut_weights_give_what_whole_ones_do(case, kv_heads, processes, backend, parts):
    case, team = replace(case, heads=5, kv_heads=kv_heads, ffn=7), Team(processes)
    seams = [Threads(rank, team) for rank in range(processes)]
    run = partial(run_cut, case, Recurrence(backend, parts))
    with ThreadPoolExecutor(processes) as threads:
        found = list(threads.map(run, seams))
    outputs, gradients = reference(case)
    windows = slice(1, 1 + case.layers)
    for seam, (mine, _) in zip(seams, found, strict=True):
        expected = list(outputs)
        expected[windows] = (take(places(seam, case), "window", x) for x in outputs[windows])
        assert_same((mine, gradients), (expected, gradients))

    def total(name: str, *parts: Tensor) -> Tensor:
        if name in places(seams[0], case):
            return torch.stack(parts).sum(dim=0)
        assert all(torch.equal(part, parts[0]) for part in parts), "not alike on all processes"
        return parts[0]

    assert_same((outputs, mapped(total, *(mine for _, mine in found))), (outputs, gradients))


def test_parts_are_those_of_the_process_with_most():
    """Each has its own sizes, and all must meet at the same sums."""
    case, team = Case(tokens=40, heads=5, kv_heads=5, ffn=7), Team(2)

    def parts(seam: Threads) -> list[Cut]:
        plan, operands = problem(case)
        mine, heads = places(seam, case), len(seam.own(5))
        shape = replace(plan.shape, heads=heads, kv_heads=heads)
        operands = mapped(partial(take, mine), operands)
        plan = replace(plan, shape=shape, seam=seam)
        return [Recurrence("python", "auto", budget).cut(plan, operands) for budget in budgets]

    budgets = range(20_000, 400_000, 20_000)
    with ThreadPoolExecutor(2) as threads:
        one, other = threads.map(parts, [Threads(rank, team) for rank in range(2)])
    assert one == other
    assert len({cut.length for cut in one}) > 5


def test_the_compiled_loop_refuses_cut_weights():
    case, seam = Case(heads=2, kv_heads=2), Threads(0, Team(1))
    plan, operands = problem(case)
    with pytest.raises(
        UserError, match=r"ops\.recurrence: native .* mesh\.tensor .* auto or python"
    ):
        Recurrence("native").run(replace(plan, seam=seam), operands)
    with pytest.raises(UserError, match=r"mesh\.tensor"):
        Recurrence("native").prepare("cpu", seam)
