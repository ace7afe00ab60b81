"""How documents' lengths are spread, as a picture."""

from collections.abc import Mapping
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from rlt_dist.data.corpus.lengths import Lengths
from rlt_dist.util.errors import UserError

_PER_DOUBLING = 4


def draw_lengths(splits: Mapping[str, Lengths], title: str, path: Path) -> None:
    """Draw each split's shares of documents and of tokens by length, on a logarithmic axis.

    Raises:
        UserError: the file's suffix names no picture format.
    """
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    for axes, what in zip(figure.subplots(1, 2, sharex=True), ("documents", "tokens"), strict=True):
        for name, lengths in splits.items():
            weights = lengths.counts * (lengths.values if what == "tokens" else 1)
            longest = int(lengths.values[-1]).bit_length()
            edges = [2 ** (k / _PER_DOUBLING) for k in range(longest * _PER_DOUBLING + 1)]
            shares = weights / weights.sum()
            axes.hist(lengths.values, edges, weights=shares, histtype="step", label=name)
        axes.set_xscale("log", base=2)
        axes.yaxis.set_major_formatter(PercentFormatter(1))
        axes.set_xlabel("tokens of a document")
        axes.set_ylabel(f"share of {what}")
    axes.legend()
    figure.suptitle(title)
    try:
        figure.savefig(path)
    except ValueError:
        raise UserError(f"{path}: is no picture's name; let it end in .png or .svg") from None
