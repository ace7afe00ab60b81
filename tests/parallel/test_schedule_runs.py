"""Schedules run by a small executor of numbers, in any order of progress, against a plain loop.

The executor knows no schedule and no simulator. Stages go on one instruction at a time, whichever
can; a stage whose next message has not been sent stands still. The model has one number where the
real one has a layer, and its gradients come out right only if every need was met.
"""

import random
from collections import defaultdict, deque
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlt_dist.parallel.schedule.instructions import Receive, Schedule, Send, Work
from rlt_dist.parallel.schedule.looped import looped
from rlt_dist.parallel.schedule.pipeline import gpipe, one_f_one_b

ALPHA = 0.3
NAMES = "abvw"
"""A stage's weights: encoder x' = a x; memory m = w e; decoder y = b u + v (u before) + m, where
the first stage's u is e + alpha s."""


def weight(name: str, stage: int) -> float:
    return 0.2 + 0.1 * NAMES.index(name) + 0.03 * stage


def token(micro: int) -> float:
    return 1.0 + 0.25 * micro


def target(micro: int, step: int) -> float:
    """The loss is the sum of target times s over all steps."""
    return 0.5 + 0.1 * ((3 * micro + 2 * step) % 7)


class Stage:
    """What one stage holds; every method is the work of that name.

    Attributes:
        values: what was made or received here, by (value, micro-batch, step, stage that made it).
        inputs: u by (micro-batch, step), for good; `tape` has them of one part only.
        gradient: by weight.
    """

    def __init__(self, p: int, last: int, parts: Sequence[Sequence[int]], feedback: bool) -> None:
        self.p, self.last, self.parts, self.feedback = p, last, parts, feedback
        self.a, self.b, self.v, self.w = (weight(name, p) for name in NAMES)
        self.values: dict[tuple[str, int, int, int], float] = {}
        self.inputs: dict[tuple[int, int], float] = {}
        self.tape: dict[int, dict[int, float]] = defaultdict(dict)
        self.dy: dict[tuple[int, int], float] = {}
        self.du: dict[tuple[int, int], float] = {}
        self.formed: dict[tuple[int, int], int] = defaultdict(int)
        self.dm: dict[int, float] = defaultdict(float)
        self.gradient: dict[str, float] = defaultdict(float)
        self.loss = 0.0
        self.carried: dict[int, float] = {}

    def take(self, value: str, micro: int, step: int, source: int) -> float:
        return self.values[value, micro, step, source]

    def put(self, value: str, micro: int, step: int, number: float) -> None:
        self.values[value, micro, step, self.p] = number

    def do(self, work: Work) -> None:
        getattr(self, work.kind.replace(" ", "_"))(work.micro, work.step, work.count)

    def embed(self, i: int, *_: int) -> None:
        self.put("embedded", i, 0, token(i))

    def layer_input(self, i: int) -> float:
        if self.p:
            return self.take("x", i, 0, self.p - 1)
        return self.take("embedded", i, 0, 0)

    def forward(self, i: int, *_: int) -> None:
        self.put("x", i, 0, self.a * self.layer_input(i))

    def encode(self, i: int, *_: int) -> None:
        self.put("x" if self.p < self.last else "e", i, 0, self.a * self.layer_input(i))

    def memory(self, i: int, *_: int) -> None:
        self.put("memory", i, 0, self.w * self.take("e", i, 0, self.last))

    def decode(self, i: int, c: int, _: int) -> None:
        if self.p:
            u = self.take("u", i, c, self.p - 1)
        else:
            fed = self.take("s", i, c - 1, self.last) if c and self.feedback else 0.0
            u = self.take("e", i, 0, self.last) + ALPHA * fed
        if c in (sum(self.parts[i][:q]) for q in range(len(self.parts[i]))):
            self.tape[i].clear()
        self.inputs[i, c] = self.tape[i][c] = u
        y = self.b * u + self.v * self.before(i, c) + self.take("memory", i, 0, self.p)
        self.put("u" if self.p < self.last else "s", i, c, y)

    def before(self, i: int, c: int) -> float:
        return self.inputs[i, c - 1] if c else 0.0

    def carry(self, i: int, steps: int, _: int) -> None:
        self.carried[i] = self.take("s", i, steps - 1, self.last)

    def head(self, i: int, _: int, steps: int) -> None:
        for c in range(steps):
            value = "s" if ("s", i, c, self.p) in self.values else "x"
            self.loss += target(i, c) * self.take(value, i, c, self.p)
            self.put("head", i, c, target(i, c))

    def replay(self, i: int, first: int, count: int) -> None:
        assert not self.tape[i], "another part still holds its activations"
        self.tape[i] = {c: self.inputs[i, c] for c in range(first, first + count)}

    def decode_backward(self, i: int, c: int, _: int) -> None:
        assert c in self.tape[i], "its activations are not there"
        after = c < sum(self.parts[i]) - 1
        if self.p < self.last:
            dy = self.take("du", i, c, self.p + 1)
        else:
            dy = self.take("head", i, c, self.p)
            dy += self.take("ds", i, c, 0) if after and self.feedback else 0.0
        self.dy[i, c] = dy
        self.du[i, c] = du = self.b * dy + (self.v * self.dy[i, c + 1] if after else 0.0)
        self.put("du", i, c, du)
        if self.p == 0:
            self.put("ds", i, c - 1, ALPHA * du)

    def memory_gradient(self, i: int, first: int, count: int) -> None:
        self.dm[i] += sum(self.dy[i, c] for c in range(first, first + count))
        self.free(i, first)

    def weights(self, i: int, first: int, count: int) -> None:
        for c in range(first, first + count):
            self.gradient["b"] += self.tape[i][c] * self.dy[i, c]
            self.gradient["v"] += self.before(i, c) * self.dy[i, c]
        self.free(i, first)

    def free(self, i: int, first: int) -> None:
        self.formed[i, first] += 1
        if self.formed[i, first] == 2:
            self.tape[i].clear()

    def memory_backward(self, i: int, *_: int) -> None:
        assert self.formed[i, 0], "the first part has not been gone through"
        self.gradient["w"] += self.take("e", i, 0, self.last) * self.dm[i]
        of_merge = sum(du for (micro, _), du in self.du.items() if micro == i and self.p == 0)
        self.put("de", i, 0, self.w * self.dm[i] + of_merge)

    def encode_backward(self, i: int, *_: int) -> None:
        if self.p == self.last:
            self.layer_backward(i, sum(self.take("de", i, 0, q) for q in range(self.last + 1)))
        else:
            self.layer_backward(i, self.take("dx", i, 0, self.p + 1))

    def backward(self, i: int, *_: int) -> None:
        last = self.p == self.last
        dy = self.take("head", i, 0, self.p) if last else self.take("dx", i, 0, self.p + 1)
        self.layer_backward(i, dy)

    def layer_backward(self, i: int, dy: float) -> None:
        self.gradient["a"] += self.layer_input(i) * dy
        self.put("dx", i, 0, self.a * dy)

    def embed_backward(self, i: int, *_: int) -> None:
        self.gradient["token"] += (i + 1) * self.take("dx", i, 0, 0)


