"""Whether a run fits into memory, and what would."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import product
from math import prod

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
    many lanes go together, then of each axis; where none is enough alone, each axis with as little
    kept as can be, then pipeline and tensor axis together with that.

    Args:
        usable: bytes that a rank may take.
        devices: how many there are, which another mesh shares out anew; None: it may take more.
    """
    kept = list(_kept(run))
    alone, least = _meshes(run, devices), kept[-1] if kept else {}
    for kinds in (
        [[(choices, run.axes) for choices in kept], *alone],
        [_with(least, kind) for kind in alone],
        [_with(least, _together(run, devices))],
    ):
        if found := [remedy for kind in kinds if (remedy := _first(run, kind, usable))]:
            return found
    return []


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
    given = {"compiled": run.compiled, "apart": run.own.apart}
    return run_of(config, run.vocabulary, axes, run.own.seen, **given)


_Choices = dict[str, int | bool]
_Change = tuple[_Choices, Axes]


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


def _with(choices: _Choices, changes: Iterable[_Change]) -> list[_Change]:
    return [(choices | more, axes) for more, axes in changes]


def _kept(run: Run) -> Iterator[_Choices]:
    """Less and less kept for backward, then fewer and fewer lanes of a micro-batch besides."""
    layers: _Choices = {"recompute.layers": True}
    lengths = [1 << power for power in range(10, 2, -1) if 1 << power < run.own.tokens]
    parts: list[_Choices] = []
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
        if (change := _resized(axes, {axis: size}, devices)) is not None:
            yield change


def _together(run: Run, devices: int | None) -> Iterator[_Change]:
    """Larger pipelines and tensor axes at once, of fixed devices smaller ones too; those of the
    fewest ranks of the same lanes first."""
    axes = run.axes
    least = (axes.pipeline + 1, axes.tensor + 1) if devices is None else (1, 1)
    sizes = product(*(range(first, _LARGEST + 1) for first in least))
    for pipeline, tensor in sorted(sizes, key=prod):
        change = _resized(axes, {"pipeline": pipeline, "tensor": tensor}, devices)
        if change is not None:
            yield change


def _resized(axes: Axes, sizes: Mapping[str, int], devices: int | None) -> _Change | None:
    """A mesh with other axes and what that sets; None where devices cannot be shared out so."""
    other = replace(axes, **sizes)
    share = other.pipeline * other.tensor
    if devices is not None and devices % share:
        return None
    if devices is not None:
        other = replace(other, data=devices // share)
    before = asdict(axes)
    return {f"mesh.{n}": s for n, s in asdict(other).items() if s != before[n]}, other
