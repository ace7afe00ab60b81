"""One benchmark at one shape: its variants built, timed in turn, and measured in memory."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median, quantiles
from typing import Any

import torch

from rlt_dist.bench.memory import peak_above_inputs
from rlt_dist.bench.timing import Disturbance, Step, time_in_rounds
from rlt_dist.util.errors import UserError

FLOOR = "floor"
Watch = Callable[[str], None]


@dataclass(frozen=True)
class Variant:
    """One way to do the work.

    Attributes:
        build: makes model and inputs; a call of what it gives is one step.
        units: what the seconds of a step are divided by.
    """

    build: Callable[..., Step]
    units: int = 1


@dataclass(frozen=True)
class Bench:
    """Variants of one computation.

    Attributes:
        name: as on the command line.
        reference: the variant whose ratio is 1.
        shapes: by name.
        variants: by name; `build` is called with a shape.
    """

    name: str
    reference: str
    shapes: Mapping[str, Any]
    variants: Mapping[str, Variant]


@dataclass(frozen=True)
class Choice:
    """How a benchmark is run.

    Attributes:
        threads: of torch and of the compiled loops.
        budget: seconds for the timed rounds.
        segments: consecutive steps that the peak is taken over.
        variants: which of them; empty: all that can be had here.
    """

    threads: int
    budget: float
    segments: int = 1
    variants: Sequence[str] = ()


@dataclass(frozen=True)
class Row:
    """What was measured of one variant.

    Attributes:
        seconds: median of a step, by unit.
        quartiles: the first and the third.
        ratio: the reference's seconds over this one's; None: the reference was not run.
        over_floor: this one's seconds over the floor's; None: there is no floor.
        peak_bytes: above the inputs; None for a floor, which keeps nothing.
    """

    variant: str
    seconds: float
    quartiles: tuple[float, float]
    ratio: float | None
    over_floor: float | None
    peak_bytes: int | None


@dataclass(frozen=True)
class Comparison:
    """All rows of one run.

    Attributes:
        rounds: how often each variant was timed.
        disturbance: cores that other processes kept busy meanwhile; None: not known.
        left_out: why a variant could not be had here, by its name.
    """

    rows: list[Row]
    rounds: int
    disturbance: float | None
    left_out: Mapping[str, str]


def pick(kind: str, known: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raises UserError for a name that is not known."""
    for name in names:
        if name not in known:
            raise UserError(f"unknown {kind} {name!r}; known: {', '.join(known)}")


def compare(bench: Bench, shape: str, choice: Choice, watch: Watch) -> Comparison:
    """Time and measure the variants of a benchmark.

    Args:
        shape: a name in `bench.shapes`.
        watch: is told in words what is being done.

    Raises:
        UserError: an unknown shape or variant, or a chosen variant that cannot run here.
    """
    pick("shape", bench.shapes, [shape])
    pick("variant", bench.variants, choice.variants)
    sizes = bench.shapes[shape]
    with torch_threads(choice.threads), Disturbance() as disturbance:
        watch("building and warming up")
        steps, left_out = _build(bench, sizes, choice.variants)
        samples = time_in_rounds(steps, choice.budget, lambda done: watch(f"{done} rounds timed"))
    del steps  # the processes that measure memory need the room
    peaks: dict[str, int | None] = dict.fromkeys(samples)
    for name in samples:
        if name != FLOOR:
            watch(f"memory of {name}")
            build = partial(bench.variants[name].build, sizes)
            peaks[name] = peak_above_inputs(build, choice.threads, choice.segments)
    rows = _rows(bench, samples, peaks)
    return Comparison(rows, len(next(iter(samples.values()))), disturbance.cores, left_out)


def _build(
    bench: Bench, sizes: Any, chosen: Sequence[str]
) -> tuple[dict[str, Step], dict[str, str]]:
    """The chosen steps; if none is, those that can be had here, and why the others cannot."""
    steps: dict[str, Step] = {}
    left_out: dict[str, str] = {}
    for name, variant in bench.variants.items():
        if chosen and name not in chosen:
            continue
        try:
            steps[name] = variant.build(sizes)
        except UserError as error:
            if chosen:
                raise
            left_out[name] = str(error)
    return steps, left_out


def _rows(
    bench: Bench, samples: Mapping[str, list[float]], peaks: Mapping[str, int | None]
) -> list[Row]:
    by_unit = {
        name: [seconds / bench.variants[name].units for seconds in runs]
        for name, runs in samples.items()
    }
    middle = {name: median(runs) for name, runs in by_unit.items()}
    reference, floor = middle.get(bench.reference), middle.get(FLOOR)
    rows = []
    for name, runs in by_unit.items():
        first, _, third = quantiles(runs, n=4, method="inclusive")
        ratio = None if reference is None else reference / middle[name]
        over_floor = None if floor is None else middle[name] / floor
        row = Row(name, middle[name], (first, third), ratio, over_floor, peaks[name])
        rows.append(row)
    return rows


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Torch's threads inside a block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
