"""The sizes that costs follow from: of a segment of some lanes, and of a rank's part of a run."""

from dataclasses import dataclass
from itertools import pairwise
from math import ceil, log

from rlt_dist.config.model import GruConfig, ModelConfig, RltConfig, TransformerXLConfig
from rlt_dist.config.run import RunConfig
from rlt_dist.models.transformer_xl.adaptive import Clusters

_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Pass:
    """A segment of a micro-batch: b lanes that have all read as much of their documents.

    Attributes:
        lanes, tokens: b, T.
        seen: tokens of its document that each lane had read before.
        scored: targets that count.
        tails: how many of them each tail of an adaptive softmax holds.
        apart: lanes are at all places between two borders of chunks, as documents of any length
            leave them; else they are all at one, `seen`.
    """

    lanes: int
    tokens: int
    seen: int
    scored: int
    tails: tuple[int, ...] = ()
    apart: bool = False

    @property
    def rows(self) -> int:
        """Tokens of all lanes."""
        return self.lanes * self.tokens

    def past(self, memory_len: int | None) -> int:
        """Positions that are carried in, of at most `memory_len`."""
        return self.seen if memory_len is None else min(self.seen, memory_len)


@dataclass(frozen=True)
class Numbers:
    """Bytes of a number.

    Attributes:
        real: of parameters, gradients, state and messages.
        narrow: of products.
    """

    real: int
    narrow: int


def numbers_of(config: RunConfig) -> Numbers:
    """In bfloat16 runs parameters, gradients and state are float32."""
    narrow = _BYTES[config.train.precision]
    return Numbers(max(narrow, 4), narrow)


def steady(config: RunConfig) -> int:
    """Tokens that a lane has read when no state grows any more, at a border of segments."""
    model, tokens = config.bounded_model, config.data.segment
    memory = 0 if isinstance(model, GruConfig) else model.memory_len or 0
    window = model.window if isinstance(model, RltConfig) and model.decoder_layers else 0
    return ceil(max(memory, window) / tokens) * tokens


def pass_of(
    config: RunConfig,
    vocabulary: int,
    lanes: int,
    seen: int | None = None,
    *,
    apart: bool = False,
) -> Pass:
    """A micro-batch of so many lanes with all targets scored.

    Args:
        seen: None: so many that the state is full.
        apart: see `Pass`.
    """
    tokens = config.data.segment
    scored = lanes * tokens
    seen = steady(config) if seen is None else seen
    tails = expected_tails(config.model, vocabulary, scored)
    return Pass(lanes, tokens, seen, scored, tails, apart)


def expected_tails(model: ModelConfig, vocabulary: int, scored: int) -> tuple[int, ...]:
    """How many targets each tail of an adaptive softmax holds, if ids follow Zipf's law.

    Id r, ranked by frequency, has a share in proportion to 1 / (r + 1).
    """
    if not isinstance(model, TransformerXLConfig):
        return ()
    bounds = Clusters(model.cutoffs, vocabulary).bounds
    shares = [log((b + 1) / (a + 1)) for a, b in pairwise(bounds[1:])]
    return tuple(round(scored * share / log(vocabulary + 1)) for share in shares)
