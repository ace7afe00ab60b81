"""How many parameters a model has, by piece, and on each process of a mesh; none is allocated."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from rlt_dist.config.model import ModelConfig
from rlt_dist.mesh.axes import Axes
from rlt_dist.parallel.plan.layout import Layout, layouts

_PIECES = {
    "embed": "embedding",
    "output_norm": "head",
    "output": "head",
    "word_emb": "embedding",
    "r_w_bias": "layers",
    "r_r_bias": "layers",
    "crit": "head",
    "gru": "layers",
}
"""By the first part of a parameter's name, where the piece is called otherwise."""

Pieces = Mapping[str, int]
"""Numbers of parameters by piece, in the order of the model."""


@dataclass(frozen=True)
class Share:
    """What the processes at one place of the mesh have, alike on all data-parallel replicas.

    Attributes:
        stage, tensor: where it is.
        pieces: what it holds of each.
    """

    stage: int
    tensor: int
    pieces: Pieces

    @property
    def parameters(self) -> int:
        """All that it holds."""
        return sum(self.pieces.values())


@dataclass(frozen=True)
class Counts:
    """Attributes:
    pieces: of the whole model; what is tied counts once, where it stands first.
    shares: by stage and, within it, tensor rank.
    over_stages: by name, the stages that hold it, of what several of them hold.
    over_tensor: names of what several tensor ranks hold the same of.
    """

    pieces: Pieces
    shares: tuple[Share, ...]
    over_stages: Mapping[str, tuple[int, ...]]
    over_tensor: tuple[str, ...]

    @property
    def parameters(self) -> int:
        """Of the whole model."""
        return sum(self.pieces.values())

    def largest(self, stage: int) -> Share:
        """Of a stage's tensor ranks, the first of those that hold most."""
        shares = (share for share in self.shares if share.stage == stage)
        return max(shares, key=lambda share: share.parameters)


def count_parameters(config: ModelConfig, vocabulary: int, axes: Axes) -> Counts:
    """Count what a model has, and where a mesh puts it.

    Raises:
        UserError: the model has fewer layers than there are stages, or its cutoffs reach beyond
            the vocabulary.
    """
    every = layouts(config, vocabulary, axes.pipeline)
    whole = {name: layout.whole.numel() for name, layout in every.items()}
    shares = [
        Share(stage, tensor, _by_piece(_held(every, stage, tensor, axes.tensor)))
        for stage in range(axes.pipeline)
        for tensor in range(axes.tensor)
    ]
    return Counts(
        pieces=_by_piece(whole),
        shares=tuple(shares),
        over_stages={
            name: layout.stages for name, layout in every.items() if len(layout.stages) > 1
        },
        over_tensor=tuple(
            name for name, layout in every.items() if _holders(layout, axes.tensor) > 1
        ),
    )


def parameters_of(config: ModelConfig, vocabulary: int) -> int:
    """How many a whole model has; raises as `count_parameters` does."""
    return sum(layout.whole.numel() for layout in layouts(config, vocabulary, 1).values())


def _by_piece(parameters: Mapping[str, int]) -> Pieces:
    found: Counter[str] = Counter()
    for name, number in parameters.items():
        first = name.split(".", 1)[0]
        found[_PIECES.get(first, first)] += number
    order = ("embedding", "encoder", "memory", "merge", "decoder", "layers", "head")
    return {piece: found[piece] for piece in order if piece in found}


def _held(every: Mapping[str, Layout], stage: int, tensor: int, tensors: int) -> Mapping[str, int]:
    """By name, the numbers that one process has of each parameter of its stage."""
    return {
        name: _part(layout, tensor, tensors)
        for name, layout in every.items()
        if stage in layout.stages
    }


def _part(layout: Layout, tensor: int, tensors: int) -> int:
    numbers, cut = layout.whole.numel(), layout.cut
    if cut is None or tensors == 1:
        return numbers
    return numbers // layout.whole[cut.dim] * sum(map(len, cut.ranges(tensor, tensors)))


def _holders(layout: Layout, tensors: int) -> int:
    """How many tensor ranks hold the same numbers of a parameter."""
    return tensors if layout.cut is None else layout.cut.copies(tensors)
