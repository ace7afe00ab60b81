"""A scaling study's report: predicted beside measured, and what follows from both."""

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Literal, NamedTuple

from rlt_dist.mesh.axes import AXES
from rlt_dist.study.grid import Point, Study
from rlt_dist.study.measure import Measured, measure
from rlt_dist.study.predict import Prediction
from rlt_dist.study.run import check_begun, folder_of
from rlt_dist.util.errors import UserError

Kind = Literal["measured", "predicted"]
KINDS: tuple[Kind, Kind] = ("measured", "predicted")


@dataclass(frozen=True)
class Row:
    """A point with what is known of it.

    Attributes:
        damaged: why its run's metrics cannot be read; None: they can.
    """

    point: Point
    devices: int
    predicted: Prediction | None
    measured: Measured | None
    damaged: str | None = None

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.point.config.data.tokens_per_step

    @property
    def mesh(self) -> str:
        """Of what was measured, else of what was predicted; a dash where neither was."""
        known = self.measured or self.predicted
        return known.axes if known else "-"

    @property
    def comparable(self) -> bool:
        """Whether both are there, and of the same mesh."""
        one, other = self.measured, self.predicted
        return one is not None and other is not None and one.axes == other.axes

    @property
    def error(self) -> float | None:
        """Predicted seconds of a step over measured ones, less 1; None if not comparable."""
        if not self.comparable:
            return None
        assert self.predicted is not None and self.measured is not None
        return self.predicted.seconds / self.measured.seconds - 1

    def of(self, kind: Kind) -> Measured | Prediction | None:
        """What is known of that kind."""
        return self.measured if kind == "measured" else self.predicted

    def seconds(self, kind: Kind) -> float | None:
        """Of a step; None where it is not known, or no mesh fits."""
        found = self._fitting(kind)
        return None if found is None else found.seconds

    def tokens_per_second(self, kind: Kind) -> float | None:
        """Of all ranks; None where a step's seconds are."""
        found = self._fitting(kind)
        return None if found is None else found.tokens_per_second

    def _fitting(self, kind: Kind) -> Measured | Prediction | None:
        found = self.of(kind)
        return None if isinstance(found, Prediction) and not found.fits else found


@dataclass(frozen=True)
class Series:
    """The points that differ in their nodes alone, by nodes.

    Attributes:
        name: its labels; empty where nothing varies.
    """

    name: str
    rows: tuple[Row, ...]

    def throughput(self, kind: Kind) -> dict[int, float]:
        """Tokens per second by nodes, of the points where it is known."""
        found = {row.point.nodes: row.tokens_per_second(kind) for row in self.rows}
        return {nodes: value for nodes, value in found.items() if value is not None}

    def efficiency(self, kind: Kind) -> dict[int, float]:
        """By nodes: tokens per second and node over those of the fewest nodes."""
        found = self.throughput(kind)
        if not found:
            return {}
        first = found[min(found)] / min(found)
        return {nodes: value / nodes / first for nodes, value in found.items()}


class Fit(NamedTuple):
    """A serial share, fitted to one series.

    Attributes:
        points: that it is fitted to.
        serial: the share of the time on the fewest nodes that more nodes do not shorten.
        worst: largest error of a point's throughput as the law has it.
    """

    series: str
    kind: Kind
    points: int
    serial: float
    worst: float


class Cost(NamedTuple):
    """Of training for the study's budget of tokens at one point's speed.

    Attributes:
        price: in the currency of the study's `device_hour`; None without one.
    """

    row: Row
    kind: Kind
    days: float
    device_hours: float
    price: float | None


