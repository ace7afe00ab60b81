"""A run's curves as inline SVG that takes its colours from the page.

Curves are drawn in stand-in colours, each then replaced by a CSS variable, so that one drawing
serves light, dark and print. Figures are small and shown about life-size: text stays readable on
a phone, where a wide figure would shrink.
"""

import io
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

Record = dict[str, Any]
Series = tuple[np.ndarray, np.ndarray]

INK, QUIET, RULE = "#010101", "#020202", "#030303"
FIRST, SECOND, WARN = "#040404", "#050505", "#060606"
_VARIABLES = {
    INK: "ink",
    QUIET: "quiet",
    RULE: "rule",
    FIRST: "first",
    SECOND: "second",
    WARN: "warn",
}
_TEXT = 8.5
_NARROW, _WIDE, _HEIGHT = 4.4, 9.2, 2.7
_MOST_POINTS = 1200
_WIDEST_MEAN = 100
_FEW_POINTS = 12
"""A curve of no more points than this shows each as a dot."""

_PLACES = {
    "s": "Fed-back state",
    "boundary": "Fed-back state",
    "encoder": "Encoder cache",
    "memory": "Memory",
    "decoder": "Decoder window",
    "gru": "State of the GRU",
}
_PARTS = {"k": "keys", "v": "values", "s": "s", "h": "h", "boundary": "s at the chunk's start"}


class Panel(NamedTuple):
    """One figure with its heading and what it shows."""

    title: str
    svg: str
    note: str = ""


def loss_figures(records: list[Record]) -> tuple[str, str]:
    """The loss curve twice: for a wide page and for a phone."""
    return _loss(records, _WIDE, 3.4, "loss-wide"), _loss(records, _NARROW, 3.0, "loss-narrow")


def panels(records: list[Record]) -> list[Panel]:
    """Throughput, gradient norm, and one panel a part of the carried state."""
    return [
        Panel("Throughput", _throughput(records)),
        Panel("Gradient norm", _gradient_norm(records), "Global norm, before clipping."),
        *state_panels(records),
    ]


def state_panels(records: list[Record]) -> list[Panel]:
    """Root mean square of the carried state; nothing where none was recorded."""
    groups: dict[str, dict[str, list[Series]]] = {}
    for name in dict.fromkeys(name for r in records for name in r.get("state_norm", ())):
        place, part = _place(name)
        series = _series((r["step"], r.get("state_norm", {}).get(name)) for r in records)
        groups.setdefault(place, {}).setdefault(part, []).append(series)
    first = list(dict.fromkeys(_PLACES.values()))
    order = sorted(groups, key=lambda place: first.index(place) if place in first else len(first))
    return [_state_panel(place, groups[place]) for place in order]


def _loss(records: list[Record], width: float, height: float, name: str) -> str:
    figure, axes = _canvas("loss (nats per token)", width, height)
    steps, losses = _series((record["step"], record["loss"]) for record in records)
    _raw_and_smooth(axes, (steps, losses), "training")
    validation = _series((r["step"], r["validation"]["loss"]) for r in records if "validation" in r)
    if len(validation[0]):
        axes.plot(
            *validation, "o-", color=SECOND, markersize=3.5, linewidth=1.2, label="validation"
        )
    skipped = [record["step"] for record in records if record["skipped"]]
    if skipped:
        # x in steps, y in parts of the axes' height: a row of marks along the foot.
        foot, where = [0.015] * len(skipped), axes.get_xaxis_transform()
        axes.plot(skipped, foot, "|", color=WARN, markersize=9, transform=where, label="skipped")
    _legend(axes)
    return svg(figure, name, "Training and validation loss over steps")


def _throughput(records: list[Record]) -> str:
    figure, axes = _canvas("tokens per second")
    series = _series((r["step"], r["tokens_per_second"]) for r in records)
    _raw_and_smooth(axes, series, "each step")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    _legend(axes)
    return svg(figure, "throughput", "Tokens per second over steps")


def _gradient_norm(records: list[Record]) -> str:
    figure, axes = _canvas("gradient norm")
    series = _series((r["step"], r["gradient_norm"]) for r in records)
    _raw_and_smooth(axes, series, "each step")
    axes.set_ylim(bottom=0)
    _legend(axes)
    return svg(figure, "gradient", "Gradient norm over steps")


