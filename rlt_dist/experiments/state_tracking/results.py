"""What came of experiments, for people and for programs: a table, rows, and a plot a task.

OUT/results.json   all rows of all runs in OUT
OUT/results.csv    the same as a table, the recipe's values as columns
OUT/TASK-SUPERVISED.png  accuracy over length, a line a model: all seeds, each test once
"""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter, ScalarFormatter

from rlt_dist.experiments.state_tracking.recipes import MODELS
from rlt_dist.experiments.state_tracking.run import SCORES
from rlt_dist.experiments.state_tracking.score import Score
from rlt_dist.util.files import atomic_path, write_atomic
from rlt_dist.util.records import read_records, to_json

Row = Mapping[str, Any]

_COLOURS = ("#2b7bba", "#1b9e77", "#b2589a", "#e69f00", "#7f7f7f", "#d55e00")
_MARKERS = "os^DvP"
_DPI = 150


@dataclass(frozen=True)
class Summary:
    """All seeds at one length, with or without the feedback cut.

    Attributes:
        mean, spread, least, most: of `headline` over seeds; the spread is a standard deviation.
        prefix, whole: means.
    """

    length: int
    cut: bool
    mean: float
    spread: float
    least: float
    most: float
    prefix: float
    whole: float


def headline(row: Row) -> float:
    """See `Score.headline`."""
    return Score(**{field.name: row[field.name] for field in fields(Score)}).headline


def summaries(rows: Iterable[Row]) -> list[Summary]:
    """By cut and length."""
    found = []
    for (cut, length), group in groupby(sorted(rows, key=_place), key=_place):
        some = list(group)
        values = [headline(row) for row in some]
        found.append(
            Summary(
                length=length,
                cut=cut,
                mean=fmean(values),
                spread=pstdev(values),
                least=min(values),
                most=max(values),
                prefix=fmean(row["prefix"] for row in some),
                whole=fmean(row["whole"] for row in some),
            )
        )
    return found


def _place(row: Row) -> tuple[bool, int]:
    return row["cut"], row["length"]


def write_results(output: Path) -> None:
    """Write rows and plots of all that was found in an output folder."""
    rows = [row for path in sorted(output.glob(f"runs/*/{SCORES}")) for row in read_records(path)]
    write_atomic(output / "results.json", to_json({"state_tracking": rows}) + "\n")
    write_atomic(output / "results.csv", _csv(rows))

    def drawn(row: Row) -> tuple[str, str]:
        return row["task"], row["supervised"]

    for (task, supervised), group in groupby(sorted(decisive(rows), key=drawn), key=drawn):
        figure = _plot(task, supervised, list(group))
        with atomic_path(output / f"{task}-{supervised}.png") as path:
            figure.savefig(path, format="png", dpi=_DPI)


def decisive(rows: Iterable[Row]) -> Iterable[Row]:
    """Of each seed's tests at a length those with the most programs; of as many, the last one."""
    names = ("task", "supervised", "model", "seed", "length", "cut")
    ordered = sorted(rows, key=lambda row: row["programs"])
    return {tuple(row[name] for name in names): row for row in ordered}.values()


def _csv(rows: Sequence[Row]) -> str:
    """Rows with the values inside others as columns of their own, `recipe.rate`."""
    flat = [_flat(row) for row in rows]
    text = io.StringIO()
    names = list(dict.fromkeys(name for row in flat for name in row))
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()


def _flat(row: Row, before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{before}{name}.")
        else:
            found[before + name] = " ".join(map(str, value)) if isinstance(value, list) else value
    return found


def _plot(task: str, supervised: str, rows: Sequence[Row]) -> Figure:
    """A line a model, its seeds' least and most around it; dashed: the feedback cut."""
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for model, colour, marker in zip(MODELS, _COLOURS, _MARKERS, strict=True):
        found = summaries(row for row in rows if row["model"] == model)
        for cut in (False, True):
            some = [each for each in found if each.cut == cut]
            if not some:
                continue
            lengths, means = [each.length for each in some], [each.mean for each in some]
            style, name = ("--", f"{model}, feedback cut") if cut else ("-", model)
            line: dict[str, Any] = {
                "color": colour,
                "linestyle": style,
                "linewidth": 1.3,
                "markersize": 4,
            }
            axes.plot(lengths, means, marker=marker, label=name, alpha=0.6 if cut else 1, **line)
            ends = [each.least for each in some], [each.most for each in some]
            axes.fill_between(lengths, *ends, color=colour, alpha=0.12, linewidth=0)
    trained = max(length for row in rows for length in row["recipe"]["lengths"])
    axes.axvline(trained, color="#b8b3aa", linewidth=1, label="longest trained on")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted({row["length"] for row in rows}))
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set(ylim=(-0.02, 1.02), xlabel="length of a program", ylabel="final state right")
    axes.set_title(f"{task}, {supervised} state supervised", loc="left", fontsize=10)
    axes.grid(color="#e2dfd9", linewidth=0.6)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure
