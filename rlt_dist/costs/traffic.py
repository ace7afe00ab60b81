"""Every message of one optimizer step, as one rank takes part in it.

It is what `train.step` sends with engine torch: exactly, where all lanes are at the same place of
their documents and every target is scored. What a step's record, validation and checkpoints send
besides is not here. DeepSpeed cuts its sums into buckets of its own: the same bytes, other calls.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from math import prod

from rlt_dist.config.model import RltConfig
from rlt_dist.costs.effort import Transfer
from rlt_dist.costs.looped import LoopedRank
from rlt_dist.costs.run import Rank, Run
from rlt_dist.costs.state import state_shapes
from rlt_dist.mesh.axes import Place
from rlt_dist.parallel.plan.cut import own

_INTEGER, _DOUBLE = 8, 8
"""Bytes of int64 and float64."""


def step_traffic(run: Run, place: Place) -> list[Transfer]:
    """What the rank at a place of the mesh sends in one step; equal messages are one entry."""
    found: Counter[Transfer] = Counter()
    for transfer in _all(run, place):
        found[transfer._replace(calls=1)] += transfer.calls
    return [transfer._replace(calls=calls) for transfer, calls in found.items() if calls]


def traffic_around(run: Run, place: Place) -> list[Transfer]:
    """What of it is not sent while micro-batches pass: sums of gradients, updates, decisions."""
    return list(_sent_at_all(run, place, (*_gradients(run, place), *_decisions(run, place))))


def _all(run: Run, place: Place) -> Iterator[Transfer]:
    yield from _sent_at_all(run, place, _passes(run, place))
    yield from traffic_around(run, place)


def _sent_at_all(run: Run, place: Place, transfers: Iterable[Transfer]) -> Iterator[Transfer]:
    """Without those of a rank alone."""
    return (sent for sent in transfers if len(run.axes.members(sent.group, place)) > 1)


def _passes(run: Run, place: Place) -> Iterator[Transfer]:
    """Forward and backward of all micro-batches."""
    rank = run.rank(place.stage, place.tensor)
    for work, count in rank.alike():
        for transfer in rank.effort(work).sums:
            yield transfer._replace(calls=transfer.calls * count * run.micro_batches)
    if run.axes.pipeline > 1:
        for bytes_, calls in _sent(run, place.stage, rank):
            yield Transfer("pipeline", "send", bytes_, calls * run.micro_batches)


def _agreed_parts(run: Run) -> Iterator[Transfer]:
    """How many tokens a part of the decoder has."""
    asked = run.config.recompute.decoder_chunk == "auto"
    loops = run.config.ops.recurrence != "reference"
    piped = run.axes.pipeline > 1
    if asked and loops:
        yield Transfer("tensor", "all_reduce", 3 * _INTEGER, 1 if piped else run.micro_batches)
    if piped:
        yield Transfer("replica", "all_reduce", _INTEGER)


def _sent(run: Run, stage: int, rank: Rank) -> Iterator[tuple[int, int]]:
    """A micro-batch's messages to other stages: bytes, and how many."""
    lane = run.config.model.d_model * run.numbers.real
    whole, last = run.own.rows * lane, run.axes.pipeline - 1
    yield whole, (stage < last) + (stage > 0)  # x, dx
    if not isinstance(rank, LoopedRank):
        return
    yield whole, last if stage == last else 1  # e to all, de to the last
    for step in rank.steps:
        yield run.own.lanes * step.count * lane, (stage < last) + (stage > 0)  # u, du
    if rank.share.config.chunk:
        steps = len(rank.steps)
        fed = steps if stage == last else steps - 1 if stage == 0 else 0  # s, ds
        yield run.own.lanes * lane, fed


def _gradients(run: Run, place: Place) -> Iterator[Transfer]:
    """Shared gradients, then all gradients over the data axis, and what was updated back."""
    real, tensors = run.numbers.real, run.axes.tensor
    held = run.held(place.stage, place.tensor)
    over_tensor, shared = 0, Counter[tuple[int, ...]]()
    for name, shape in held.items():
        layout = run.layouts[name]
        if layout.partial or (layout.cut is not None and layout.cut.copies(tensors) > 1):
            over_tensor += prod(layout.whole)
        if len(layout.stages) > 1:
            shared[layout.stages] += prod(shape)
    if over_tensor:
        yield Transfer("tensor", "all_reduce", over_tensor * real)
    for stages, numbers in sorted(shared.items()):
        yield Transfer(stages, "all_reduce", numbers * real)
    rows = updated_numbers(run, held.values())
    yield Transfer("data", "all_to_all", run.axes.data * rows * real)
    yield Transfer("data", "all_gather", rows * real)


def updated_numbers(run: Run, shapes: Iterable[tuple[int, ...]]) -> int:
    """How many numbers of its parameters the first data-parallel rank updates."""
    return sum(len(own(n, 0, run.axes.data)) * prod(rest) for n, *rest in shapes)


def _decisions(run: Run, place: Place) -> Iterator[Transfer]:
    """Scored tokens, parts of the decoder, loss and norm, which lanes restart, how many."""
    model = run.config.model
    if isinstance(model, RltConfig) and model.decoder_layers:
        yield from _agreed_parts(run)
    yield Transfer("data", "all_reduce", _INTEGER, 2)
    yield Transfer("world", "all_reduce", 2 * _DOUBLE)
    yield Transfer("replica", "all_reduce", run.lanes * _INTEGER)
    if run.config.guard.state_norm is not None:
        kept = state_shapes(run, place.stage, place.tensor, run.own.seen + run.own.tokens)
        norms = sum(min(shape) > 0 for shape in kept.values())
        yield Transfer("tensor", "all_reduce", norms * run.lanes * _DOUBLE)
