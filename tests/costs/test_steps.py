"""The chunk steps that costs count against those that a segment is cut into."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlt_dist.costs.looped import steps_of
from rlt_dist.costs.sizes import Pass
from rlt_dist.ops.recurrence.chunks import plan_chunks


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    feedback=st.integers(1, 20),
    before=st.integers(0, 30),
)
@settings(max_examples=60, deadline=None)
def test_steps_are_those_that_lanes_take(lengths: list[int], feedback: int, before: int) -> None:
    tokens, firsts = sum(lengths), [sum(lengths[:k]) for k in range(len(lengths))]
    parts = [slice(a, a + n) for a, n in zip(firsts, lengths, strict=True)]
    for apart in (False, True):
        # One lane at every place between two borders, or all at the same.
        places = torch.arange(before, before + (feedback if apart else 1))
        position = places + torch.arange(tokens)[:, None]
        slots = [plan_chunks(position[part], feedback).slots for part in parts]
        own = Pass(len(places), tokens, before, 0, apart=apart)
        found = steps_of(parts, feedback, own)
        taken = [(number, at.count) for number, part in enumerate(slots) for at in part]
        assert [(step.part, step.count) for step in found] == taken
        ends = [parts[step.part].stop - step.first - step.count for step in found]
        assert min(ends) == 0
