"""Where documents go: the fast rule over whole arrays is the plain one, a document at a time."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlt_dist.data.prepare.placement import Turns, place
from rlt_dist.util.errors import UserError

NAMES = ("train", "validation", "test")


def place_plainly(
    sizes: list[int], shares: dict[str, Fraction], shard_bytes: int
) -> dict[str, tuple[list[int], int]]:
    """The rule itself: each shard's ordinals and bytes."""
    counts = {name: 0 for name, share in shares.items() if share}
    number, filled = dict.fromkeys(counts, 0), dict.fromkeys(counts, 0)
    shards: dict[str, tuple[list[int], int]] = {}
    for ordinal, size in enumerate(sizes):
        if size == 0:
            continue
        seen = 1 + sum(counts.values())
        split = max(counts, key=lambda name: shares[name] * seen - counts[name])
        counts[split] += 1
        name = f"{split}-{number[split]:06d}"
        ordinals, total = shards.get(name, ([], 0))
        shards[name] = ([*ordinals, ordinal], total + size)
        filled[split] += size
        if filled[split] >= shard_bytes:
            number[split] += 1
            filled[split] = 0
    return shards


@settings(max_examples=60)
@given(
    sizes=st.lists(st.sampled_from([0, 1, 2, 3, 7, 50]), max_size=120),
    hundredths=st.tuples(st.integers(1, 100), st.integers(0, 100)).filter(lambda h: sum(h) <= 100),
    shard_bytes=st.integers(1, 60),
    parts=st.integers(1, 5),
)
def test_shards_are_those_of_the_plain_rule(
    sizes: list[int], hundredths: tuple[int, int], shard_bytes: int, parts: int
) -> None:
    first, second = hundredths
    whole = dict(zip(NAMES, (first, second, 100 - first - second), strict=True))
    turns = Turns({name: share / 100 for name, share in whole.items()})
    pieces = np.array_split(np.array(sizes, np.int64), parts)
    plans = list(place(pieces, turns, shard_bytes))
    exact = {name: Fraction(share, 100) for name, share in whole.items()}
    assert {plan.name: (plan.ordinals.tolist(), plan.bytes) for plan in plans} == place_plainly(
        sizes, exact, shard_bytes
    )
    filled = {plan.split for plan in plans}
    documents = sum(map(bool, sizes))
    assert turns.empty(documents) == [name for name in turns.splits if name not in filled]


@pytest.mark.parametrize(
    ("shares", "documents"),
    [((0.9, 0.05, 0.05), 20), ((0.9, 0.05, 0.05), 1000), ((0.5, 0.3, 0.2), 77), ((1, 0, 0), 5)],
)
def test_shares_are_exact_at_every_length(shares: tuple[float, ...], documents: int) -> None:
    turns = Turns(dict(zip(NAMES, shares, strict=True)))
    split = turns.of(0, documents)
    for number, name in enumerate(turns.splits):
        share = shares[NAMES.index(name)]
        assert abs((split == number).sum() - share * documents) < 1


def test_shards_are_closed_when_they_are_full() -> None:
    plans = place([np.array([4, 6, 25, 9, 1, 1])], Turns({"train": 1.0}), shard_bytes=10)
    assert [plan.ordinals.tolist() for plan in plans] == [[0, 1], [2], [3, 4], [5]]


@pytest.mark.parametrize(
    ("shares", "words"),
    [
        ({"train": 0.9, "test": 0.2}, "add up to 1"),
        ({"train": 1.5, "test": -0.5}, "at least 0"),
        ({"train": math.nan, "test": 0.1}, "must be numbers from 0 to 1"),
        ({"train": math.inf, "test": 0.1}, "must be numbers from 0 to 1"),
        ({"train": 0.0, "test": 1.0}, "leave something to train"),
        ({"train": 0.9999999, "test": 0.0000001}, "write at most six decimals"),
    ],
)
def test_impossible_shares_are_refused(shares: dict[str, float], words: str) -> None:
    with pytest.raises(UserError, match=words):
        Turns(shares)
