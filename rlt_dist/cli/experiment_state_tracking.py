"""`rlt-dist experiment state-tracking`: whether a model keeps track of a state."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rlt_dist.cli.numbers import parse_numbers
from rlt_dist.util.ending import STATUS
from rlt_dist.util.errors import UserError

if TYPE_CHECKING:
    from rlt_dist.experiments.state_tracking.run import Experiment

Task = Literal["parity", "five_state", "s5_swaps", "s5", "mod5", "mod5_brackets", "addition"]
Model = Literal["rlt1", "rlt2", "rlt0", "token", "transformer", "gru"]


def state_tracking(
    task: Annotated[Task, typer.Option(help="What is to be kept track of.")],
    output: Annotated[
        Path, typer.Option(help="Folder of corpora, runs, results.json, results.csv and plots.")
    ],
    changes: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE...", help="Values of the task's recipe: steps=500."),
    ] = None,
    model: Annotated[Model, typer.Option(help="What keeps track of it.")] = "rlt1",
    seeds: Annotated[str, typer.Option(help="Comma-separated.")] = "0,1,2",
    supervise: Annotated[
        Literal["every", "final"],
        typer.Option(
            help="The state after every operation is to be predicted, or the last one; of mod5 and "
            "addition all that there is."
        ),
    ] = "every",
    lengths: Annotated[
        str | None, typer.Option(help="Of programs tested by, comma-separated [default: recipe's].")
    ] = None,
    programs: Annotated[int, typer.Option(min=1, help="Tested by, of each length.")] = 2048,
    target: Annotated[
        float | None,
        typer.Option(
            min=0, max=1, help="Exit with 1 where a seed's final-state accuracy is below."
        ),
    ] = None,
    target_length: Annotated[
        int | None, typer.Option(help="At which length [default: the longest].")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="A row a line.")] = False,
) -> None:
    """Train a small model on short programs, and test it by longer ones.

    A program is a row of operations, and the model says after each which state they have led to:
    parity (of bits), five_state (two operations on five states), s5_swaps and s5 (the permutation
    that swaps, or any of 120, have led to). mod5: the value of an expression modulo 5, with or
    without brackets, after its end. addition: `a+b=c`, digit by digit.

    Models are of as many parameters: rlt1 (feedback of every state), rlt2 (of every fourth), rlt0
    (none), token (of the previous token's embedding instead), transformer, gru. Those with feedback
    are tested with the feedback cut (alpha 0), too, and with attention back to a program's start.

    Each seed is a run of its own, trained by `rlt-dist train` on one thread, twice as many at once
    as there are cores. Seeds differ in initial weights and in the order of the same programs. The
    same command goes on with what was broken off, and leaves alone what is
    done. Results of all runs in OUTPUT are written there together.

    Shown over seeds: mean, standard deviation, minimum and maximum of the share of programs whose
    final state is right (addition: whose answer is, decoded greedily); the means of the share of
    right states and of programs without a wrong one.

    Exit status: 0; 1 the target was missed, or what may pass, such as a killed run; 2 a mistake; 75
    stopped in training, 130 interrupted outside it: the same command goes on.

    Examples:

    `rlt-dist experiment state-tracking --task parity --output runs/states --target 0.999
    --target-length 128`

    `rlt-dist experiment state-tracking --task s5 --model gru --output runs/states steps=4000`
    """
    from rlt_dist.cli.training_bars import training_bars
    from rlt_dist.experiments.state_tracking.recipes import recipe_of
    from rlt_dist.experiments.state_tracking.results import headline, write_results
    from rlt_dist.experiments.state_tracking.run import Experiment, run_experiment

    recipe = recipe_of(task, changes or [])
    experiment = Experiment(
        task=task,
        model=model,
        seeds=parse_numbers("seeds", seeds, 0),
        output=output,
        recipe=recipe,
        every=supervise == "every",
        lengths=recipe.tested if lengths is None else parse_numbers("lengths", lengths, 1),
        programs=programs,
    )
    compared = max(experiment.lengths) if target_length is None else target_length
    if compared not in experiment.lengths:
        raise UserError(f"--target-length {compared} is none of the lengths tested by")
    with training_bars() as watch:
        rows = run_experiment(experiment, watch, lambda line: typer.echo(line, err=True))
    if rows is None:
        raise typer.Exit(STATUS["stopped"])
    write_results(output)
    _show(experiment, rows, as_json=as_json)
    asked = [row for row in rows if row["length"] == compared and not row["cut"]]
    if target is not None and min(map(headline, asked)) < target:
        raise typer.Exit(1)


def _show(experiment: "Experiment", rows: Sequence[dict[str, Any]], *, as_json: bool) -> None:
    from rich import box
    from rich.table import Table

    from rlt_dist.cli.console import console
    from rlt_dist.experiments.state_tracking.results import summaries
    from rlt_dist.util.records import to_json

    if as_json:
        for row in rows:
            typer.echo(to_json(row))
        return
    one = rows[0]
    typer.echo(
        f"{experiment.task}, {experiment.model}, {one['supervised']} state supervised, "
        f"{len(experiment.seeds)} seeds: {one['parameters']:,} parameters, "
        f"{one['tokens']:,} tokens, {one['trained_on']:,} programs read, {one['flops']:.2e} FLOPs"
    )
    table = Table(box=box.SIMPLE)
    for name in ("length", "", "mean", "spread", "min", "max", "states right", "none wrong"):
        table.add_column(name, justify="right")
    for each in summaries(rows):
        shares = (each.mean, each.spread, each.least, each.most, each.prefix, each.whole)
        cut = "feedback cut" if each.cut else ""
        table.add_row(f"{each.length:,}", cut, *(f"{100 * share:.2f}" for share in shares))
    console().print(table)
    typer.echo(f"in percent; rows and plots are in {experiment.output}")
