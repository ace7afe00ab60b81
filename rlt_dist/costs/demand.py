"""What a piece of work takes besides products: operators started, numbers read and written.

Counted as torch dispatches them (tests/costs/test_demand.py): views and allocations cost nothing,
a fused attention is one operator. Numbers are those of all tensors that operators other than
products are given and give, whatever a cache spares.
"""

from typing import NamedTuple

from rlt_dist.costs.looped import LoopedRank
from rlt_dist.costs.run import Rank
from rlt_dist.costs.stack import StackRank, chosen
from rlt_dist.ops.cross_entropy import block_tokens
from rlt_dist.parallel.schedule.instructions import Kind, Work
from rlt_dist.util.errors import UserError


class Demand(NamedTuple):
    """Attributes:
    operations: operators, products too.
    numbers: read and written, by all but products.
    calls: pieces of work that are asked for.
    """

    operations: int = 0
    numbers: int = 0
    calls: int = 1


def demand_of(rank: Rank, work: Work) -> Demand:
    """Of some work of a rank, by torch's operators.

    Raises:
        UserError: it is a GRU's, which nobody has counted.
    """
    if isinstance(rank, StackRank):
        return _stack(rank, work.kind)
    if isinstance(rank, LoopedRank):
        return _looped(rank, work)
    raise UserError("model.kind gru: its time is not predicted; study another model")


def _looped(rank: LoopedRank, work: Work) -> Demand:
    share, own = rank.share, rank.own
    config, n = share.config, own.rows
    d, width = config.d_model, config.head_width
    queries, keys, inner = share.heads * width, share.kv_heads * width, share.inner
    entries = own.lanes * (own.past(config.memory_len) + own.tokens) * keys
    encoder, decoder = share.encoder, share.decoder
    forward = n * (23 * d + 5 * inner + 9 * queries + 9 * keys) + 4 * entries
    match work.kind:
        case Kind.EMBED | Kind.EMBED_BACKWARD:
            return Demand(1, 2 * n * d)
        case Kind.ENCODE:
            return Demand(42 * encoder + 11, encoder * forward)
        case Kind.ENCODE_BACKWARD:
            numbers = n * (46 * d + 18 * inner + 8 * queries) + 2 * entries
            again = rank.recompute
            return Demand((62 + 42 * again) * encoder + 2, encoder * (numbers + again * forward))
        case Kind.MEMORY:
            return Demand(9 * decoder + 39, 16 * n * d + 4 * decoder * entries)
        case Kind.MEMORY_BACKWARD:
            return Demand(37, 46 * n * d + 2 * share.groups * entries)
        case Kind.CARRY:
            return Demand(2 * decoder, 4 * decoder * own.lanes * config.window * keys)
        case Kind.HEAD:
            return _head(n, d, share.words, 53)
    return _steps(rank, work)


def _steps(rank: LoopedRank, work: Work) -> Demand:
    """Of work on chunk steps of the decoder."""
    share, own, config = rank.share, rank.own, rank.share.config
    d, width = config.d_model, config.head_width
    queries, keys, inner = share.heads * width, share.kv_heads * width, share.inner
    decoder, window = share.decoder, config.window * keys
    first, tokens = rank.tokens(work)
    rows, seen = own.lanes * tokens, share.heads * rank.entries(first, tokens)
    several = tokens > 1
    if work.kind == Kind.REPLAY and rank.cut.keep:
        return Demand(calls=0)  # forward has left all that there is
    match work.kind:
        case Kind.DECODE | Kind.REPLAY:
            numbers = 38 * d + 12 * inner + 31 * queries + 17 * keys + 8 * window + 4 * seen
            each, once = (71, 114) if work.kind == Kind.REPLAY else (58 + 12 * several, 31)
            return Demand(each * decoder + once, decoder * rows * numbers)
        case Kind.DECODE_BACKWARD:
            numbers = 35 * d + 22 * inner + 35 * queries + 59 * keys + 21 * window + 15 * seen
            return Demand((61 + 17 * several) * decoder + 37, decoder * rows * numbers)
        case Kind.MEMORY_GRADIENT:
            return Demand(6 * decoder + 3, decoder * rows * 4 * (queries + seen))
    return Demand(8 * decoder + 1, decoder * rows * 5 * inner)


def _stack(rank: StackRank, kind: Kind) -> Demand:
    share, own, config = rank.share, rank.own, rank.share.config
    n, d, queries = own.rows, config.d_model, share.heads * config.head_width
    keys = own.past(config.memory_len) + own.tokens
    scores, entries = share.heads * n * keys, own.lanes * keys
    forward = n * (8 * d + 2 * share.inner + 10 * queries) + 6 * scores
    forward += entries * (4 * queries + 2 * d)
    match kind:
        case Kind.EMBED:
            return Demand(32, 2 * n * d + 2 * keys * d)
        case Kind.EMBED_BACKWARD:
            return Demand(3, 2 * n * d)
        case Kind.FORWARD:
            return Demand(23 * share.layers, share.layers * forward)
        case Kind.BACKWARD:
            numbers = n * (15 * d + 3 * share.inner + 48 * queries) + 4 * entries * queries
            numbers += 4 * scores + rank.recompute * forward
            return Demand((45 + 23 * rank.recompute) * share.layers, share.layers * numbers)
    sizes = zip(chosen(own), share.words, strict=True)
    found = [_head(count, 0, words, 41) for count, words in sizes]
    return Demand(sum(of.operations for of in found), n * 9 * d + sum(of.numbers for of in found))


def _head(n: int, d: int, words: int, operations: int) -> Demand:
    """A softmax and its gradient, in blocks of tokens."""
    blocks = -(-n // block_tokens(words)) if n else 0
    return Demand(operations * blocks, 39 * n * d + 14 * n * words)
