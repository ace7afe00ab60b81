"""The page of a scaling study, its pictures, and their files."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rlt_dist import __version__
from rlt_dist.mesh.axes import parse_axes
from rlt_dist.parallel.schedule.picture import picture
from rlt_dist.study import scaling_figures as figures
from rlt_dist.study.predict import timeline
from rlt_dist.study.report import count, model_kind, model_shape
from rlt_dist.study.scaling_figures import Bar, Curve, Drawing
from rlt_dist.study.scaling_report import Row, ScalingReport, shares_of, table
from rlt_dist.util.errors import UserError
from rlt_dist.util.files import make_folder, write_atomic

PAGE, TABLE, FIGURES = "report.html", "points.csv", "figures"


class Step(NamedTuple):
    """One point's pass through its pipeline, drawn."""

    row: Row
    svg: str


def drawings(report: ScalingReport) -> list[Drawing]:
    """Throughput, efficiency where nodes differ, and shares where they are known."""
    curves = {
        name: [
            Curve(series.name, *(getattr(series, name)(kind) for kind in ("predicted", "measured")))
            for series in report.series
        ]
        for name in ("throughput", "efficiency")
    }
    found = [figures.throughput(curves["throughput"])]
    if len(figures.nodes_of(curves["throughput"])) > 1:
        found.append(figures.efficiency(curves["efficiency"]))
    bars = list(_bars(report))
    return [*found, figures.shares(bars)] if bars else found


def step_of(report: ScalingReport, name: str | None = None) -> Step | None:
    """The pass of a point as it was simulated; None where nothing is predicted.

    Args:
        name: of the point; None: the one with the longest pipeline, on the fewest nodes.

    Raises:
        UserError: there is no prediction of that point.
    """
    rows = [row for row in report.rows if row.predicted is not None and row.predicted.fits]
    if name is not None:
        rows = [row for row in rows if row.point.name == name]
        if not rows:
            raise UserError(f"{name}: is no point that was predicted to fit; `points.csv` has them")
    if not rows:
        return None
    row, axes = min(
        ((row, row.predicted.axes) for row in rows if row.predicted),
        key=lambda each: (-parse_axes(each[1]).pipeline, each[0].point.nodes),
    )
    title = f"{row.point.name}, mesh {axes}"
    passed = timeline(report.study, row.point, parse_axes(axes))
    return Step(row, picture({"as simulated": passed}, title, "s"))


def page(report: ScalingReport, drawn: Sequence[Drawing], step: Step | None) -> str:
    """The whole page: one HTML file that needs nothing outside itself."""
    from jinja2 import Environment, PackageLoader

    loader = PackageLoader("rlt_dist", "study")
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {
        "figures": lambda value: _dash(value, ",.4g" if value and value < 1e4 else ",.0f"),
        "whole": lambda value: _dash(value, ",.0f"),
        "part": lambda value: _dash(value, ".1%"),
        "error": lambda value: _dash(value, "+.1%"),
        "gib": lambda value: "-" if value is None else f"{value / 2**30:,.3g}",
        "count": count,
    }
    base = report.study.points[0].config
    return environment.get_template("scaling.html.jinja").render(
        report=report,
        config=report.study.config,
        cluster=report.study.cluster,
        model=f"{model_kind(base.model)}: {model_shape(base.model)}",
        base=base,
        figures={drawing.name: drawing.svg() for drawing in drawn},
        step=step,
        version=__version__,
    )


def write(report: ScalingReport, step: Step | None) -> Path:
    """Write the page, points.csv and the figures' files into the study's folder; the page."""
    drawn = drawings(report)
    folder = report.output / FIGURES
    make_folder(folder)
    for drawing in drawn:
        write_atomic(folder / f"{drawing.name}.png", drawing.png())
    if step is not None:
        write_atomic(folder / "step.svg", step.svg)
    write_atomic(report.output / TABLE, table(report))
    write_atomic(report.output / PAGE, page(report, drawn, step))
    return report.output / PAGE


def _bars(report: ScalingReport) -> list[Bar]:
    return [
        Bar(row.point.name, kind, shares)
        for row in report.rows
        for kind, found in (("measured", row.measured), ("predicted", row.predicted))
        if found is not None and (shares := shares_of(found))
    ]


def _dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
