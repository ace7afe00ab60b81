"""What some work is made of: what a cluster's measured rates are of."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from math import ceil, prod

from rlt_dist.costs.cluster import compiled_name
from rlt_dist.costs.demand import Demand, demand_of
from rlt_dist.costs.effort import Product, Purpose
from rlt_dist.costs.looped import LoopedRank
from rlt_dist.costs.recurrent import RecurrentRank
from rlt_dist.costs.run import Rank, Run
from rlt_dist.costs.traffic import updated_numbers
from rlt_dist.mesh.axes import Place
from rlt_dist.ops.recurrence.native.loop import PANEL_BYTES
from rlt_dist.parallel.schedule.instructions import Kind, Work

_UPDATE_NUMBERS, _UPDATE_OPERATORS = 24, 20
"""Of AdamW, norm and forgotten gradient: numbers read and written of each number, operators of each
parameter."""
_EXCHANGE_OPERATORS = 8
"""Of copies in and out of messages, operators of each parameter."""
_IN_LOOP = (Kind.DECODE, Kind.REPLAY, Kind.DECODE_BACKWARD)


@dataclass(frozen=True)
class Taken:
    """What some work is made of.

    Attributes:
        weighted, other: FLOPs of products with weights, and of those without.
        scores: products of a query and a key, and as many for each other use of that pair.
        numbers: read and written, those of products too.
        operations: operators started.
        calls: pieces of work.
    """

    weighted: float = 0.0
    other: float = 0.0
    scores: float = 0.0
    numbers: float = 0.0
    operations: float = 0.0
    calls: float = 0.0

    def times(self, factor: float) -> "Taken":
        """As much again and again."""
        return Taken(*(factor * getattr(self, field.name) for field in fields(self)))

    def plus(self, other: "Taken") -> "Taken":
        """With something more."""
        return Taken(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


def compiled(run: Run) -> bool:
    """Whether the decoder's steps run in the compiled loop."""
    chosen, whole = run.config.ops.recurrence, run.axes.tensor == 1
    return chosen == "native" or (chosen == "auto" and run.compiled and whole)


def rate_name(run: Run, kind: Kind | str) -> str:
    """How a cluster's file names the rates of a kind of work."""
    if not (compiled(run) and kind in _IN_LOOP):
        return str(kind)
    return compiled_name(Kind.DECODE if kind == Kind.REPLAY else Kind(kind))


def taken(run: Run, rank: Rank, work: Work, *, stepwise: bool) -> Taken:
    """Of some work of a rank.

    Args:
        stepwise: the decoder's steps are called one by one, as in a pipeline, not all at once.
    """
    if compiled(run) and work.kind in _IN_LOOP and isinstance(rank, LoopedRank):
        own = _in_loop(run, rank, work)
        return own if stepwise or work.kind == Kind.REPLAY else replace(own, calls=0.0)
    demand = demand_of(rank, work)
    assert not isinstance(rank, RecurrentRank)
    return _by_operators(rank.effort(work).products, demand, rank.share.config.head_width)


def updating(run: Run, place: Place) -> Demand:
    """What a rank's gradients and parameters take after the passes: their sums' copies in and out
    of messages, the norm, AdamW's step."""
    held, ranks = run.held(place.stage, place.tensor), run.axes.data
    own, whole = updated_numbers(run, held.values()), sum(map(prod, held.values()))
    operations, numbers = _UPDATE_OPERATORS * len(held), _UPDATE_NUMBERS * own
    if ranks > 1:
        operations += _EXCHANGE_OPERATORS * len(held)
        numbers += 6 * whole + (3 * ranks + 4) * own
    return Demand(operations, numbers)


def demanded(demand: Demand) -> Taken:
    """Of work without products."""
    return Taken(numbers=demand.numbers, operations=demand.operations, calls=demand.calls)


def _by_operators(products: Sequence[Product], demand: Demand, head_width: int) -> Taken:
    weighted = sum(p.flops for p in products if p.weight or p.purpose == Purpose.WEIGHTS)
    other = sum(product.flops for product in products) - weighted
    numbers = sum(product.numbers for product in products)
    scores = other / (2 * head_width)
    return demanded(demand).plus(Taken(weighted, other, scores, numbers))


def _in_loop(run: Run, rank: LoopedRank, work: Work) -> Taken:
    """Of the compiled loop (`ops/recurrence/native`): it visits each token of a lane in each layer,
    which meets the entries that it sees, one by one; columns of weights come in panels, and the
    weights anew in each step. A score is counted once, with its FLOPs of forward.
    """
    weights = [product for product in rank.effort(work).products if product.weight]
    if not weights:
        return Taken()
    share, own, config = rank.share, rank.own, rank.share.config
    first, tokens = rank.tokens(work)
    visits = share.decoder * own.lanes * tokens
    seen = rank.entries_seen(first, tokens) / tokens + config.window
    scores = visits * share.heads * seen
    panel = PANEL_BYTES // run.numbers.real
    whole = Taken(
        weighted=sum(p.flops / p.n * ceil(p.n / panel) * panel for p in weights),
        other=4 * config.head_width * scores,
        scores=scores,
        numbers=sum(product.repeats * product.k * product.n for product in weights),
        operations=visits,
        calls=1.0,
    )
    # Lanes that are apart leave rows of a step empty, which the loop does not visit.
    return whole if work.kind == Kind.REPLAY else whole.times(rank.filled)