@dataclass(frozen=True)
class ScalingReport:
    """All that the page shows."""

    study: Study
    output: Path
    series: tuple[Series, ...]

    @property
    def rows(self) -> list[Row]:
        """All points."""
        return [row for series in self.series for row in series.rows]

    @property
    def kinds(self) -> list[Kind]:
        """What is known of any point."""
        return [kind for kind in KINDS if any(row.seconds(kind) for row in self.rows)]

    @property
    def memory(self) -> dict[Kind, str]:
        """What peak memory is counted of: a run on processor cores knows that of its process."""
        on_cores = self.study.cluster.cores is not None
        return {"measured": "process" if on_cores else "tensors", "predicted": "tensors"}

    @property
    def errors(self) -> list[float]:
        """Of the points that can be compared."""
        return [row.error for row in self.rows if row.error is not None]

    @property
    def verdict(self) -> str | None:
        """How far predictions are off, in words; None where nothing can be compared."""
        sizes = [abs(error) for error in self.errors]
        if not sizes:
            return None
        points = f"{len(sizes)} point{'s' * (len(sizes) > 1)}"
        return (
            f"Seconds of a step, predicted against measured, over {points}: median error "
            f"{median(sizes):.1%}, worst {max(sizes):.1%}."
        )

    def fits(self) -> list[Fit]:
        """Of each series with two numbers of nodes or more."""
        law = amdahl if self.study.config.scaling == "strong" else gustafson
        found = (
            (series, kind, series.throughput(kind)) for series in self.series for kind in KINDS
        )
        return [
            Fit(series.name, kind, len(speeds), *law(speeds))
            for series, kind, speeds in found
            if len(speeds) > 1
        ]

    def costs(self) -> list[Cost]:
        """Of each point, by what was measured where that is known; empty without a budget."""
        return [cost for row in self.rows if (cost := self._cost(row)) is not None]

    def _cost(self, row: Row) -> Cost | None:
        budget, price = self.study.config.token_budget, self.study.config.device_hour
        kind: Kind = "measured" if row.measured is not None else "predicted"
        speed = row.tokens_per_second(kind)
        if budget is None or speed is None:
            return None
        hours = budget / speed / 3600
        total = hours * row.devices
        return Cost(row, kind, hours / 24, total, None if price is None else total * price)


def gather(study: Study, predictions: Mapping[str, Prediction], output: Path) -> ScalingReport:
    """Put a study's predictions and measurements side by side.

    A point whose metrics are damaged counts as not measured.

    Args:
        predictions: by the point's name.
        output: the study's folder, with the run folders of its points.

    Raises:
        UserError: nothing is known of any point, or a run is of another configuration.
    """
    rows = [_row(study, point, predictions.get(point.name), output) for point in study.points]
    if not any(row.predicted or row.measured for row in rows):
        damages = (row.damaged for row in rows if row.damaged)
        raise UserError(
            next(damages, None)
            or f"{output}: nothing is known of {study.file}; `rlt-dist scale predict` or `rlt-dist "
            f"scale run` it first"
        )
    grouped = groupby(rows, key=lambda row: ", ".join(_words(row.point.labels)))
    series = (Series(name, tuple(sorted(of, key=_nodes))) for name, of in grouped)
    return ScalingReport(study, output, tuple(series))


def _row(study: Study, point: Point, predicted: Prediction | None, output: Path) -> Row:
    folder, devices = folder_of(output, point), point.nodes * study.cluster.devices_per_node
    check_begun(study, point, folder)
    try:
        return Row(point, devices, predicted, measure(point, folder, study.config.warmup))
    except UserError as error:
        return Row(point, devices, predicted, None, str(error))


def amdahl(speeds: Mapping[int, float]) -> tuple[float, float]:
    """The serial share s and the worst error of a law of strong scaling (Amdahl, AFIPS 1967).

    T(n) / T(1) = s + (1 - s) / n, n counted in the fewest nodes; least squares of those ratios.

    Args:
        speeds: throughput by nodes, of two numbers of nodes or more.
    """
    scaled = _scaled(speeds)
    rest = {n: 1 - 1 / n for n in scaled}
    over = sum((1 / scaled[n] - 1 / n) * rest[n] for n in scaled)
    serial = over / sum(part**2 for part in rest.values())
    return serial, _worst(scaled, {n: 1 / (serial + (1 - serial) / n) for n in scaled})


