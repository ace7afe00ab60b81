"""A scaling study's figures, each drawn once: for the page as SVG, for a paper as PNG."""

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from math import ceil
from textwrap import fill
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
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
_HOLLOW: dict[str, Any] = {"markerfacecolor": "none", "linestyle": "--"}
_DOTTED: dict[str, Any] = {"linewidth": 0.8, "linestyle": ":"}
_TEXT = 8.5
_LETTER, _LINE = 0.068, 0.17
"""Inches that text of that size takes, generously: a letter's width, a line's height."""
_NAME = 48
"""Letters of a line of a name beside a row."""
_MARK = 0.6
"""Inches of a legend's entry besides its text."""
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
    """Tokens per second over nodes, both logarithmic, each series' linear scaling beside it.

    Series of one number of nodes are told apart on an axis of their names instead.
    """
    if len(nodes_of(curves)) < 2:
        return Drawing("throughput", "Tokens per second by series", _by_series(curves))
    figure, axes = _over_nodes(curves, "tokens per second")
    axes.set_yscale("log", base=10)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.minorticks_off()
    for curve, style in zip(curves, _styles(), strict=False):
        if found := curve.measured or curve.predicted:
            first, last = min(found), max(found)
            ends = [found[first], found[first] * last / first]
            axes.plot([first, last], ends, color=style["color"], **_DOTTED)
    _draw(axes, curves)
    _legend(figure, [*_entries(curves), Line2D([], [], color=QUIET, label="linear", **_DOTTED)])
    return Drawing("throughput", "Tokens per second over nodes", figure)


def efficiency(curves: Sequence[Curve]) -> Drawing:
    """Parallel efficiency over nodes."""
    figure, axes = _over_nodes(curves, "parallel efficiency")
    axes.axhline(1.0, color=QUIET, **_DOTTED)
    _draw(axes, curves)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    _legend(figure, [*_entries(curves), Line2D([], [], color=QUIET, label="linear", **_DOTTED)])
    return Drawing("efficiency", "Parallel efficiency over nodes", figure)


def shares(bars: Sequence[Bar]) -> Drawing:
    """What the time of a step goes into, a bar a point."""
    figure, axes = _by_name([f"{bar.point}, {bar.kind}" for bar in bars])
    rows = range(len(bars))
    left = [0.0] * len(bars)
    for name, colour in SHARES.items():
        widths = [bar.shares.get(name, 0.0) for bar in bars]
        if any(widths):
            axes.barh(rows, widths, 0.8, left, color=colour, label=name)
            left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_xlabel("share of a step's time", fontsize=_TEXT, color=QUIET)
    _plain(axes)
    axes.grid(visible=False, axis="y")
    _legend(figure, axes.get_legend_handles_labels()[0])
    return Drawing("shares", "Shares of a step's time by point", figure)


def nodes_of(curves: Iterable[Curve]) -> list[int]:
    """The numbers of nodes of which anything is known."""
    return sorted({n for curve in curves for n in (*curve.predicted, *curve.measured)})


def _by_series(curves: Sequence[Curve]) -> Figure:
    """A row a series."""
    figure, axes = _by_name([curve.name or "all" for curve in curves])
    for row, (curve, style) in enumerate(zip(curves, _styles(), strict=False)):
        for found, kind in ((curve.measured, {}), (curve.predicted, _HOLLOW)):
            if found:
                axes.plot([*found.values()], [row], **style, **kind)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set_xlabel("tokens per second", fontsize=_TEXT, color=QUIET)
    _plain(axes)
    _legend(figure, _kinds(curves))
    return figure


def _by_name(names: Iterable[str]) -> tuple[Figure, Axes]:
    """A row a name, from top to bottom."""
    labels = [fill(name, _NAME) for name in names]
    row = max(_BAR, *(_LINE * (label.count("\n") + 1) for label in labels))
    size = _WIDE, 0.9 + row * len(labels)
    figure = Figure(figsize=size, layout="constrained", facecolor="none")
    axes = figure.add_subplot(facecolor="none")
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    return figure, axes


def _over_nodes(curves: Sequence[Curve], label: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(_WIDE, _HEIGHT), layout="constrained", facecolor="none")
    axes = figure.add_subplot(facecolor="none")
    axes.set_xscale("log", base=2)
    axes.set_xticks(nodes_of(curves))
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("nodes", fontsize=_TEXT, color=QUIET)
    axes.set_ylabel(label, fontsize=_TEXT, color=QUIET)
    _plain(axes)
    return figure, axes


def _draw(axes: Axes, curves: Sequence[Curve]) -> None:
    """Measured points filled and joined, predicted ones hollow and dashed."""
    for curve, style in zip(curves, _styles(), strict=False):
        for found, kind in ((curve.measured, {}), (curve.predicted, _HOLLOW)):
            if found:
                nodes = sorted(found)
                axes.plot(nodes, [found[number] for number in nodes], **style, **kind)


def _styles() -> Iterator[dict[str, Any]]:
    """A series' own, again and again: colours that come back do so with another marker."""
    for turn in count():
        for place, colour in enumerate(_SERIES):
            marker = _MARKERS[(place + turn) % len(_MARKERS)]
            yield {"color": colour, "marker": marker, "markersize": 5, "linewidth": 1.4}


def _entries(curves: Sequence[Curve]) -> list[Line2D]:
    """Of a legend: the series, where there are several, and what is measured and predicted."""
    named = [
        Line2D([], [], label=curve.name, **style)
        for curve, style in zip(curves, _styles(), strict=False)
        if curve.name
    ]
    return [*named, *_kinds(curves)]


def _kinds(curves: Sequence[Curve]) -> list[Line2D]:
    """Of a legend: what is measured and what predicted, as far as there is any."""
    style: dict[str, Any] = {"color": QUIET, "marker": _MARKERS[0], "markersize": 5}
    found: list[tuple[str, bool, dict[str, Any]]] = [
        ("measured", any(curve.measured for curve in curves), {}),
        ("predicted", any(curve.predicted for curve in curves), _HOLLOW),
    ]
    return [Line2D([], [], label=name, **style, **kind) for name, any_, kind in found if any_]


def _plain(axes: Axes) -> None:
    axes.tick_params(labelsize=_TEXT, color=RULE, labelcolor=QUIET, length=3)
    axes.grid(color=RULE, linewidth=0.6)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(RULE)


def _legend(figure: Figure, entries: Sequence[Artist]) -> None:
    """Above all, in as many columns as there is room for; the figure grows by its rows."""
    labels = [fill(str(entry.get_label()), int((_WIDE - _MARK) / _LETTER)) for entry in entries]
    if not labels:
        return
    longest = max(len(line) for label in labels for line in label.splitlines())
    columns = max(1, int(_WIDE / (_MARK + _LETTER * longest)))
    lines = sum(label.count("\n") + 1 for label in labels)
    figure.set_figheight(figure.get_figheight() + _LINE * max(0, ceil(lines / columns) - 1))
    figure.legend(
        entries,
        labels,
        loc="outside upper left",
        ncols=columns,
        fontsize=_TEXT,
        labelcolor=INK,
        frameon=False,
        borderaxespad=0.2,
    )
