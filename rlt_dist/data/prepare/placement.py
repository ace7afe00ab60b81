"""Placement: which split and which shard each document goes to, from the documents' sizes alone.

It depends on nothing but the sizes of the documents before, never on their tokens. So a run that
was killed can skip what is committed without tokenising it again, and any number of workers can
each make whole shards.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from rlt_dist.util.errors import UserError
from rlt_dist.util.weights import whole_weights

_LONGEST_PERIOD = 10**6


@dataclass(frozen=True, eq=False)
class Plan:
    """One shard that is to be written.

    Attributes:
        ordinals: its documents' places among all documents, ascending, int64 [documents].
        bytes: of their text.
    """

    split: str
    number: int
    ordinals: np.ndarray
    bytes: int

    @property
    def name(self) -> str:
        """The shard's name, without suffix."""
        return f"{self.split}-{self.number:06d}"


class Turns:
    """The split of each document that holds text.

    It is the split furthest behind its share of the documents, the first such on a tie. Shares are
    fractions of whole numbers, `weight / period`, and after every `period` documents no split is
    behind: how far one lags, `weight * n - period * count`, always stays above -period, is then a
    multiple of it, and the lags sum to 0. So one period says it all.

    Attributes:
        splits: those with a share, in order.
    """

    def __init__(self, shares: Mapping[str, float]) -> None:
        """Raises UserError: the shares are negative, do not add up to 1, or leave out train."""
        weights = {name: weight for name, weight in _whole_weights(shares).items() if weight}
        self.splits = tuple(weights)
        self._period = _one_period(list(weights.values()))

    def of(self, first: int, number: int) -> np.ndarray:
        """Documents `first` to `first + number` of those with text: int8 [number] into `splits`."""
        return self._period[np.arange(first, first + number) % len(self._period)]

    def empty(self, documents: int) -> list[str]:
        """The splits that get none of so many documents with text."""
        filled = self._period[:documents]
        return [name for place, name in enumerate(self.splits) if place not in filled]


def documents_by_split(
    sizes: Iterable[np.ndarray], turns: Turns
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Each split's documents, a part of the corpus at a time: its name, ordinals and sizes.

    Args:
        sizes: bytes of every document, in order, int64 [n] a part; empty documents go nowhere.
    """
    first = seen = 0
    for part in sizes:
        places = np.flatnonzero(part)
        turn = turns.of(seen, len(places))
        for number, split in enumerate(turns.splits):
            mine = places[turn == number]
            yield split, first + mine, part[mine]
        first += len(part)
        seen += len(places)


def place(sizes: Iterable[np.ndarray], turns: Turns, shard_bytes: int) -> Iterator[Plan]:
    """All shards, in the order in which they fill up.

    A shard is closed by the document with which its text reaches `shard_bytes`. In memory are the
    ordinals of one part of the corpus and of the shards still open.
    """
    shards = {name: _Filling(name, shard_bytes) for name in turns.splits}
    for split, ordinals, part in documents_by_split(sizes, turns):
        yield from shards[split].add(ordinals, part)
    for filling in shards.values():
        yield from filling.finish()


class _Filling:
    """One split's shard that is still open."""

    def __init__(self, split: str, shard_bytes: int) -> None:
        self._split = split
        self._shard_bytes = shard_bytes
        self._number = 0
        self._ordinals: list[np.ndarray] = []
        self._bytes = 0

    def add(self, ordinals: np.ndarray, sizes: np.ndarray) -> Iterator[Plan]:
        """Put in more documents; gives the shards that they fill."""
        ends = self._bytes + np.cumsum(sizes)
        start, before = 0, 0
        while (last := int(np.searchsorted(ends, before + self._shard_bytes))) < len(ends):
            self._ordinals.append(ordinals[start : last + 1])
            self._bytes = int(ends[last]) - before
            yield self._close()
            start, before = last + 1, int(ends[last])
        if start < len(ends):
            self._ordinals.append(ordinals[start:])
            self._bytes = int(ends[-1]) - before

    def finish(self) -> Iterator[Plan]:
        """The last shard, if anything is in it."""
        if self._ordinals:
            yield self._close()

    def _close(self) -> Plan:
        plan = Plan(self._split, self._number, np.concatenate(self._ordinals), self._bytes)
        self._number += 1
        self._ordinals, self._bytes = [], 0
        return plan


def _one_period(weights: list[int]) -> np.ndarray:
    total = sum(weights)
    counts = [0] * len(weights)
    splits = np.empty(total, np.int8)
    for seen in range(total):
        # Whole numbers: the shares stay exact.
        lags = [
            weight * (seen + 1) - count * total
            for weight, count in zip(weights, counts, strict=True)
        ]
        splits[seen] = split = lags.index(max(lags))
        counts[split] += 1
    return splits


def _whole_weights(shares: Mapping[str, float]) -> dict[str, int]:
    """The smallest whole numbers in the proportions of decimal shares."""
    shown = ", ".join(f"{name} {share}" for name, share in shares.items())
    if not all(map(math.isfinite, shares.values())):
        raise UserError(f"the splits' shares ({shown}) must be numbers from 0 to 1")
    exact = [Fraction(str(share)) for share in shares.values()]
    if sum(exact) != 1 or min(exact) < 0:
        raise UserError(f"the splits' shares ({shown}) must be at least 0 and add up to 1")
    if not shares.get("train"):
        raise UserError(f"the splits' shares ({shown}) must leave something to train")
    weights = dict(zip(shares, whole_weights(list(shares.values())), strict=True))
    if sum(weights.values()) > _LONGEST_PERIOD:
        raise UserError(f"the splits' shares ({shown}) are too fine; write at most six decimals")
    return weights
