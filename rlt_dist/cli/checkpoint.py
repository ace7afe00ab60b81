"""`rlt-dist checkpoint`: list, look into and verify checkpoints."""

from pathlib import Path
from typing import Annotated

import typer

checkpoint_app = typer.Typer(
    help="List, look into and verify checkpoints.",
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
    from rich.console import Console
    from rich.table import Table

    from rlt_dist.checkpoint.manifest import verify
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
    Console().print(table)


@checkpoint_app.command()
def show(checkpoint: RunOrCheckpoint) -> None:
    """Show what a checkpoint holds: its facts, its tensors, the state it carries.

    Example: `rlt-dist checkpoint show runs/rlt`
    """
    from rich.console import Console
    from rich.table import Table

    from rlt_dist.checkpoint.load import find_checkpoint, stored_tensors
    from rlt_dist.checkpoint.manifest import read_manifest

    folder = find_checkpoint(checkpoint)
    console = Console()
    console.print(str(folder), highlight=False)
    for name, value in read_manifest(folder).facts.model_dump().items():
        console.print(f"  {name:10} {value}", highlight=False)
    table = Table("tensor", "shape", "type")
    for name, (shape, dtype) in sorted(stored_tensors(folder).items()):
        table.add_row(name, str(list(shape)), str(dtype).removeprefix("torch."))
    console.print(table)


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


def _checkpoints_of(run: Path) -> list[Path]:
    from rlt_dist.checkpoint.manifest import checkpoints
    from rlt_dist.checkpoint.run_folder import CHECKPOINTS
    from rlt_dist.util.errors import UserError

    found = checkpoints(run / CHECKPOINTS)
    if not found:
        raise UserError(f"{run}: holds no checkpoints; give a run folder")
    return found
