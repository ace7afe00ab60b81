"""Where the documents of a stream of bytes begin and end."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate

import numpy as np


@dataclass(frozen=True, eq=False)
class Spans:
    """Consecutive documents of a stream.

    Attributes:
        begins: int64 [n], bytes from the stream's start.
        sizes: int64 [n], bytes.
        cut: how many documents among them were too long and are stored as several.
    """

    begins: np.ndarray
    sizes: np.ndarray
    cut: int


def cut_end(text: bytes | bytearray, start: int, longest: int) -> int:
    """Where the piece of `text` that begins at `start` ends, if it may have `longest` bytes.

    After the last newline, else before the last space, else at a character's border (of UTF-8; in
    other text anywhere). No byte further than the one after `longest` plays a part.
    """
    end = start + longest
    if end >= len(text):
        return len(text)
    if (newline := text.rfind(b"\n", start, end)) >= 0:
        return newline + 1
    if (space := text.rfind(b" ", start + 1, end + 1)) >= 0:
        return space
    for border in range(end, max(start, end - 4), -1):
        if text[border] & 0xC0 != 0x80:  # not inside a character
            return border
    return end


def cut_sizes(text: bytes | bytearray, longest: int) -> list[int]:
    """Sizes of the pieces of a document; [0] if it is empty."""
    sizes = []
    start = 0
    while (end := cut_end(text, start, longest)) < len(text):
        sizes.append(end - start)
        start = end
    return [*sizes, end - start]


def find_documents(
    blocks: Iterable[bytes], separator: bytes | None, longest: int
) -> Iterator[Spans]:
    """Cut a stream at its separators (`bytes.split`), and what is longer than `longest` again.

    Of the stream no more than `longest` bytes and one block are held.
    """
    rest = bytearray()  # what belongs to no finished document yet
    place = searched = 0  # where it begins in the stream; where in it a separator may begin
    width = len(separator or b".")
    divided = False  # whether a piece of its document has been given already
    for block in blocks:
        rest += block
        begins: list[int] = []
        sizes: list[int] = []
        cut = start = 0
        while separator and (found := rest.find(separator, searched)) >= 0:
            if found - start > longest:
                cut += not divided
                pieces = cut_sizes(rest[start:found], longest)
                begins += accumulate(pieces[:-1], initial=start)
                sizes += pieces
            else:
                begins.append(start)
                sizes.append(found - start)
            divided = False
            start = searched = found + width
        # A separator may straddle two blocks: its first bytes are searched again.
        searched = max(searched, len(rest) - width + 1)
        while searched - start > longest:
            cut += not divided
            divided = True
            end = cut_end(rest, start, longest)
            begins.append(start)
            sizes.append(end - start)
            start = end
        yield Spans(np.array(begins, np.int64) + place, np.array(sizes, np.int64), cut)
        del rest[:start]
        place += start
        searched -= start
    sizes = cut_sizes(rest, longest)
    yield adjacent(place, sizes, cut=int(len(sizes) > 1 and not divided))


def adjacent(begin: int, sizes: list[int], cut: int) -> Spans:
    """Documents that lie side by side from `begin` on."""
    begins = begin + np.cumsum([0, *sizes[:-1]], dtype=np.int64)
    return Spans(begins[: len(sizes)], np.array(sizes, np.int64), cut)
