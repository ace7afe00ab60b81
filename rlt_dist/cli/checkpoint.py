"""`rlt-dist checkpoint`: list, look into, verify and explain checkpoints."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlt_dist.checkpoint.explain import Decision

checkpoint_app = typer.Typer(
    help="List, look into, verify and explain checkpoints; take models out and in.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

RunFolder = Annotated[Path, typer.Argument(help="A run folder.")]
RunOrCheckpoint = Annotated[Path, typer.Argument(help="A run folder or a checkpoint folder.")]


@checkpoint_app.command("ls")
def list_(run: RunFolder) -> None:
    """List a run's checkpoints, oldest first, and whether each is whole.

    Example: `rlt-dist checkpoint ls runs/rlt`
    """
    from rich.table import Table

    from rlt_dist.checkpoint.manifest import verify
    from rlt_dist.cli.console import console
    from rlt_dist.util.errors import UserError

    table = Table("checkpoint", "tokens", "MiB", "whole")
    for folder in _checkpoints_of(run):
        try:
            manifest = verify(folder)
        except UserError as error:
            table.add_row(folder.name, "", "", str(error))
            continue
        size = f"{manifest.bytes / (1 << 20):.1f}"
        table.add_row(folder.name, f"{manifest.facts.tokens:,}", size, "yes")
    console().print(table)


@checkpoint_app.command()
def show(checkpoint: RunOrCheckpoint) -> None:
    """Show what a checkpoint holds: its facts, its tensors, the state it carries.

    Example: `rlt-dist checkpoint show runs/rlt`
    """
    from rich.table import Table

    from rlt_dist.checkpoint.load import find_checkpoint, stored_tensors
    from rlt_dist.checkpoint.manifest import read_manifest
    from rlt_dist.cli.console import console

    folder = find_checkpoint(checkpoint)
    typer.echo(str(folder))
    for name, value in read_manifest(folder).facts.model_dump().items():
        typer.echo(f"  {name:10} {value}")
    table = Table("tensor", "shape", "type")
    for name, (shape, dtype) in sorted(stored_tensors(folder).items()):
        table.add_row(name, str(list(shape)), str(dtype).removeprefix("torch."))
    console().print(table)


@checkpoint_app.command()
def verify(checkpoint: RunOrCheckpoint) -> None:
    """Check every file of one checkpoint, or of all of a run's, against its manifest.

    Exits non-zero at the first that is damaged, and names the file.

    Example: `rlt-dist checkpoint verify runs/rlt`
    """
    from rlt_dist.checkpoint.manifest import MANIFEST
    from rlt_dist.checkpoint.manifest import verify as verify_folder

    single = (checkpoint / MANIFEST).exists()
    for folder in [checkpoint] if single else _checkpoints_of(checkpoint):
        verify_folder(folder)
        typer.echo(f"{folder}: whole")


@checkpoint_app.command()
def explain(
    checkpoint: RunOrCheckpoint,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY.SUB=VALUE...", help="Values that replace the file's."),
    ] = None,
    file: Annotated[
        Path, typer.Option("--config", help="The configuration of the run that is to go on.")
    ] = ...,  # type: ignore[assignment]
    mesh: Annotated[
        str | None,
        typer.Option(
            metavar="DxPxT", help="Data x pipeline x tensor [default: the configuration's]."
        ),
    ] = None,
    reset_state: Annotated[
        bool, typer.Option("--reset-state", help="As `train` has it: all lanes' state is emptied.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One object.")] = False,
) -> None:
    """Say what `train` would do with a checkpoint; no run is started and nothing is loaded.

    What is restored as it is, what is cut differently and over which axes, what is made afresh,
    and every reason why it would be refused; then the exit status is 1. Of a run folder it is the
    newest whole checkpoint, as `train` takes it.

    Examples:

    `rlt-dist checkpoint explain runs/rlt --config configs/rlt_stdlib.yaml --mesh 2x1x2`

    `rlt-dist checkpoint explain runs/rlt --config configs/rlt_stdlib.yaml data.lanes=8
    --reset-state`
    """
    from rlt_dist.config.load import load_typed
    from rlt_dist.config.run import RunConfig
    from rlt_dist.mesh.axes import least_axes, parse_axes
    from rlt_dist.train.start import explain as explained
    from rlt_dist.util.errors import UserError
    from rlt_dist.util.records import to_json

    wished = list(overrides or ())
    load_typed(file, RunConfig, wished)  # a mistake in the file itself is none of the checkpoint's
    axes = [] if mesh is None else parse_axes(mesh).overrides()
    try:
        config = load_typed(file, RunConfig, wished + axes)
        decision = explained(checkpoint, config, least_axes(config.mesh), reset_state)
        refusals = decision.refusals
    except UserError as error:
        decision, refusals = None, (str(error),)
    if as_json:
        record = _told(decision) if decision else {"checkpoint": str(checkpoint)}
        print(to_json(record | {"refused": list(refusals), "ok": not refusals}))
    else:
        _show(decision, refusals)
    if refusals:
        raise typer.Exit(1)


def _told(decision: "Decision") -> dict[str, Any]:
    parts = [
        {"name": part.name, "tensors": part.tensors, "fate": part.fate}
        | {"changes": {axis: list(change) for axis, change in part.changes.items()}}
        for part in decision.parts
    ]
    facts = decision.facts
    return {"checkpoint": str(decision.folder), "step": facts.step, "tokens": facts.tokens} | {
        "from": facts.mesh,
        "parts": parts,
        "note": decision.note,
    }


def _show(decision: "Decision | None", refusals: "Sequence[str]") -> None:
    if decision:
        facts = decision.facts
        typer.echo(
            f"{decision.folder}: step {facts.step:,}, {facts.tokens:,} tokens seen, written on "
            f"{facts.mesh} (data x pipeline x tensor)"
        )
        for part in decision.parts:
            tensors = f"{part.tensors} tensors" if part.tensors else ""
            changes = ", ".join(f"{axis} {a} -> {b}" for axis, (a, b) in part.changes.items())
            typer.echo(f"  {part.name:17}  {tensors:>12}  {part.fate:15}  {changes}".rstrip())
        if decision.note:
            typer.echo(f"  {decision.note}")
    for refusal in refusals:
        typer.echo(f"  refused: {refusal}")


def _checkpoints_of(run: Path) -> list[Path]:
    from rlt_dist.checkpoint.manifest import checkpoints
    from rlt_dist.checkpoint.run_folder import CHECKPOINTS
    from rlt_dist.util.errors import UserError

    found = checkpoints(run / CHECKPOINTS)
    if not found:
        raise UserError(f"{run}: holds no checkpoints; give a run folder")
    return found
