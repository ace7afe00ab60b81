"""`rlt-dist eval`: loss, perplexity and bits per byte of held-out text."""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlt_dist.util.errors import UserError

if TYPE_CHECKING:
    from rlt_dist.config.data import DataConfig
    from rlt_dist.inference.evaluate import Evaluation
    from rlt_dist.inference.held_out import Watch


class StateChoice(StrEnum):
    """What a segment starts from."""

    carried = "carried"
    cut = "cut"
    both = "both"


def evaluate(
    run: Annotated[Path, typer.Argument(help="A run folder, or one of its checkpoints.")],
    data: Annotated[
        str | None, typer.Option(help="Corpus folder or address [default: the run's].")
    ] = None,
    split: Annotated[str, typer.Option(help="Which split is read, each document once.")] = "test",
    state: Annotated[
        StateChoice, typer.Option(help="Carried from segment to segment, or cut at each.")
    ] = StateChoice.carried,
    segment: Annotated[
        int | None, typer.Option(min=1, help="Tokens per segment [default: as in training].")
    ] = None,
    lanes: Annotated[int, typer.Option(min=1, help="Streams read side by side.")] = 8,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Stop after about this many tokens.")
    ] = None,
    memory_len: Annotated[
        int | None, typer.Option(min=0, help="Another memory length than in training.")
    ] = None,
    clamp_len: Annotated[
        int | None, typer.Option(min=1, help="Transformer-XL: farthest distinct distance.")
    ] = None,
    same_length: Annotated[
        bool | None, typer.Option(help="Transformer-XL: the same reach for every query.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One object a line.")] = False,
) -> None:
    """Measure a trained model on held-out text.

    Results are also appended to `evaluations.jsonl` in the run folder.

    Example: `rlt-dist eval runs/rlt --split test --state both`
    """
    from rlt_dist.checkpoint.run_folder import EVALUATIONS
    from rlt_dist.inference.held_out import HeldOut, evaluate_split
    from rlt_dist.inference.load import load_trained
    from rlt_dist.util.records import append_record, to_json

    wished = {"memory_len": memory_len, "clamp_len": clamp_len, "same_length": same_length}
    choices = {key: value for key, value in wished.items() if value is not None}
    trained = load_trained(run, choices)
    corpus = data if data is not None else _only_corpus(trained.config.data)
    length = segment if segment is not None else trained.config.data.segment
    states = ["carried", "cut"] if state is StateChoice.both else [state.value]
    records = []
    for kind in states:
        wanted = HeldOut(corpus, split, length, lanes, max_tokens, kind == "carried")
        with _progress(kind) as watch:
            result = evaluate_split(trained, wanted, watch)
        facts = {"step": trained.step, "split": split, "state": kind, "segment": length}
        facts |= {"lanes": lanes, "max_tokens": max_tokens, "data": corpus}
        records.append(facts | choices | _numbers(result))
    lines = [to_json(record) for record in records]
    if as_json:
        print("\n".join(lines))
    else:
        _show(records)
    for line in lines:
        append_record(trained.run_folder / EVALUATIONS, line)


def _only_corpus(data: "DataConfig") -> str:
    if len(data.corpora) > 1:
        paths = ", ".join(corpus.path for corpus in data.corpora)
        raise UserError(f"the run was trained on a mixture; give one with --data: {paths}")
    return data.corpora[0].path


def _numbers(result: "Evaluation") -> dict[str, Any]:
    return {
        "tokens": result.tokens,
        "loss": result.loss,
        "perplexity": result.perplexity,
        "bits_per_byte": result.bits_per_byte,
    }


def _show(records: list[dict[str, Any]]) -> None:
    from rich.table import Table

    from rlt_dist.cli.console import console

    table = Table()
    shown = [name for name in records[0] if name not in ("lanes", "max_tokens", "data")]
    for name in shown:
        table.add_column(name.replace("_", " "), justify="right")
    for record in records:
        table.add_row(*(_format(record[name]) for name in shown))
    console(width=200).print(table)


def _format(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4f}"
    return f"{value:,}" if isinstance(value, int) else "-" if value is None else str(value)


@contextmanager
def _progress(name: str) -> Iterator["Watch"]:
    """A progress bar on a terminal, nothing elsewhere."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"state {name}", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