def run(schedule: Schedule, stages: Sequence[Stage], luck: random.Random) -> None:
    """Carry out all lists; luck decides who goes on."""
    at = [0] * len(schedule)
    channels: dict[tuple[int, int], deque] = defaultdict(deque)

    def can_go_on(p: int) -> bool:
        what = schedule[p][at[p]] if at[p] < len(schedule[p]) else None
        waits = isinstance(what, Receive) and not channels[what.message.source, p]
        return what is not None and not waits

    while able := [p for p in range(len(schedule)) if can_go_on(p)]:
        p = luck.choice(able)
        what, values = schedule[p][at[p]], stages[p].values
        at[p] += 1
        if isinstance(what, Work):
            stages[p].do(what)
            continue
        m = what.message
        key = (m.value, m.micro, m.step, m.source)
        if isinstance(what, Send):
            assert m.source == p != m.target
            channels[p, m.target].append((m, values[key]))
        else:
            sent, number = channels[m.source, p].popleft()
            assert sent == m
            assert key not in values
            values[key] = number
    assert at == [len(instructions) for instructions in schedule], "stages wait for ever"
    assert not any(channels.values())


def plain(
    stages: int, parts: Sequence[Sequence[int]], feedback: bool, decoder: bool
) -> tuple[float, dict[tuple[str, int], float], list[float]]:
    """Loss, gradients by weight and stage, and last outputs, by autograd over a plain loop."""
    leaf = {
        (name, p): torch.tensor(weight(name, p), dtype=torch.float64, requires_grad=True)
        for name in NAMES
        for p in range(stages)
    }
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    leaf["token", 0] = scale
    loss, lasts = torch.zeros((), dtype=torch.float64), []
    for i, steps in enumerate(map(sum, parts)):
        # A unit more of the token's weight is i + 1 more of micro-batch i's embedding.
        x = token(i) + (scale - 1) * (i + 1)
        for p in range(stages):
            x = leaf["a", p] * x
        s = x
        before: list[Tensor | float] = [0.0] * stages
        for c in range(steps if decoder else 0):
            u = x + (ALPHA * s if c and feedback else 0.0)
            for p in range(stages):
                y = leaf["b", p] * u + leaf["v", p] * before[p] + leaf["w", p] * x
                before[p], u = u, y
            s = u
            loss = loss + target(i, c) * s
        if not decoder:
            loss = loss + target(i, 0) * s
        lasts.append(s.item())
    loss.backward()
    return loss.item(), {key: w.grad.item() for key, w in leaf.items() if w.grad is not None}, lasts


