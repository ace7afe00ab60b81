"""A bounded sample of a corpus, drawn from the documents' sizes before any is read."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

PASSAGE_BYTES = 1 << 16
PASSAGE = np.dtype([("draw", "<u8"), ("document", "<i8"), ("part", "<i8"), ("bytes", "<i8")])
"""Part `part` of a document's text: PASSAGE_BYTES of it, or what is left at its end."""

_PART_BITS = 24


def draw(documents: Iterable[tuple[np.ndarray, np.ndarray]], limit: int) -> np.ndarray:
    """Choose passages of at most `limit` bytes together; the same for the same documents.

    Each passage draws a number from its place in the corpus; those with the smallest numbers are
    chosen, as many as fit. So they spread over the corpus, whatever its order.

    Args:
        documents: ascending ordinals and sizes in bytes, int64 [n] each, a part of the corpus at
            a time. Memory is bounded by one such part and the passages chosen.

    Returns:
        `PASSAGE` [n], in the corpus's order.
    """
    chosen = np.empty(0, PASSAGE)
    bound = np.iinfo(np.uint64).max  # no passage with a larger number can be chosen any more
    for ordinals, sizes in documents:
        more = _passages(ordinals, sizes)
        chosen = np.concatenate([chosen, more[more["draw"] <= bound]])
        if chosen["bytes"].sum() > limit:
            chosen = chosen[np.argsort(chosen["draw"])]
            fitting = int(np.searchsorted(np.cumsum(chosen["bytes"]), limit, side="right"))
            bound = chosen["draw"][fitting]
            chosen = chosen[:fitting]
    return chosen[np.lexsort((chosen["part"], chosen["document"]))]


def read_passages(passages: np.ndarray, texts: Iterable[bytes]) -> Iterator[bytes]:
    """The text of drawn passages; neighbours in a document come as one.

    Args:
        passages: `PASSAGE` [n], in order.
        texts: the whole text of each of their documents, in order.
    """
    _, firsts = np.unique(passages["document"], return_index=True)
    for text, parts in zip(texts, np.split(passages["part"], firsts[1:]), strict=True):
        for run in np.split(parts, np.flatnonzero(np.diff(parts) != 1) + 1):
            yield text[int(run[0]) * PASSAGE_BYTES : int(run[-1] + 1) * PASSAGE_BYTES]


def thin(passages: Sequence[bytes], limit: int) -> Sequence[bytes]:
    """Return evenly spaced passages, of about `limit` bytes together."""
    total = sum(map(len, passages))
    return passages[:: max(1, -(-total // limit))]


def _passages(ordinals: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """All passages of some documents."""
    parts = -(-sizes // PASSAGE_BYTES)
    ends = np.cumsum(parts)
    passages = np.empty(int(ends[-1]) if len(ends) else 0, PASSAGE)
    passages["document"] = np.repeat(ordinals, parts)
    passages["part"] = np.arange(len(passages)) - np.repeat(ends - parts, parts)
    left = np.repeat(sizes, parts) - passages["part"] * PASSAGE_BYTES
    passages["bytes"] = np.minimum(left, PASSAGE_BYTES)
    passages["draw"] = _mix((passages["document"] << _PART_BITS) + passages["part"])
    return passages


def _mix(values: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser (Steele, Lea and Flood 2014): another number for every value."""
    mixed = values.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
