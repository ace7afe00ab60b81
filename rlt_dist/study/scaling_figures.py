"""A scaling study's figures, each drawn once: for the page as SVG, for a paper as PNG."""

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import (
    LogLocator,
    NullFormatter,
    PercentFormatter,
    ScalarFormatter,
    StrMethodFormatter,
)

from rlt_dist.study.figures import svg

INK, QUIET, RULE = "#23262b", "#666b74", "#e2dfd9"
_VARIABLES = {INK: "ink", QUIET: "quiet", RULE: "rule"}
"""The page's own colours, which are others in the dark."""

_SERIES = ("#2b7bba", "#d55e00", "#1b9e77", "#b2589a", "#b58900", "#56b4e9", "#7f7f7f")
_MARKERS = "osD^vPX"
_TEXT = 8.5
_WIDE, _HEIGHT = 7.2, 3.9
_BAR = 0.2
"""Inches of a bar of shares, its gap included."""
_DPI = 200

SHARES = {
    "computing": "#4a5f7a",
    "compute": "#2b7bba",
    "memory": "#56b4e9",
    "launch": "#8da0b6",
    "tensor": "#d55e00",
    "pipeline": "#e69f00",
    "bubble": "#f2d16b",
    "data": "#b2589a",
    "other": "#9a9a9a",
}
"""What a step's time goes into, in the order of the bars. Computing is measured as a whole."""


@dataclass(frozen=True)
class Curve:
    """One series of a study over its nodes.

    Attributes:
        name: of the series; empty where a study has but one.
        predicted, measured: by nodes.
    """

    name: str
    predicted: Mapping[int, float]
    measured: Mapping[int, float]


@dataclass(frozen=True)
class Bar:
    """The shares of one point's time, by name, as predicted or as measured."""

    point: str
    kind: str
    shares: Mapping[str, float]


@dataclass(frozen=True)
class Drawing:
    """A figure.

    Attributes:
        name: of its files.
        described: what it shows, for those who cannot see it.
    """

    name: str
    described: str
    figure: Figure

    def svg(self) -> str:
        """For the page, whose colours it takes."""
        return svg(self.figure, self.name, self.described, _VARIABLES)

    def png(self) -> bytes:
        """For a paper, on white."""
        buffer = io.BytesIO()
        self.figure.savefig(buffer, format="png", dpi=_DPI, facecolor="white")
        return buffer.getvalue()


def throughput(curves: Sequence[Curve]) -> Drawing:
    """Tokens per second over nodes, both logarithmic, each series' linear scaling beside it."""
    figure, axes = _over_nodes(curves, "tokens per second")
    axes.set_yscale("log", base=10)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.minorticks_off()
    for curve, colour in zip(curves, _cycle(_SERIES), strict=False):
        if found := curve.measured or curve.predicted:
            first, last = min(found), max(found)
            ends = [found[first], found[first] * last / first]
            axes.plot([first, last], ends, color=colour, linewidth=0.8, linestyle=":")
    _draw(axes, curves)
    _legend(axes)
    return Drawing("throughput", "Tokens per second over nodes", figure)


def efficiency(curves: Sequence[Curve]) -> Drawing:
    """Parallel efficiency over nodes."""
    figure, axes = _over_nodes(curves, "parallel efficiency")
    axes.axhline(1.0, color=QUIET, linewidth=0.8, linestyle=":")
    _draw(axes, curves)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    _legend(axes)
    return Drawing("efficiency", "Parallel efficiency over nodes", figure)


def shares(bars: Sequence[Bar]) -> Drawing:
    """What the time of a step goes into, a bar a point."""
    figure = Figure(figsize=(_WIDE, 0.9 + _BAR * len(bars)), layout="constrained", facecolor="none")
    axes = figure.add_subplot(facecolor="none")
    rows = range(len(bars))
    left = [0.0] * len(bars)
    for name, colour in SHARES.items():
        widths = [bar.shares.get(name, 0.0) for bar in bars]
        if any(widths):
            axes.barh(rows, widths, 0.8, left, color=colour, label=name)
            left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.set_yticks(rows, [f"{bar.point}, {bar.kind}" for bar in bars])
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_xlabel("share of a step's time", fontsize=_TEXT, color=QUIET)
    _plain(axes)
    axes.grid(visible=False, axis="y")
    _legend(axes, columns=5)
    return Drawing("shares", "Shares of a step's time by point", figure)


def _over_nodes(curves: Iterable[Curve], label: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(_WIDE, _HEIGHT), layout="constrained", facecolor="none")
    axes = figure.add_subplot(facecolor="none")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted({n for curve in curves for n in (*curve.predicted, *curve.measured)}))
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("nodes", fontsize=_TEXT, color=QUIET)
    axes.set_ylabel(label, fontsize=_TEXT, color=QUIET)
    _plain(axes)
    return figure, axes


def _draw(axes: Axes, curves: Sequence[Curve]) -> None:
    """Measured points filled and joined, predicted ones hollow and dashed."""
    styles = zip(curves, _cycle(_SERIES), _cycle(_MARKERS), strict=False)
    for curve, colour, marker in styles:
        common: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 5}
        hollow: dict[str, Any] = {"markerfacecolor": "none", "linestyle": "--"}
        for kind, found, style in (
            ("measured", curve.measured, {}),
            ("predicted", curve.predicted, hollow),
        ):
            if found:
                label = f"{curve.name}, {kind}" if curve.name else kind
                nodes = sorted(found)
                values = [found[number] for number in nodes]
                axes.plot(nodes, values, linewidth=1.4, label=label, **common, **style)


def _plain(axes: Axes) -> None:
    axes.tick_params(labelsize=_TEXT, color=RULE, labelcolor=QUIET, length=3)
    axes.grid(color=RULE, linewidth=0.6)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(RULE)


def _legend(axes: Axes, columns: int = 3) -> None:
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=columns,
        fontsize=_TEXT,
        labelcolor=INK,
        frameon=False,
        borderaxespad=0.2,
    )


def _cycle(of: Sequence[str]) -> Iterable[str]:
    """As many as are asked for."""
    while True:
        yield from of
