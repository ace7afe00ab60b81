"""`rlt-dist scale report`: a study's page."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlt_dist.cli.scale import Output, StudyFile, folder_of

if TYPE_CHECKING:
    from rlt_dist.study.scaling_report import ScalingReport


def report(
    file: StudyFile,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY.SUB=VALUE...", help="As of `rlt-dist scale run`."),
    ] = None,
    output: Output = None,
    step: Annotated[
        str | None,
        typer.Option(metavar="POINT", help="Whose step is drawn [default: the longest pipeline]."),
    ] = None,
) -> None:
    """Write a study's report: predicted beside measured, with what follows from both.

    OUTPUT/report.html is one file that needs nothing else: throughput and efficiency against nodes,
    the error of predictions, shares of time, one step's timeline, serial shares, the cost of the
    token budget, and what was assumed. Beside it are points.csv and figures/. Either predictions
    or measurements are enough.

    Predictions that were made of another configuration or cluster are made anew; runs that are of
    another configuration are refused.

    Example: `rlt-dist scale report configs/studies/small.yaml`
    """
    from rlt_dist.study.grid import load_study
    from rlt_dist.study.meshes import known_predictions
    from rlt_dist.study.scaling_page import step_of, write
    from rlt_dist.study.scaling_report import gather

    study, folder = load_study(file, tuple(overrides or ())), output or folder_of(file)
    found = gather(study, known_predictions(study, folder, _say), folder)
    path = write(found, step_of(found, step))
    _show(found)
    typer.echo(str(path))


def _show(found: "ScalingReport") -> None:
    from rlt_dist.cli.console import console

    console().print(_table(found))
    for row in found.rows:
        if row.damaged is not None:
            _say(f"{row.point.name}: left out of what was measured: {row.damaged}")
    if found.verdict is not None:
        typer.echo(found.verdict)


def _table(found: "ScalingReport") -> Any:
    from rich import box
    from rich.table import Table

    table = Table(title=found.study.config.title, title_justify="left", box=box.SIMPLE)
    table.add_column("point", overflow="fold")
    for name in ("mesh", "measured, s", "predicted, s", "error", "tokens/s"):
        table.add_column(name, justify="right")
    for row in found.rows:
        speed = row.tokens_per_second("measured") or row.tokens_per_second("predicted")
        table.add_row(
            row.point.name,
            row.mesh,
            *(_number(row.seconds(kind), ".4g") for kind in ("measured", "predicted")),
            _number(row.error, "+.1%"),
            _number(speed, ",.0f"),
        )
    return table


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _say(line: str) -> None:
    typer.echo(line, err=True)
