"""`rlt-dist experiment`: what the models can do, shown by training them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from rlt_dist.cli.numbers import parse_numbers

experiment_app = typer.Typer(
    help="Show what the models can do, by training them.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


@experiment_app.command()
def policy(
    output: Annotated[Path, typer.Option(help="Folder of results.json.")],
    seeds: Annotated[str, typer.Option(help="Comma-separated.")] = "0,1,2",
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of each seed.")] = 1000,
    target: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Exit with 1 where a seed's accuracy at 8 bits is below."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One object a line.")] = False,
) -> None:
    """Learn parity from rewards alone, by GRPO, with a small RLT on the step of pretraining.

    A program has 1 to 8 bits; of 8 answers to each, those that are right are rewarded. Shown are
    the mean reward of the answers drawn, and the accuracy of the most likely answer to 512 programs
    of 8 bits, and of more than were ever trained on.

    OUTPUT/results.json keeps all seeds that were learned there, of one number of steps. The same
    command goes on with those that are not done. They are learned one after the other in this
    process, and one that was broken off begins again.

    Exit status: 0 done; 1 the target is missed, or what may pass, such as another process there; 2
    a mistake; 130 interrupted, the same command goes on with the seeds that are not done.

    Example: `rlt-dist experiment policy --output runs/policy --seeds 0,1,2 --target 0.99`
    """
    from rlt_dist.experiments.policy import BITS, learn_policies
    from rlt_dist.util.records import to_json

    def show(record: Mapping[str, Any]) -> None:
        if record["step"] % 100 == 0 and not as_json:
            typer.echo(f"seed {record['seed']}  step {record['step']:5}  {record['reward']:.3f}")

    reached = True
    for found in learn_policies(output, parse_numbers("seeds", seeds, 0), steps, show):
        reached &= target is None or found.accuracy[BITS[-1]] >= target
        accuracy = "  ".join(f"{bits} bits {share:.4f}" for bits, share in found.accuracy.items())
        line = f"seed {found.seed}  accuracy: {accuracy}"
        typer.echo(to_json(found.record) if as_json else line)
    if not reached:
        raise typer.Exit(1)