def gustafson(speeds: Mapping[int, float]) -> tuple[float, float]:
    """The same of a law of weak scaling (Gustafson, CACM 31, 1988).

    S(n) = n - s (n - 1), S being the throughput over that of the fewest nodes.
    """
    scaled = _scaled(speeds)
    over = sum((n - speed) * (n - 1) for n, speed in scaled.items())
    serial = over / sum((n - 1) ** 2 for n in scaled)
    return serial, _worst(scaled, {n: n - serial * (n - 1) for n in scaled})


def _scaled(speeds: Mapping[int, float]) -> dict[float, float]:
    """Speed-up by how many times the nodes."""
    first = min(speeds)
    return {nodes / first: speed / speeds[first] for nodes, speed in speeds.items()}


def _worst(found: Mapping[float, float], law: Mapping[float, float]) -> float:
    return max(abs(law[n] / found[n] - 1) for n in found)


def table(report: ScalingReport) -> str:
    """All figures of all points as CSV; what is not known is empty."""
    buffer = io.StringIO()
    rows = [dict(_cells(report, series, row)) for series in report.series for row in series.rows]
    writer = csv.DictWriter(buffer, list(dict.fromkeys(name for row in rows for name in row)))
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()


Cell = tuple[str, str | int | float | None]


def _cells(report: ScalingReport, series: Series, row: Row) -> Iterator[Cell]:
    config = row.point.config
    yield "point", row.point.name
    yield from row.point.labels.items()
    yield from (("nodes", row.point.nodes), ("devices", row.devices), ("mesh", row.mesh))
    yield from (("lanes", config.data.lanes), ("tokens_per_step", row.tokens))
    yield "error_of_seconds", row.error
    for kind in KINDS:
        yield f"{kind}_seconds", row.seconds(kind)
        yield f"{kind}_tokens_per_second", row.tokens_per_second(kind)
        yield f"{kind}_efficiency", series.efficiency(kind).get(row.point.nodes)
        yield from _own_cells(kind, row.of(kind), report.memory[kind])
    if row.measured is not None:
        low, high = row.measured.spread
        yield from (("measured_seconds_low", low), ("measured_seconds_high", high))
        yield from (("measured_steps", row.measured.steps), ("measured_loss", row.measured.loss))
    if (cost := report._cost(row)) is not None:
        yield from (("device_hours", cost.device_hours), ("price", cost.price))


def _own_cells(kind: Kind, found: Measured | Prediction | None, memory: str) -> Iterator[Cell]:
    """Columns that predictions and measurements both have; None: this point has none of them."""
    yield f"{kind}_mfu", None if found is None else found.mfu
    yield f"{kind}_peak_memory_of_{memory}", None if found is None else found.peak_memory
    sent = None if found is None else found.sent
    for axis, handed in (sent or {}).items():
        yield f"{kind}_sent_{axis}", handed
    for name, share in ({} if found is None else shares_of(found)).items():
        yield f"{kind}_share_{name}", share


def shares_of(found: Measured | Prediction) -> dict[str, float]:
    """What a step's time goes into, by name; sums up to 1, or is empty where it is not known.

    A measurement tells only what ranks wait for: the rest is all computing, which a prediction
    tells apart.
    """
    if isinstance(found, Prediction):
        return dict(found.shares)
    if found.waiting is None:
        return {}
    own = {axis: found.waiting[axis] for axis in AXES}
    waiting = sum(found.waiting.values())
    return {"computing": 1 - waiting, **own, "other": waiting - sum(own.values())}


def _words(labels: Mapping[str, str]) -> Sequence[str]:
    return [f"{name} {label}" for name, label in labels.items()]


def _nodes(row: Row) -> int:
    return row.point.nodes
