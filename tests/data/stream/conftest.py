"""Readings of small corpora, and all of a lane as one array."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from rlt_dist.data.corpus.index import CorpusIndex
from rlt_dist.data.stream.loader import Batch
from rlt_dist.data.stream.mixture import Share
from rlt_dist.data.stream.reading import Reading

SEED = 9


@pytest.fixture(scope="session")
def reading_of() -> Callable[..., Reading]:
    """`reading_of(corpora, weights, lanes=, segment=)`: of their train splits."""

    def make(
        corpora: Sequence[CorpusIndex],
        weights: Sequence[int],
        lanes: int,
        segment: int,
        **more: Any,
    ) -> Reading:
        pairs = zip(corpora, weights, strict=True)
        mixture = tuple(Share(corpus.split("train"), weight) for corpus, weight in pairs)
        return Reading(mixture, lanes, segment, SEED, **more)

    return make


@pytest.fixture(scope="session")
def assert_same() -> Callable[[Sequence[Batch], Sequence[Batch]], None]:
    """`assert_same(batches, others)`: batches that share the lanes between them hold the same."""

    def check(ones: Sequence[Batch], others: Sequence[Batch]) -> None:
        for name in vars(ones[0]):
            one, other = (torch.cat([getattr(b, name) for b in side]) for side in (ones, others))
            assert torch.equal(one, other), name

    return check