def _state_panel(place: str, parts: dict[str, list[Series]]) -> Panel:
    figure, axes = _canvas("root mean square")
    for (part, layers), color in zip(parts.items(), (FIRST, SECOND, INK, QUIET), strict=False):
        for series in layers if len(layers) > 1 else ():
            axes.plot(*thin(series, _MOST_POINTS // 4), color=color, linewidth=0.8, alpha=0.45)
        mean = thin(_average(layers))
        axes.plot(*mean, color=color, linewidth=1.6, label=part, **_dots(mean))
    _legend(axes)
    most = max(len(layers) for layers in parts.values())
    note = f"Thin: each of {most} layers. Thick: their mean." if most > 1 else ""
    name = "state-" + re.sub(r"\W+", "-", place.lower())
    return Panel(place, svg(figure, name, f"{place}: root mean square over steps"), note)


def _place(name: str) -> tuple[str, str]:
    """Where a state tensor lives and which part of it this is, in words."""
    place, *rest = name.split(".")
    part = next((_PARTS.get(word, word) for word in rest if not word.isdigit()), "")
    return _PLACES.get(place, place), part or _PARTS.get(place, "hidden states")


def _raw_and_smooth(axes: Axes, series: Series, label: str) -> None:
    steps, values = series
    width = min(len(steps) // 20, _WIDEST_MEAN)
    if width < 2:
        axes.plot(steps, values, color=FIRST, linewidth=1.4, label=label, **_dots(series))
        return
    axes.plot(*thin(series), color=FIRST, linewidth=0.8, alpha=0.45, label=label)
    mean = f"mean of {width} steps"
    axes.plot(*thin((steps, smooth(values, width))), color=FIRST, linewidth=1.6, label=mean)


def smooth(values: np.ndarray, width: int) -> np.ndarray:
    """Mean over about `width` neighbours, leaving out what is not finite.

    The window starts narrow, so that a steep beginning is not flattened, and ends one-sided, so
    that the last value is not one noisy step's.
    """
    index = np.arange(len(values))
    before = np.minimum(width // 2, index)
    after = np.minimum(before, index[::-1])
    known = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    low, high = index - before, index + after + 1
    number = counts[high] - counts[low]
    means = (sums[high] - sums[low]) / np.maximum(number, 1)
    return np.where(number > 0, means, np.nan)


def thin(series: Series, most: int = _MOST_POINTS) -> Series:
    """At most about `most` points: of each stretch of steps, its lowest and its highest."""
    steps, values = series
    if len(steps) <= most:
        return series
    kept = set()
    for stretch in np.array_split(np.arange(len(steps)), most // 2):
        finite = stretch[np.isfinite(values[stretch])]
        if len(finite):
            kept |= {int(finite[values[finite].argmin()]), int(finite[values[finite].argmax()])}
    chosen = sorted(kept)
    return steps[chosen], values[chosen]


def _series(pairs: Iterable[tuple[int, float | None]]) -> Series:
    """Steps and values, without the steps that have none; infinities become gaps."""
    known = [(step, value) for step, value in pairs if value is not None]
    steps = np.array([step for step, _ in known], dtype=np.int64)
    values = np.array([value for _, value in known], dtype=np.float64)
    return steps, np.where(np.isfinite(values), values, np.nan)


def _average(layers: list[Series]) -> Series:
    """Mean over layers; all are recorded at the same steps, or the shortest rules."""
    length = min(len(steps) for steps, _ in layers)
    return layers[0][0][-length:], np.mean([values[-length:] for _, values in layers], axis=0)


def _dots(series: Series) -> dict[str, Any]:
    return {"marker": "o", "markersize": 3} if len(series[0]) <= _FEW_POINTS else {}


def _canvas(label: str, width: float = _NARROW, height: float = _HEIGHT) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained", facecolor="none")
    axes = figure.add_subplot(facecolor="none")
    axes.set_xlabel("step", fontsize=_TEXT, color=QUIET)
    axes.set_ylabel(label, fontsize=_TEXT, color=QUIET)
    axes.tick_params(labelsize=_TEXT, color=RULE, labelcolor=QUIET, length=3)
    axes.xaxis.set_major_locator(
        MaxNLocator(6 if width < _WIDE else 10, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1)
    )
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.grid(color=RULE, linewidth=0.6)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(RULE)
    return figure, axes


def _legend(axes: Axes) -> None:
    """Names of the lines, above the axes, where no curve can run into them."""
    handles, labels = axes.get_legend_handles_labels()
    solid = [_opaque(handle) for handle in handles if isinstance(handle, Line2D)]
    axes.legend(
        solid,
        labels,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=len(labels),
        fontsize=_TEXT,
        labelcolor=INK,
        frameon=False,
        borderaxespad=0.2,
        handlelength=1.4,
    )


def _opaque(line: Line2D) -> Line2D:
    """A legend's stand-in for a line, faint lines a little stronger."""
    names = ("color", "linewidth", "linestyle", "marker", "markersize")
    alpha = min(1.0, (line.get_alpha() or 1.0) * 1.5)
    return Line2D([], [], alpha=alpha, **{name: getattr(line, f"get_{name}")() for name in names})


def svg(
    figure: Figure, name: str, described: str, variables: Mapping[str, str] = _VARIABLES
) -> str:
    """The figure as an `<svg>` element: sized by the page, ids its own, colours by variable.

    Args:
        name: of the figure, one of its own on the page.
        described: for those who cannot see it.
        variables: by a colour of the drawing, the page's variable for it.
    """
    buffer = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    body = re.sub(r"<metadata>.*?</metadata>\s*", "", buffer.getvalue(), flags=re.DOTALL)
    body = body[body.index("<svg") :]
    body = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", body, count=1)
    body = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", body, count=1)
    body = body.replace("<svg", f'<svg role="img" aria-label="{described}"', 1)
    body = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", body)
    for stand_in, variable in variables.items():
        body = body.replace(stand_in, f"var(--{variable})")
    return body
