"""A bounded sample of a corpus, the same for the same texts, in one pass."""

import hashlib
import heapq
from collections.abc import Iterable, Iterator, Sequence

PASSAGE_BYTES = 1 << 16


def sample(texts: Iterable[bytes], limit: int) -> list[bytes]:
    """Return passages of `texts`, in order, of at most `limit` bytes together.

    Each passage (a text, or part of a long one) draws a number from its place in the corpus; those
    with the smallest numbers stay. So the sample spreads over the corpus, whatever its order.
    """
    kept: list[tuple[int, int, bytes]] = []  # a heap: the largest draw on top
    size = 0
    for place, passage in enumerate(passages(texts)):
        heapq.heappush(kept, (-_draw(place), place, passage))
        size += len(passage)
        while size > limit:
            size -= len(heapq.heappop(kept)[2])
    return [passage for _, _, passage in sorted(kept, key=lambda entry: entry[1])]


def thin(passages: Sequence[bytes], limit: int) -> Sequence[bytes]:
    """Return evenly spaced passages, of about `limit` bytes together."""
    total = sum(map(len, passages))
    return passages[:: max(1, -(-total // limit))]


def passages(texts: Iterable[bytes]) -> Iterator[bytes]:
    """Cut texts into parts of at most PASSAGE_BYTES, after a newline or before a space if any."""
    for text in texts:
        start = 0
        while start < len(text):
            end = _passage_end(text, start)
            yield text[start:end]
            start = end


def _passage_end(text: bytes, start: int) -> int:
    longest = start + PASSAGE_BYTES
    if longest >= len(text):
        return len(text)
    newline = text.rfind(b"\n", start, longest)
    if newline >= 0:
        return newline + 1
    space = text.rfind(b" ", start + 1, longest)
    return space if space >= 0 else longest


def _draw(place: int) -> int:
    digest = hashlib.blake2b(place.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little")
