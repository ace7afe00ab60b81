"""`rlt-dist bench checkpoint`: what saving costs a run."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlt_dist.cli.bench import AsJson, Threads, progress, usable_threads, warn_disturbed

if TYPE_CHECKING:
    from rlt_dist.bench.checkpoint import Costs


def checkpoint(
    threads: Threads = None,
    rounds: Annotated[int, typer.Option(min=2, help="Intervals of each way.")] = 5,
    folder: Annotated[
        Path | None,
        typer.Option(help="Where to write [default: the system's folder for temporary files]."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Time steps of training without saves, beside saves and between saves that it waits for.

    Each way trains RLT-1 of 12 million parameters, whose checkpoint has more than 100 MB; one
    of four steps is saved. `blocked` is what training waits for at a save, as a share of a step
    without saves; `interval` is four steps with their save until it is on disk; `written` is the
    size of all files against that of the tensors.

    Example: `rlt-dist bench checkpoint --threads 1`
    """
    from tempfile import TemporaryDirectory

    from rlt_dist.bench.checkpoint import measure

    count = usable_threads(threads)
    with TemporaryDirectory(dir=folder) as temporary, progress("checkpoint") as watch:
        ways, disturbance = measure(Path(temporary), count, rounds, watch)
    rows = _saving_rows(ways)
    if as_json:
        from rlt_dist.util.records import to_json

        common = {"bench": "checkpoint", "threads": count, "rounds": rounds}
        for row in rows:
            print(to_json(common | row | {"disturbance": disturbance}), flush=True)
    else:
        _print_saving(f"checkpoint, threads: {count}, rounds: {rounds}", rows)
    warn_disturbed(disturbance)


def _saving_rows(ways: "dict[str, Costs]") -> list[dict[str, Any]]:
    """Medians by way, and shares of a step without saves."""
    from rlt_dist.bench.checkpoint import typical

    step = typical(ways["none"].steps)
    interval = typical(ways["none"].intervals)
    assert step is not None
    assert interval is not None
    rows = []
    for way, costs in ways.items():
        blocked, whole = typical(costs.blocked), typical(costs.intervals)
        assert whole is not None
        last = costs.saves[-1] if costs.saves else None
        row: dict[str, Any] = {"variant": way, "seconds": typical(costs.steps)}
        row |= {"quartiles": costs.quartiles, "interval_seconds": whole}
        row |= {"interval_ratio": whole / interval, "blocked_seconds": blocked}
        row |= {"blocked_share": None if blocked is None else blocked / step}
        row |= {"save_seconds": typical([saved.seconds for saved in costs.saves])}
        row |= {"bytes": last and last.bytes, "tensor_bytes": last and last.tensor_bytes}
        rows.append(row)
    return rows


def _print_saving(title: str, rows: list[dict[str, Any]]) -> None:
    import sys

    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    table.add_column("saves")
    for name in ("step", "quartiles", "interval", "blocked", "of a step", "on disk", "written"):
        table.add_column(name, justify="right")
    for row in rows:
        low, high = row["quartiles"]
        saves = ("-",) * 4
        if row["bytes"]:
            written = f"{row['bytes'] / 1e6:.1f} MB, {row['bytes'] / row['tensor_bytes']:.3f}x"
            blocked = f"{row['blocked_seconds'] * 1e3:,.1f} ms", f"{row['blocked_share']:.1%}"
            saves = (*blocked, f"{row['save_seconds'] * 1e3:,.0f} ms", written)
        table.add_row(
            row["variant"],
            f"{row['seconds'] * 1e3:,.1f} ms",
            f"{low * 1e3:,.1f} - {high * 1e3:,.1f}",
            f"{row['interval_ratio']:.3f}x",
            *saves,
        )
    Console(width=None if sys.stdout.isatty() else 120).print(table)
