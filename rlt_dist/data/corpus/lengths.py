"""How long a split's documents are, in tokens."""

from dataclasses import dataclass

import numpy as np

from rlt_dist.data.corpus.index import SplitIndex


@dataclass(frozen=True, eq=False)
class Lengths:
    """The distinct lengths of documents and how many have each; memory grows with these only.

    Attributes:
        values: int64 [n], ascending, in tokens, end-of-text included.
        counts: int64 [n], documents.
    """

    values: np.ndarray
    counts: np.ndarray

    @property
    def documents(self) -> int:
        """Number of documents."""
        return int(self.counts.sum())

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return int(self.values @ self.counts)

    @property
    def mean(self) -> float:
        """Tokens of a document."""
        return self.tokens / self.documents

    def quantile(self, share: float) -> int:
        """The shortest length that at least `share` of the documents do not exceed."""
        reached = np.cumsum(self.counts)
        return int(self.values[np.searchsorted(reached, share * reached[-1])])

    def by_powers(self) -> list["Bin"]:
        """Documents and tokens of lengths from 2^k to 2^(k + 1) - 1, from the shortest on."""
        powers = np.frexp(self.values)[1] - 1
        bins = []
        for power in range(int(powers[0]), int(powers[-1]) + 1):
            here = powers == power
            values, counts = self.values[here], self.counts[here]
            bins.append(Bin(1 << power, int(counts.sum()), int(values @ counts)))
        return bins


@dataclass(frozen=True)
class Bin:
    """Documents of `least` to 2 `least` - 1 tokens: how many, and their tokens together."""

    least: int
    documents: int
    tokens: int


def lengths_of(split: SplitIndex) -> Lengths:
    """The lengths of a split's documents.

    Raises:
        UserError: a sidecar is missing or damaged.
    """
    values, counts = np.empty(0, np.int64), np.empty(0, np.int64)
    for shard in split.shards:
        more, how_many = np.unique(shard.sidecar()["tokens"], return_counts=True)
        values, place = np.unique(np.concatenate([values, more]), return_inverse=True)
        counts = np.bincount(place, np.concatenate([counts, how_many])).astype(np.int64)
    return Lengths(values, counts)
