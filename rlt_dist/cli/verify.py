"""`rlt-dist verify`: hold the system to exact answers."""

from pathlib import Path
from typing import Annotated

import typer

verify_app = typer.Typer(
    help="Hold the system to exact answers.", no_args_is_help=True, rich_markup_mode="markdown"
)


@verify_app.command()
def golden(
    files: Annotated[list[Path], typer.Argument(help="Golden .safetensors files.")],
    as_json: Annotated[bool, typer.Option("--json", help="One object a line.")] = False,
) -> None:
    """Run golden files in float64: outputs, state or memory, loss and every gradient.

    One row a file with its largest relative error; exits with 1 where one exceeds 1e-9.

    Example: `rlt-dist verify golden tests/golden/*.safetensors`
    """
    from rlt_dist.inference.golden import TOLERANCE, golden_errors
    from rlt_dist.util.records import to_json

    width = max(len(file.name) for file in files)
    passed = True
    for file in files:
        errors = golden_errors(file)
        worst = max(errors, key=lambda name: errors[name])
        ok = errors[worst] <= TOLERANCE
        passed &= ok
        if as_json:
            row = {"file": file.name, "max_relative_error": errors[worst], "ok": ok}
            print(to_json(row))
        else:
            verdict = "ok" if ok else "WRONG"
            print(f"{file.name:{width}}  {errors[worst]:.2e}  {verdict:5}  worst: {worst}")
    if not passed:
        raise typer.Exit(1)


@verify_app.command()
def mesh(
    files: Annotated[list[Path], typer.Argument(metavar="CONFIG...", help="Configurations.")],
    meshes: Annotated[
        list[str], typer.Option("--mesh", help="Data x pipeline x tensor, such as 1x2x2; repeat.")
    ],
    variants: Annotated[
        list[str] | None,
        typer.Option(
            "--variant",
            help="Also with these values, such as 'train.micro_batch=1 recompute.layers=true'; "
            "repeat.",
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of each run.")] = 3,
    vocabulary: Annotated[int, typer.Option(min=2, help="Tokens are drawn from so many.")] = 1009,
    precision: Annotated[
        str, typer.Option(help="float64; float32 for what has no other; bfloat16.")
    ] = "float64",
    as_json: Annotated[bool, typer.Option("--json", help="One object a line.")] = False,
) -> None:
    """Train on each mesh from one seed, and compare with one process that has everything.

    Starts the ranks itself, on this machine. Tokens and document starts are random, so no corpus
    is needed; of the configuration's data only lanes and segment count. Shown are the largest
    relative errors of losses, gradient norms, updated parameters and carried state; exits with 1
    where one exceeds 1e-9 (float32: where a loss or norm exceeds 1e-5; bfloat16: a loss 1e-2).

    Example: `rlt-dist verify mesh configs/verify/rlt1.yaml --mesh 2x1x1 --mesh 1x2x1`
    """
    from rlt_dist.mesh.axes import parse_axes
    from rlt_dist.train.check.campaign import TOLERANCE, Campaign, Row, check_meshes
    from rlt_dist.util.errors import UserError
    from rlt_dist.util.records import to_json

    if precision not in TOLERANCE:
        raise UserError(f"--precision {precision}: take {', '.join(TOLERANCE)}")
    every = [(), *(variant.split() for variant in variants or ())]
    axes = [parse_axes(text) for text in meshes]
    width = max(len(file.name) for file in files)

    def show(row: Row) -> None:
        found = row.deviation
        if as_json:
            errors = {"loss": found.loss, "gradient_norm": found.gradient_norm}
            errors |= {"parameters": found.parameters.error, "state": found.state.error}
            named = {"config": str(row.file), "variant": row.variant, "mesh": str(row.mesh)}
            print(to_json(named | errors | {"ok": row.ok}), flush=True)
            return
        verdict = "ok" if row.ok else "WRONG"
        print(
            f"{row.file.name:{width}}  {row.mesh!s:7}  loss {found.loss:.1e}  norm "
            f"{found.gradient_norm:.1e}  parameters {found.parameters.error:.1e}  state "
            f"{found.state.error:.1e}  {verdict:5}  worst: {found.parameters.name}  {row.variant}",
            flush=True,
        )

    passed = True
    for row in check_meshes(Campaign(files, axes, every, vocabulary, steps, precision)):
        show(row)
        passed &= row.ok
    if not passed:
        raise typer.Exit(1)
