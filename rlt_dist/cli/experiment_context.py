"""`rlt-dist experiment context`: how far back models make use of text."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from rlt_dist.experiments.context.experiment import Result
    from rlt_dist.experiments.context.passages import Scope


def context(
    output: Annotated[Path, typer.Option(help="Folder of the corpus, the runs and the results.")],
    source: Annotated[
        Path | None,
        typer.Option(
            "--input",
            exists=True,
            help="A corpus, or text to make one of [default: Python's standard library's source].",
        ),
    ] = None,
    models: Annotated[
        str, typer.Option(help="Comma-separated; the group that is compared.")
    ] = "transformer_xl,rlt,transformer",
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of every model.")] = 1000,
    step_size: Annotated[
        int, typer.Option(min=1, help="Tokens from one context length to the next.")
    ] = 32,
    longest: Annotated[
        int, typer.Option(min=2, help="Longest context, a multiple of the step size.")
    ] = 640,
    tokens: Annotated[int, typer.Option(min=10, help="How many tokens are scored.")] = 4096,
    target: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Exit with 1 where Transformer-XL's effective length is below so many times the "
            "plain Transformer's, at any r.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One object a model.")] = False,
) -> None:
    """Measure how far back Transformer-XL, RLT and a plain Transformer make use of text.

    They have as many parameters and are trained on the same text, each in a process with one
    thread, with segments of 64 tokens; those are all that the plain Transformer sees. Shown are the
    relative effective context length of each (Dai et al. 2019, appendix C: how far more context
    still makes the r hardest tokens 1% less perplexing than the group's best with less), and bits
    per byte by tokens of context, and by memory length with the state carried over whole files.

    OUTPUT has results.json, context.csv and context.png. The same command goes on where it was
    stopped, and does again only what is not done. How fast carried memory evaluates against a
    recomputed window is `rlt-dist bench evaluation`.

    Exit status: 0 done; 1 the target is missed, or what may pass, such as a killed run; 2 a
    mistake; 75 stopped in training, 130 interrupted outside it: the same command goes on.

    Example: `rlt-dist experiment context --output runs/context --target 2`
    """
    from rlt_dist.cli.training_bars import training_bars
    from rlt_dist.experiments.context.experiment import Wanted, compare_contexts
    from rlt_dist.experiments.context.report import write_report
    from rlt_dist.util.ending import STATUS
    from rlt_dist.util.records import to_json

    names, scope = _names(models, target), _scope(step_size, longest, tokens)
    with training_bars() as watch:
        wanted = Wanted(output, source, names, steps, scope)
        results = compare_contexts(wanted, watch, lambda line: typer.echo(line, err=True))
    if results is None:
        raise typer.Exit(STATUS["stopped"])
    write_report(results, scope, output)
    if as_json:
        for result in results:
            typer.echo(to_json(result.record(scope)))
    else:
        _show(results, scope)
    if target is not None and not _reached(results, target):
        raise typer.Exit(1)


def _names(models: str, target: float | None) -> list[str]:
    from rlt_dist.experiments.context.contenders import KINDS
    from rlt_dist.util.errors import UserError

    names = list(dict.fromkeys(models.split(",")))
    for name in names:
        if name not in KINDS:
            raise UserError(f"--models {models}: no model {name!r}; take of {', '.join(KINDS)}")
    if target is not None and not {"transformer_xl", "transformer"} <= set(names):
        raise UserError("--target compares transformer_xl with transformer; add them to --models")
    return names


def _scope(step: int, longest: int, tokens: int) -> "Scope":
    from rlt_dist.experiments.context.contenders import SEGMENT
    from rlt_dist.experiments.context.passages import Scope
    from rlt_dist.util.errors import UserError

    if longest % step or longest == step:
        raise UserError(f"--longest {longest} is not several times --step-size {step}")
    if SEGMENT % step:
        raise UserError(f"--step-size {step} does not divide the segment of {SEGMENT} tokens")
    return Scope(step, longest, tokens)


def _reached(results: "Sequence[Result]", target: float) -> bool:
    by_name = {result.contender.name: result.effective for result in results}
    longer, plain = by_name["transformer_xl"], by_name["transformer"]
    return all(longer[r].length >= target * plain[r].length for r in plain)


def _show(results: "Sequence[Result]", scope: "Scope") -> None:
    from rlt_dist.cli.console import console

    shown = console()
    for table in (_lengths(results), _by_context(results, scope), _by_memory(results)):
        shown.print(table)


def _lengths(results: "Sequence[Result]") -> "Table":
    table = _titled("Relative effective context length, tokens", "model")
    for name in ("parameters", "training FLOPs", *(f"r = {r}" for r in results[0].effective)):
        table.add_column(name, justify="right")
    for result in results:
        found = result.effective.values()
        lengths = (f"{'>= ' * each.open_ended}{each.length}" for each in found)
        parameters = f"{result.contender.parameters:,}"
        table.add_row(result.contender.name, parameters, f"{result.training_flops:.3g}", *lengths)
    return table


def _by_context(results: "Sequence[Result]", scope: "Scope") -> "Table":
    table = _titled("Bits per byte by tokens of context", "context", results)
    columns = [result.measured.by_context for result in results]
    for context, *bits in zip(scope.contexts, *columns, strict=True):
        table.add_row(str(context), *(f"{each:.4f}" for each in bits))
    return table


def _by_memory(results: "Sequence[Result]") -> "Table":
    carrying = [result for result in results if result.contender.kind.memories]
    table = _titled("Bits per byte by memory_len, the state carried", "memory_len", carrying)
    columns = [
        dict(zip(each.contender.kind.memories, each.measured.by_memory, strict=True))
        for each in carrying
    ]
    for memory in sorted(set().union(*columns)):
        bits = (f"{column[memory]:.4f}" if memory in column else "-" for column in columns)
        table.add_row(str(memory), *bits)
    return table


def _titled(title: str, first: str, results: "Sequence[Result]" = ()) -> "Table":
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    table.add_column(first)
    for result in results:
        table.add_column(result.contender.name, justify="right")
    return table
