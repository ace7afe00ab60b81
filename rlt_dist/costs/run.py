"""A run on a mesh, as costs see it: what each rank has and does in one optimizer step."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from math import prod

from rlt_dist.config.load import validate
from rlt_dist.config.model import GruConfig, ModelConfig, RltConfig
from rlt_dist.config.run import RunConfig
from rlt_dist.costs.looped import LoopedRank, LoopedShare, looped_share
from rlt_dist.costs.recurrent import RecurrentRank
from rlt_dist.costs.sizes import Numbers, Pass, numbers_of, pass_of
from rlt_dist.costs.stack import StackRank, stack_share
from rlt_dist.data.stream.loader import lanes_of_rank
from rlt_dist.mesh.axes import Axes
from rlt_dist.ops.recurrence.parts import Cut, short_part, training_cut
from rlt_dist.ops.recurrence.problem import Shape
from rlt_dist.ops.recurrence.tape import buffer_sizes, numbers_of_token
from rlt_dist.parallel.plan.layout import Layout, check_vocabulary, layouts
from rlt_dist.parallel.plan.placement import place

Rank = LoopedRank | StackRank | RecurrentRank


@dataclass(frozen=True)
class Run:
    """A configuration on a mesh.

    Attributes:
        config, vocabulary, axes: which.
        own: a micro-batch's segment.
        lanes: of a data-parallel rank.
        compiled: `ops.recurrence: auto` is the compiled loop, as it is on a CPU.
    """

    config: RunConfig
    vocabulary: int
    axes: Axes
    own: Pass
    lanes: int
    compiled: bool

    @property
    def micro_batches(self) -> int:
        """Of a data-parallel rank in a step."""
        return self.lanes // self.own.lanes

    @property
    def numbers(self) -> Numbers:
        """Bytes of a number."""
        return numbers_of(self.config)

    def rank(self, stage: int, tensor: int = 0) -> Rank:
        """What a rank of a stage does of one micro-batch."""
        model, recompute = self.config.bounded_model, self.config.recompute.layers
        if isinstance(model, GruConfig):
            return RecurrentRank(model, self.vocabulary, self.own, self.numbers)
        where, tensors = place(model, self.axes.pipeline)[stage], self.axes.tensor
        given = (self.vocabulary, where, tensor, tensors)
        if isinstance(model, RltConfig):
            share = looped_share(model, *given)
            return LoopedRank(share, self.own, self.cut(stage), self.numbers, recompute)
        return StackRank(stack_share(model, *given), self.own, self.numbers, recompute)

    def ranks(self) -> Iterator[Rank]:
        """By stage, the tensor rank that has most."""
        return map(self.rank, range(self.axes.pipeline))

    def cut(self, stage: int) -> Cut:
        """The parts in which a stage's decoder goes through a segment; RLT only."""
        cuts = self._cuts
        if all(cut.keep for cut in cuts):
            return cuts[stage]
        lengths = (self.own.tokens + 1 if cut.keep else cut.length for cut in cuts)
        return Cut(min(lengths), keep=False)

    @cached_property
    def _cuts(self) -> list[Cut]:
        """What each stage would choose."""
        model, chosen = self.config.bounded_model, self.config.recompute
        assert isinstance(model, RltConfig)
        budget, short = round(chosen.budget_gib * 2**30), short_part(self.own.lanes, model.d_model)
        shares = [
            looped_share(model, self.vocabulary, where, tensors=self.axes.tensor)
            for where in place(model, self.axes.pipeline)
        ]
        sizes = [partial(tape_bytes, share, self.own, self.numbers) for share in shares]
        given = (chosen.decoder_chunk, budget, self.own.tokens, short)
        return [training_cut(*given, bytes_of) for bytes_of in sizes]

    @cached_property
    def layouts(self) -> dict[str, Layout]:
        """Of all parameters, by name."""
        return _layouts(self.config.bounded_model, self.vocabulary, self.axes.pipeline)

    @property
    def parameters(self) -> int:
        """Of the whole model."""
        return sum(prod(layout.whole) for layout in self.layouts.values())

    def held(self, stage: int, tensor: int) -> dict[str, tuple[int, ...]]:
        """By name, the shapes of what a rank has of its stage's parameters."""
        tensors = self.axes.tensor
        return {
            name: local_shape(layout, tensor, tensors)
            for name, layout in self.layouts.items()
            if stage in layout.stages
        }


def run_of(
    config: RunConfig,
    vocabulary: int,
    axes: Axes,
    seen: int | None = None,
    *,
    compiled: bool = True,
    apart: bool = False,
) -> Run:
    """A configuration on a mesh, which need not be the one that it names.

    Args:
        seen: tokens of its document that every lane had read before the step; None: so many that
            no state grows any more.
        compiled: see `Run`.
        apart: see `Pass`.

    Raises:
        UserError: lanes or micro-batches cannot be shared out equally, the vocabulary not cut, or
            there are more stages than layers.
    """
    update = {"data": axes.data, "pipeline": axes.pipeline, "tensor": axes.tensor}
    content = config.model_dump() | {"mesh": update}
    config = validate(content, RunConfig, f"mesh {axes}")
    check_vocabulary(config.model, vocabulary, axes.tensor)
    lanes = len(lanes_of_rank(config.data.lanes, 0, axes.data))
    own = pass_of(config, vocabulary, config.micro_batch_lanes(lanes), seen, apart=apart)
    return Run(config, vocabulary, axes, own, lanes, compiled)


def tape_bytes(share: LoopedShare, own: Pass, numbers: Numbers) -> tuple[int, int, int]:
    """Bytes of a token of all lanes on the decoder's tape, in forward and, besides, in backward;
    and of the windows at a border of parts."""
    config = share.config
    shape = Shape(share.heads, share.kv_heads, config.head_width, config.window, config.eps)
    known = own.past(config.memory_len) + own.tokens
    each = numbers_of_token(buffer_sizes(shape, config.d_model, share.inner, known))
    forward, backward = (share.decoder * own.lanes * numbers.real * n for n in each)
    window = (config.window - 1) * 2 * share.kv_heads * config.head_width
    return forward, backward, share.decoder * own.lanes * numbers.real * window


def local_shape(layout: Layout, tensor: int, tensors: int) -> tuple[int, ...]:
    """The shape of what a tensor rank has of a parameter."""
    shape = list(layout.whole)
    if layout.cut is not None and tensors > 1:
        shape[layout.cut.dim] = sum(map(len, layout.cut.ranges(tensor, tensors)))
    return tuple(shape)


@lru_cache(maxsize=64)
def _layouts(model: ModelConfig, vocabulary: int, stages: int) -> dict[str, Layout]:
    return layouts(model, vocabulary, stages)
