"""Whether a run fits into memory, and what would."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace

from rlt_dist.config.load import validate
from rlt_dist.config.model import RltConfig
from rlt_dist.config.run import RunConfig
from rlt_dist.costs.memory import RankMemory, rank_memory
from rlt_dist.costs.run import Run, run_of
from rlt_dist.mesh.axes import Axes
from rlt_dist.util.errors import UserError

_LARGEST = 64
"""The size up to which an axis is tried."""

Choices = Mapping[str, int | bool]
"""Values of the configuration, by whole key."""


@dataclass(frozen=True)
class Remedy:
    """A change with which a run fits.

    Attributes:
        choices: what is to be set.
        run: with them.
        peak: bytes of its fullest rank.
    """

    choices: Choices
    run: Run
    peak: int

    @property
    def overrides(self) -> list[str]:
        """The choices as on the command line."""
        return [f"{key}={str(value).lower()}" for key, value in self.choices.items()]


def fullest_rank(run: Run) -> tuple[int, RankMemory]:
    """The stage whose ranks need most, and what they hold."""
    ranks = [rank_memory(run, stage) for stage in range(run.axes.pipeline)]
    stage = max(range(len(ranks)), key=lambda at: ranks[at].peak)
    return stage, ranks[stage]


def remedies(run: Run, usable: float, devices: int | None) -> list[Remedy]:
    """The smallest change of each kind with which a run fits: of what is kept for backward and how
    many lanes go together, then of each axis; of both where neither is enough alone.

    Args:
        usable: bytes that a rank may take.
        devices: how many there are, which another mesh shares out anew; None: it may take more.
    """
    kept = list(_kept(run))
    kinds = [(choices, run.axes) for choices in kept], *_meshes(run, devices)
    if found := [remedy for kind in kinds if (remedy := _first(run, kind, usable))]:
        return found
    least = kept[-1] if kept else {}
    both = (((least | choices, axes) for choices, axes in kind) for kind in _meshes(run, devices))
    return [remedy for kind in both if (remedy := _first(run, kind, usable))]


def changed(run: Run, choices: Choices, axes: Axes) -> Run:
    """The same run with other choices, on another mesh.

    Raises:
        UserError: they do not fit together.
    """
    content = run.config.model_dump()
    for key, value in choices.items():
        section, name = key.split(".")
        content[section][name] = value
    # What is asked of a mesh is asked of the new one.
    content["mesh"] = asdict(axes)
    config = validate(content, RunConfig, str(axes))
    return run_of(config, run.vocabulary, axes, run.own.seen, compiled=run.compiled)


_Change = tuple[dict[str, int | bool], Axes]


def _first(run: Run, changes: Iterable[_Change], usable: float) -> Remedy | None:
    """The first of some changes with which the run fits."""
    for choices, axes in changes:
        try:
            other = changed(run, choices, axes)
            peak = fullest_rank(other)[1].peak
        except UserError:
            continue
        if peak <= usable:
            return Remedy(choices, other, peak)
    return None


def _kept(run: Run) -> Iterator[dict[str, int | bool]]:
    """Less and less kept for backward, then fewer and fewer lanes of a micro-batch besides."""
    layers: dict[str, int | bool] = {"recompute.layers": True}
    lengths = [1 << power for power in range(10, 2, -1) if 1 << power < run.own.tokens]
    parts: list[dict[str, int | bool]] = []
    if isinstance(run.config.model, RltConfig):
        parts = [{"recompute.decoder_chunk": length} for length in lengths]
    every = [layers, *parts, *(layers | part for part in parts)]
    lanes = run.own.lanes
    smaller = [n for n in range(lanes - 1, 0, -1) if lanes % n == 0]
    yield from every
    for choices in ({}, every[-1]):
        yield from (choices | {"train.micro_batch": n} for n in smaller)


def _meshes(run: Run, devices: int | None) -> list[list[_Change]]:
    """By axis, larger and larger ones; of fixed devices the data axis is what is left over."""
    axes = ("pipeline", "tensor") if devices is not None else ("pipeline", "tensor", "data")
    return [list(_larger(run.axes, axis, devices)) for axis in axes]


def _larger(axes: Axes, axis: str, devices: int | None) -> Iterator[_Change]:
    for size in range(getattr(axes, axis) + 1, _LARGEST + 1):
        other = replace(axes, **{axis: size})
        share = other.pipeline * other.tensor
        if devices is not None and devices % share:
            continue
        if devices is not None:
            other = replace(other, data=devices // share)
        before = asdict(axes)
        yield {f"mesh.{n}": s for n, s in asdict(other).items() if s != before[n]}, other
