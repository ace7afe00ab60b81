"""What forward keeps of a micro-batch for its backward, in bytes: the sizes of what autograd and
the decoder's tapes save.
"""

from dataclasses import dataclass

from rlt_dist.costs.looped import LoopedRank, LoopedShare
from rlt_dist.costs.recurrent import RecurrentRank
from rlt_dist.costs.run import Run, tape_bytes
from rlt_dist.costs.sizes import Numbers, Pass
from rlt_dist.costs.stack import StackRank, chosen
from rlt_dist.costs.taken import compiled
from rlt_dist.ops.cross_entropy import block_tokens


@dataclass(frozen=True)
class Kept:
    """Bytes.

    Attributes:
        forward: of a micro-batch, from its forward to its backward.
        shared: of all micro-batches together, as long.
        logits: what the head has besides while it runs.
        head: gradients that the head leaves.
        backward: what backward makes of a micro-batch before it lets go of anything.
        shared_backward: the same of all micro-batches together.
        first_layers: what is left of `forward` when only the first layers' backward is to come.
        layer_backward: what a layer's backward has at a time.
        after: what the new state holds until all micro-batches' are joined.
    """

    forward: int
    shared: int
    logits: int
    head: int
    backward: int
    shared_backward: int
    first_layers: int
    layer_backward: int
    after: int


def kept_of(run: Run, stage: int) -> Kept:
    """Of the tensor rank of a stage that has most."""
    rank = run.rank(stage)
    if isinstance(rank, StackRank):
        return _stack(rank)
    if isinstance(rank, RecurrentRank):
        return _recurrent(rank)
    return _looped(rank, compiled(run))


# -- RLT ---------------------------------------------------------------------------------------


