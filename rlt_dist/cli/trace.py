"""`rlt-dist trace`: what the stages of a pipeline were told to do, and what they did."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rlt_dist.train.trace import Summary


def trace(
    file: Annotated[Path, typer.Argument(metavar="CONFIG", help="A run's configuration.")],
    output: Annotated[Path, typer.Option(help="Folder for what is written.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY.SUB=VALUE...", help="Values that replace the file's."),
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option(help="Data x pipeline x tensor, such as 1x4x1 [default: the configuration's]"),
    ] = None,
    vocabulary: Annotated[int, typer.Option(min=2, help="Tokens are drawn from so many.")] = 1009,
) -> None:
    """Show one step's forward and backward on a pipeline, as planned and as run.

    Starts the ranks itself, on this machine. Tokens are random, so no corpus is needed; of the
    configuration's data only lanes and segment count. Written are `trace.json`, which Perfetto
    (ui.perfetto.dev) opens, `trace.svg`, the same as a picture, and `summary.json`. In both,
    what was planned is drawn with what each kind of work did cost, as if messages took no time.

    Example: `rlt-dist trace configs/verify/rlt1.yaml --mesh 1x4x1 --output runs/trace`
    """
    from rlt_dist.config.load import load_typed
    from rlt_dist.config.run import RunConfig
    from rlt_dist.mesh.axes import parse_axes
    from rlt_dist.train.trace import trace as run_traced

    sizes = [] if mesh is None else parse_axes(mesh).overrides()
    config = load_typed(file, RunConfig, [*(overrides or ()), *sizes])
    _show(run_traced(config, vocabulary, output))
    print(f"written to {output}: trace.json (open it in ui.perfetto.dev), trace.svg, summary.json")


def _show(summary: "Summary") -> None:
    counted = f"{summary.micro_batches} micro-batch{'es' * (summary.micro_batches > 1)}"
    print(
        f"mesh {summary.mesh}, {counted}: "
        f"{summary.seconds * 1e3:.1f} ms; the same work without waiting for messages or cores "
        f"{summary.seconds_planned * 1e3:.1f} ms"
    )
    for use in summary.uses:
        formula = "" if use.formula is None else f", by the formula {use.formula:.3f}"
        print(f"use, {use.kinds}: planned {use.planned:.3f} of ticks{formula}; run {use.run:.3f}")
    for stage, (share, sent) in enumerate(zip(summary.stages, summary.sent, strict=True)):
        print(
            f"stage {stage}: working {share.working:.1%}, waiting {share.receiving:.1%}, "
            f"sending {share.sending:.1%}, {sent / 1e6:.3f} MB sent"
        )
