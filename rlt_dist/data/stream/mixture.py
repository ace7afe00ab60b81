"""Several corpora read as one: which one a lane takes next."""

from collections.abc import Sequence
from dataclasses import dataclass

from rlt_dist.data.corpus.index import SplitIndex


@dataclass(frozen=True, eq=False)
class Share:
    """One corpus of a mixture: a split of it, and its weight, in proportion to the others'."""

    split: SplitIndex
    weight: int


Mixture = tuple[Share, ...]
"""The corpora of a run, in the configuration's order."""


def furthest_behind(weights: Sequence[int], tokens: Sequence[int]) -> int:
    """The corpus furthest behind its weight, in tokens; the first of several.

    A lane asks at every document's end. So its corpora follow from how much it has read of each,
    and from nothing else.

    Args:
        tokens: what the lane has read of each corpus.
    """
    total, whole = sum(tokens), sum(weights)
    # Whole numbers: exact however much has been read.
    behind = [weight * total - read * whole for weight, read in zip(weights, tokens, strict=True)]
    return behind.index(max(behind))
