"""`rlt-dist data stats`: how many documents there are, and how long they are."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rlt_dist.data.corpus.index import SplitIndex
    from rlt_dist.data.corpus.lengths import Lengths

CorpusPath = Annotated[
    str, typer.Argument(metavar="CORPUS", help="A prepared corpus: its folder or address.")
]
_QUANTILES = (0.1, 0.5, 0.9, 0.99)
_BAR = 40


def stats(
    corpus: CorpusPath,
    split: Annotated[
        list[str] | None, typer.Option(help="One of the splits; repeat for more [default: all].")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Also draw the lengths, into this PNG or SVG file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One object a line.")] = False,
) -> None:
    """Count documents and tokens, and show how long the documents are.

    Lengths are in tokens, end-of-text included. Bars show how the tokens are spread over documents
    of each length.

    Example: `rlt-dist data stats corpora/books --plot lengths.png`
    """
    from rlt_dist.data.corpus.index import load_corpus
    from rlt_dist.data.corpus.lengths import lengths_of
    from rlt_dist.util.records import to_json

    index = load_corpus(corpus)
    splits = [index.split(name) for name in split or index.splits]
    lengths = {each.name: lengths_of(each) for each in splits}
    for each in splits:
        facts = _facts(each, lengths[each.name])
        if as_json:
            bins = [vars(each) for each in lengths[each.name].by_powers()]
            typer.echo(to_json(facts | {"bins": bins}))
        else:
            _show(facts, lengths[each.name])
    if plot is not None:
        from rlt_dist.study.lengths import draw_lengths

        draw_lengths(lengths, index.location, plot)


def _facts(split: "SplitIndex", lengths: "Lengths") -> dict[str, Any]:
    facts = {"split": split.name, "shards": len(split.shards), "documents": split.documents}
    facts |= {"tokens": split.tokens, "bytes": split.bytes, "mean": lengths.mean}
    facts |= {f"p{share * 100:g}": lengths.quantile(share) for share in _QUANTILES}
    return facts | {"longest": int(lengths.values[-1])}


def _show(facts: dict[str, Any], lengths: "Lengths") -> None:
    from rich.table import Table

    from rlt_dist.cli.console import console

    shown = dict(facts)
    typer.echo(
        f"{shown.pop('split')}: {shown.pop('documents'):,} documents, {shown.pop('tokens'):,} "
        f"tokens, {shown.pop('bytes'):,} bytes in {shown.pop('shards'):,} shards"
    )
    typer.echo("  ".join(f"{name} {value:,.6g}" for name, value in shown.items()))
    table = Table()
    for heading in ("length", "documents", "tokens"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("share of tokens", no_wrap=True)
    for each in lengths.by_powers():
        share = each.tokens / lengths.tokens
        bar = "█" * round(share * _BAR)
        table.add_row(
            f"{each.least:,}+", f"{each.documents:,}", f"{each.tokens:,}", f"{share:6.1%} {bar}"
        )
    console(width=120).print(table)
