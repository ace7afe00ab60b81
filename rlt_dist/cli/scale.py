"""`rlt-dist scale`: scaling studies, before and after nodes are spent."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rlt_dist.study.grid import Study
    from rlt_dist.study.predict import Prediction

scale_app = typer.Typer(
    help="Scaling studies: predict, run, compare.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)
StudyFile = Annotated[Path, typer.Argument(metavar="STUDY", help="A study's file.")]
Output = Annotated[
    Path | None, typer.Option(help="The study's folder [default: runs/studies/STUDY's name].")
]


@scale_app.command()
def predict(
    file: StudyFile,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY.SUB=VALUE...", help="Values of all runs, after the study's."),
    ] = None,
    output: Output = None,
    as_json: Annotated[bool, typer.Option("--json", help="One list.")] = False,
) -> None:
    """Say how long a step of each point takes on the study's cluster, and what its time goes into.

    The executor's own schedules are simulated with the cluster's costs; nothing is run. With
    `mesh: best` every mesh of a point's devices that fits into memory is considered. Lanes are
    taken to be at all places of their documents, their states full, and all targets scored.

    Predictions are written to OUTPUT/predictions.json.

    Example: `rlt-dist scale predict configs/studies/rlt_48x48_mesh.yaml`
    """
    from rlt_dist.study.grid import load_study
    from rlt_dist.study.meshes import keep_predictions
    from rlt_dist.study.predict import PREDICTIONS
    from rlt_dist.study.predict import predict as predicted
    from rlt_dist.util.files import make_folder

    study, folder = load_study(file, tuple(overrides or ())), output or folder_of(file)
    make_folder(folder)
    found = predicted(study)
    keep_predictions(folder, found)
    if as_json:
        print(json.dumps([prediction.model_dump(mode="json") for prediction in found], indent=2))
    else:
        _show(study, found)
        typer.echo(f"written to {folder / PREDICTIONS}")


@scale_app.command()
def calibrate(
    output: Annotated[Path, typer.Option(help="The cluster file that is written.")] = Path(
        "configs/clusters/local.yaml"
    ),
    seconds: Annotated[
        float, typer.Option(min=0.1, help="Of each of some 50 short runs, twice.")
    ] = 0.5,
) -> None:
    """Measure this machine and write its cluster file: what predictions for it are made from.

    Small models are trained on random tokens, by one rank, by two and by four at once, and messages
    are exchanged. What else the machine does meanwhile goes into the figures.

    Example: `rlt-dist scale calibrate --output configs/clusters/local.yaml`
    """
    from tempfile import TemporaryDirectory

    from rlt_dist.study.calibrate import calibrate as measured
    from rlt_dist.study.calibrate import cluster_yaml
    from rlt_dist.util.files import make_folder, write_atomic

    make_folder(output.parent)
    with TemporaryDirectory(prefix="rlt-dist-calibrate-") as folder:
        cluster = measured(Path(folder), seconds, typer.echo)
    write_atomic(output, cluster_yaml(cluster))
    typer.echo(f"written to {output}")


def folder_of(file: Path) -> Path:
    """Where a study's results go, unless another folder is given."""
    return Path("runs/studies") / file.stem


def _show(study: "Study", found: list["Prediction"]) -> None:
    from rich import box
    from rich.table import Table

    from rlt_dist.cli.console import console

    title = f"{study.config.title}: predicted on {study.cluster.name}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    labels = list(study.config.vary)
    for name in ("nodes", *labels, "mesh"):
        table.add_column(name, justify="left" if name in labels else "right")
    for name in ("s/step", "tokens/s", "MFU", "GiB", *found[0].shares):
        table.add_column(name, justify="right")
    fastest = _fastest(found) if labels else set()
    for each in found:
        table.add_row(*_row(each, labels, "*" * (each.name in fastest)))
    console(width=200).print(table)
    if fastest:
        typer.echo("*: the most tokens a second on so many nodes, of what fits")
    for each in found:
        if not each.fits:
            typer.echo(f"{each.name} does not fit into memory")


def _fastest(found: list["Prediction"]) -> set[str]:
    """Names of the points that are faster than all others of their nodes, of those that fit."""
    best: dict[int, Prediction] = {}
    for each in found:
        if each.fits:
            best[each.nodes] = max(
                best.get(each.nodes, each), each, key=lambda of: of.tokens_per_second
            )
    return {each.name for each in best.values()}


def _row(each: "Prediction", labels: list[str], mark: str) -> tuple[str, ...]:
    return (
        str(each.nodes),
        *(each.labels[name] for name in labels),
        each.axes,
        f"{each.seconds:.4g}",
        f"{mark} {each.tokens_per_second:,.0f}",
        f"{each.mfu:.1%}",
        f"{each.peak_memory / 2**30:.2f}" + ("" if each.fits else " !"),
        *(f"{share:.0%}" for share in each.shares.values()),
    )
