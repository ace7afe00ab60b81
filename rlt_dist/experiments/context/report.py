"""The experiment's figures as files: results.json, context.csv and context.png."""

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rlt_dist.experiments.context.effective_length import RATIOS, THRESHOLD
from rlt_dist.experiments.context.experiment import Result
from rlt_dist.experiments.context.passages import Scope
from rlt_dist.util.files import atomic_path, write_atomic
from rlt_dist.util.records import to_json

_COLOURS = {"transformer_xl": "#d55e00", "rlt": "#2b7bba", "transformer": "#7f7f7f"}


def write_report(results: Sequence[Result], scope: Scope, output: Path) -> None:
    """Write all files."""
    records = [result.record(scope) for result in results]
    about = {"context": asdict(scope), "models": records}
    write_atomic(output / "results.json", to_json(about) + "\n")
    write_atomic(output / "context.csv", _table(results, scope))
    with atomic_path(output / "context.png") as partial:
        _picture(results, scope).savefig(partial, format="png", dpi=200, facecolor="white")


def _table(results: Sequence[Result], scope: Scope) -> str:
    """A number a row; `length` is the context or the memory, of gains the shorter of two."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(("model", "quantity", "r", "length", "value"))
    for result in results:
        writer.writerows((result.contender.name, *row) for row in _rows(result, scope))
    return buffer.getvalue()


def _rows(result: Result, scope: Scope) -> Iterator[tuple[str, float | str, int | str, float]]:
    measured, memories = result.measured, result.contender.kind.memories
    for context, bits in zip(scope.contexts, measured.by_context, strict=True):
        yield "bits per byte by context", "", context, bits
    for memory, bits in zip(memories, measured.by_memory, strict=True):
        yield "bits per byte by memory", "", memory, bits
    for ratio, found in result.effective.items():
        for context, gain in zip(scope.contexts, found.gains, strict=False):
            yield "relative gain", ratio, context, gain
        yield "effective length", ratio, "", found.length


def _picture(results: Sequence[Result], scope: Scope) -> Figure:
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    bits, gains = figure.subplots(1, 2)
    for result in results:
        _draw(bits, gains, result, scope)
    bits.set_xscale("log", base=2)
    bits.xaxis.set_major_formatter("{x:.0f}")
    bits.set_xlabel("tokens of context (line), of memory (dots)")
    bits.set_ylabel("bits per byte")
    gains.axhline(THRESHOLD, color="black", linewidth=0.8, linestyle=":")
    gains.set_xlabel("tokens of context")
    gains.set_ylabel(f"relative gain of {scope.step} more, r = {RATIOS[0]}")
    gains.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    for axes in (bits, gains):
        axes.spines[["top", "right"]].set_visible(False)
    bits.legend(frameon=False)
    return figure


def _draw(bits: Axes, gains: Axes, result: Result, scope: Scope) -> None:
    name, measured = result.contender.name, result.measured
    colour = _COLOURS[name]
    bits.plot(scope.contexts, measured.by_context, color=colour, label=name.replace("_", " "))
    memories = result.contender.kind.memories
    bits.plot(memories, measured.by_memory, color=colour, marker="o", markersize=3, linestyle="")
    gains.plot(scope.contexts[:-1], result.effective[RATIOS[0]].gains, color=colour)
