"""The recurrence core in pieces: ranges of chunks, and stages of a pipeline.

Stages are driven by the schedules that `parallel` makes, in one process. All must give what the
reference gives for the whole.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from recurrence_problem import (
    Case,
    Result,
    assert_same,
    cases,
    incoming,
    problem,
    reference,
    some,
)
from torch import Tensor

from rlt_dist.ops.recurrence.gradients import WeightSums, zero_weights
from rlt_dist.ops.recurrence.loop import MakeLoop, PythonLoop
from rlt_dist.ops.recurrence.native.loop import NativeLoop
from rlt_dist.ops.recurrence.parts import Cut
from rlt_dist.ops.recurrence.problem import (
    Border,
    LayerWeights,
    Memory,
    Operands,
    Plan,
)
from rlt_dist.ops.recurrence.stage import StageDecoder, steps_of_parts
from rlt_dist.ops.recurrence.tape import Store, Tape
from rlt_dist.parallel.schedule.instructions import Kind, Receive, Schedule, Send, Value, Work
from rlt_dist.parallel.schedule.looped import looped

pytestmark = pytest.mark.usefixtures("empty_memory_holds_nan")
LOOPS: list[MakeLoop] = [PythonLoop, NativeLoop]


# -- ranges of chunks --------------------------------------------------------------------------


def passed(make: MakeLoop, case: Case, ranges: Callable[[range], list[range]]) -> list[Tensor]:
    """Everything on a tape after both passes over it, range by range."""
    plan, operands = problem(case)
    operands = operands.detached()
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
        given._replace(windows=given.windows[mine], weights=given.weights[mine])
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


# A part's border cuts a chunk of one lane in two, while another lane has a chunk more.
CUT_CHUNK = Case(tokens=4, lanes=3, feedback=2, kv_heads=1, window=1, past=0, documents=0.3)


@some
@example(
    split=(replace(CUT_CHUNK, dropout=0.0), [range(1), range(1, 2)]),
    make=PythonLoop,
    length=3,
    keep=False,
    micro_batches=1,
)
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