def check(schedule: Schedule, parts: Sequence[Sequence[int]], feedback: bool, seed: int) -> None:
    """Run a whole training step and compare."""
    last = len(schedule) - 1
    stages = [Stage(p, last, parts, feedback) for p in range(last + 1)]
    run(schedule, stages, random.Random(seed))
    decoder = any(isinstance(w, Work) and w.kind == "decode" for w in schedule[0])
    loss, gradients, lasts = plain(last + 1, parts, feedback, decoder)
    assert stages[last].loss == pytest.approx(loss, rel=1e-12)
    assert gradients.keys() == {(n, s.p) for s in stages for n in s.gradient}
    for (name, p), gradient in gradients.items():
        assert stages[p].gradient[name] == pytest.approx(gradient, rel=1e-12, abs=1e-12)
    if decoder and feedback:
        assert stages[0].carried == pytest.approx(dict(enumerate(lasts)), rel=1e-12)


STAGES, SEEDS = st.integers(1, 8), st.integers(0, 10**6)
PARTS = st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), min_size=1, max_size=12)
GROUPS = st.none() | st.integers(1, 12)


@settings(max_examples=80)
@given(STAGES, PARTS, st.booleans(), GROUPS, st.integers(1, 3), st.sampled_from((0, 0.25)), SEEDS)
def test_the_loop_over_stages_gives_the_gradients_of_a_plain_loop(
    stages, parts, feedback, group, in_flight, hop, seed
):
    schedule = looped(stages, parts, feedback=feedback, group=group, in_flight=in_flight, hop=hop)
    check(schedule, parts, feedback, seed)


@settings(max_examples=40)
@given(st.sampled_from((gpipe, one_f_one_b)), STAGES, st.integers(1, 12), SEEDS)
def test_a_stack_over_stages_gives_the_gradients_of_a_plain_loop(make, stages, count, seed):
    check(make(stages, count), [(1,)] * count, False, seed)


@settings(max_examples=30)
@given(STAGES, PARTS, st.booleans(), GROUPS, SEEDS)
def test_validation_gives_losses_and_states_alone(stages, parts, feedback, group, seed):
    schedule = looped(stages, parts, feedback=feedback, group=group, backward=False)
    made = [Stage(p, stages - 1, parts, feedback) for p in range(stages)]
    run(schedule, made, random.Random(seed))
    loss, _, lasts = plain(stages, parts, feedback, True)
    assert made[-1].loss == pytest.approx(loss, rel=1e-12)
    assert made[0].carried == pytest.approx(dict(enumerate(lasts)) if feedback else {}, rel=1e-12)
    assert not any(stage.gradient for stage in made)