def _looped(rank: LoopedRank, native: bool) -> Kept:
    share, own, numbers = rank.share, rank.own, rank.numbers
    config, n, real = share.config, own.rows, numbers.real
    d, width = config.d_model, config.head_width
    entries = own.lanes * (own.past(config.memory_len) + own.tokens)
    pair = 2 * entries * share.kv_heads * width * real
    stream = n * d * real
    encoder = _encoder_layer(share, own, numbers, pair)
    layer = stream + pair if rank.recompute else encoder
    masks = n * d * 4 if config.dropout else 0
    tables = n * width * real + own.tokens * entries * numbers.narrow
    groups = share.groups * pair
    memories = groups * (2 if share.kv_heads > 1 else 1)  # as projected, and as they are best read
    e = 2 * stream  # and its norm
    fed_back = share.first and config.chunk > 0
    if fed_back:
        e += stream + n * share.merged * real  # in the order of time; its half of the gate
    elif share.first and config.feedback:
        # What is merged in, before and after its norm and beside e, and the sum; the gate, before
        # and after alpha, and what it weighs.
        e += 7 * stream + 3 * n * share.merged * real
    token, back, border = tape_bytes(share, own, numbers)
    window = 2 * share.kv_heads * width * own.lanes * real * share.decoder
    longest = max(part.stop - part.start for part in rank.parts)
    # A part's buffers have a slot more than tokens, and the entries of the window before them.
    tapes = len(rank.parts) if rank.cut.keep else 1
    taped = (own.tokens if rank.cut.keep else longest) + tapes
    borders = (len(rank.parts) - 1) * border
    fed = 4 * stream if fed_back else stream
    decoder = taped * (token + window) + tapes * border + borders + fed + stream
    decoder += share.decoder * 3 * masks * (2 if rank.cut.keep else 1)
    if not native:
        decoder += own.tokens * entries * real
    if not share.decoder:
        e, decoder = stream, 0  # the head reads the encoder
    first = masks + tables + share.encoder * layer
    weights = decoder_weights(share) * real
    merge = 2 * share.merged * d * real if fed_back else 0
    head = d * share.words * real if share.last else 0
    outputs = own.scored * d * real if share.last else 0
    again = encoder if rank.recompute else 0
    scores = longest * own.lanes * share.heads * (entries // own.lanes) * real
    packed = (weights + merge) * (1 if rank.cut.keep else 2) if native else 0
    layer_backward = again + n * (3 * share.inner + 4 * d) * real
    backward = 2 * stream + fed + groups + (longest + 1) * (back + window) + border + scores
    return Kept(
        forward=first + e + memories + decoder + outputs,
        shared=_folded(share) * real + merge,
        logits=_logits(own.scored, d, share.words, numbers) if share.last else 0,
        head=head,
        backward=backward if share.decoder else layer_backward,
        shared_backward=weights + merge + packed,
        first_layers=first + groups,
        layer_backward=layer_backward,
        after=share.encoder * pair + groups + border,  # entries that are forgotten, too
    )


def _encoder_layer(share: LoopedShare, own: Pass, numbers: Numbers, pair: int) -> int:
    """What one encoder layer keeps: normed inputs, queries, keys, values, what was attended to with
    its normaliser, and the feed-forward's two branches."""
    config, n, narrow = share.config, own.rows, numbers.narrow
    d, queries = config.d_model, share.heads * config.head_width
    normed = 2 * n * (d * narrow + 4)
    attended = n * (2 * queries * narrow + share.heads * 4)
    masks = 2 * n * d * 4 if config.dropout else 0
    cast = pair * narrow // numbers.real if narrow < numbers.real else 0
    return normed + attended + pair + cast + 2 * n * share.inner * narrow + masks


def decoder_weights(share: LoopedShare) -> int:
    """Numbers of the decoder layers' weights."""
    config = share.config
    d, width = config.d_model, config.head_width
    queries, keys = share.heads * width, share.kv_heads * width
    return share.decoder * d * (4 * queries + 2 * keys + 3 * share.inner)


def _folded(share: LoopedShare) -> int:
    """Numbers of weights with norms folded in, and of what was put side by side for it."""
    config = share.config
    d, width = config.d_model, config.head_width
    queries, keys = share.heads * width, share.kv_heads * width
    return share.decoder * d * (2 * (queries + 2 * keys) + queries + 4 * share.inner)


def _logits(n: int, d: int, words: int, numbers: Numbers) -> int:
    """A block's logits, the normed hidden states and their gradient."""
    wider = numbers.real if numbers.narrow < numbers.real else 0
    block = min(n, block_tokens(words)) * words * (numbers.narrow + wider)
    return block + 2 * n * d * numbers.real


# -- Transformer-XL ----------------------------------------------------------------------------


def _stack(rank: StackRank) -> Kept:
    share, own, numbers = rank.share, rank.own, rank.numbers
    config, n, real, narrow = share.config, own.rows, numbers.real, numbers.narrow
    d, queries = config.d_model, share.heads * config.head_width
    past = own.past(config.memory_len)
    keys, masks = past + own.tokens, n * d * 4 if config.dropout else 0
    stream, scores = n * d * real, share.heads * n * keys * real
    weighing = share.heads * n * keys * 4 if config.dropatt else 0
    pair = 2 * own.lanes * keys * queries
    attention = (2 * n * queries + pair + keys * queries) * narrow + scores + weighing
    norms = 2 * (stream + n * d * narrow + 8 * n)
    inner = n * share.inner * narrow * (1 if not config.dropout else 2)
    inner += n * config.d_inner * 4 if config.dropout else 0
    normed = own.lanes * past * d * narrow if config.pre_norm else 0
    layer = norms + normed + attention + inner + 2 * masks
    tables = own.tokens * own.lanes * keys * real + keys * d * real
    kept = stream if rank.recompute else layer
    first = masks + tables + share.layers * kept
    sizes = list(zip(chosen(own), share.widths, share.words, strict=True))
    widths = share.widths if share.narrowed else [d] * len(share.words)
    head = sum(width * words for width, words in zip(widths, share.words, strict=True)) * real
    logits = max(_logits(count, 0, words, numbers) for count, _, words in sizes)
    hidden = sum(2 * count * width for count, width, _ in sizes) * real
    shared = rank.recompute or config.pre_norm  # a segment as long as the memory is its state
    state = own.lanes * min(past + own.tokens, config.memory_len) * d * real
    after = share.layers * state * (not (shared and own.tokens == config.memory_len))
    # By the time of a layer's attention its feed-forward has let go of what it kept.
    turning = 2 * scores + pair * real + 4 * n * queries * real - inner - norms // 2
    back = 2 * stream + max(turning, n * share.inner * real)
    return Kept(
        forward=first + stream + masks + after,
        shared=0,
        logits=logits + hidden if share.last else 0,
        head=head if share.last else 0,
        backward=back + (layer if rank.recompute else 0),
        shared_backward=0,
        first_layers=first - (share.layers - 1) * kept + share.layers * state,
        layer_backward=back + (layer if rank.recompute else 0),
        after=share.layers * state,
    )


# -- GRU ---------------------------------------------------------------------------------------


def _recurrent(rank: RecurrentRank) -> Kept:
    own, d, real = rank.own, rank.config.d_model, rank.numbers.real
    stream = own.rows * d * real
    # Of a layer: the state's half of all gates and once more the candidate's, the candidate and
    # what it differs by from the state, the outputs token by token and joined.
    layer = 8 * stream
    state = rank.config.layers * own.lanes * d * real
    return Kept(
        forward=stream + rank.config.layers * layer + own.scored * d * real,
        shared=0,
        logits=_logits(own.scored, d, rank.vocabulary, rank.numbers),
        head=d * rank.vocabulary * real,
        backward=2 * stream,
        shared_backward=0,
        first_layers=stream + layer,
        layer_backward=2 * stream,
        after=state,
    )
