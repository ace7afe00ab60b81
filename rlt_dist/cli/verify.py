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


@verify_app.command()
def resume(
    files: Annotated[list[Path], typer.Argument(metavar="CONFIG...", help="Configurations.")],
    sources: Annotated[
        list[str],
        typer.Option("--from", help="Mesh that saves: data x pipeline x tensor; repeat."),
    ],
    targets: Annotated[
        list[str], typer.Option("--to", help="Mesh that goes on from what was saved; repeat.")
    ],
    source_choices: Annotated[
        str, typer.Option("--from-with", help="Values there, such as 'train.micro_batch=1'.")
    ] = "",
    target_choices: Annotated[
        str, typer.Option("--to-with", help="Such as 'optimizer.engine=deepspeed'.")
    ] = "",
    before: Annotated[int, typer.Option(min=1, help="Optimizer steps up to the save.")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps after it.")] = 5,
    vocabulary: Annotated[int, typer.Option(min=2, help="Tokens are drawn from so many.")] = 1009,
    precision: Annotated[
        str, typer.Option(help="float64; float32, which DeepSpeed needs; bfloat16.")
    ] = "float64",
    as_json: Annotated[bool, typer.Option("--json", help="One object a line.")] = False,
) -> None:
    """Save on one mesh, go on on another, and compare with the run that was not interrupted.

    Every configuration, from every mesh to every mesh: all that a number of ranks does shares a
    launch, on this machine. Tokens and document starts are random, so no corpus is needed. Shown
    are the largest relative errors of the losses and gradient norms of the steps after the save,
    and at their end of parameters, optimizer, carried state and cursors. Exits with 1 where one
    exceeds 1e-9; where mesh and values are the same, where one is not 0; in float32, where a loss
    or norm exceeds 1e-5 (bfloat16: a loss 1e-2).

    Examples:

    `rlt-dist verify resume configs/verify/rlt1.yaml --from 2x2x1 --to 1x1x2`

    `rlt-dist verify resume configs/verify/txl.yaml --from 2x1x1 --to 1x2x1 --precision float32
    --to-with optimizer.engine=deepspeed`
    """
    from rlt_dist.mesh.axes import parse_axes
    from rlt_dist.train.check.campaign import TOLERANCE
    from rlt_dist.train.check.resume import Resumed, Resumptions, Side, check_resumptions
    from rlt_dist.util.errors import UserError
    from rlt_dist.util.records import to_json

    if precision not in TOLERANCE:
        raise UserError(f"--precision {precision}: take {', '.join(TOLERANCE)}")

    def sides(meshes: list[str], choices: str) -> list[Side]:
        return [Side(parse_axes(text), choices.split()) for text in dict.fromkeys(meshes)]

    wanted = Resumptions(
        files,
        sides(sources, source_choices),
        sides(targets, target_choices),
        vocabulary,
        before,
        steps,
        precision,
    )
    width = max(len(file.name) for file in files)

    def show(row: Resumed) -> None:
        if as_json:
            named = {"config": str(row.file), "from": str(row.source), "to": str(row.target)}
            found = {"max_relative_error": row.worst.error, "worst": row.worst.name}
            print(to_json(named | found | {"errors": row.errors, "ok": row.ok}), flush=True)
            return
        errors = "  ".join(f"{name} {error:.1e}" for name, error in row.errors.items())
        print(
            f"{row.file.name:{width}}  {row.source} -> {row.target}  "
            f"{row.worst.error:.1e} {'ok' if row.ok else 'WRONG':5}  {errors}",
            flush=True,
        )

    passed = True
    for row in check_resumptions(wanted):
        show(row)
        passed &= row.ok
    if not passed:
        raise typer.Exit(1)
