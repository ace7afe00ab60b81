"""Mixtures: weights are kept, each corpus is read once an epoch of its own, resumption is exact."""

from collections import Counter
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlt_dist.data.corpus.index import CorpusIndex
from rlt_dist.data.stream.documents import plan_lanes
from rlt_dist.data.stream.lane import LaneStream
from rlt_dist.data.stream.lanes import Cursor
from rlt_dist.data.stream.mixture import Mixture, Share, furthest_behind
from rlt_dist.util.weights import whole_weights

LANES, SEED, END = 2, 4, 256


@pytest.fixture(scope="module")
def corpora(make_corpus: Callable[..., CorpusIndex]) -> list[CorpusIndex]:
    """Three of different sizes; a document says by its first bytes which it is."""
    return [
        make_corpus(documents, begin=begin)
        for documents, begin in ((60, 0), (25, 1000), (40, 5000))
    ]


def mixture_of(corpora: list[CorpusIndex], weights: tuple[int, ...]) -> Mixture:
    pairs = zip(corpora, weights, strict=True)
    return tuple(Share(corpus.split("train"), weight) for corpus, weight in pairs)


def open_lane(mixture: Mixture, lane: int, cursors: list[Cursor] | None = None) -> LaneStream:
    plans = [plan_lanes(share.split, LANES, SEED) for share in mixture]
    return LaneStream(mixture, plans, lane, cursors=cursors)


def read(stream: LaneStream, length: int) -> np.ndarray:
    tokens = np.empty(length + 1, np.int64)
    stream.fill(tokens, np.zeros(length, bool), np.ones(length, bool))
    return tokens[:-1]


def plain_lane(mixture: Mixture, lane: int, length: int) -> np.ndarray:
    """The rule in its plainest words: fractions, lists, whole documents."""
    queues, read_of, found = [], [0] * len(mixture), []
    for share in mixture:
        plan = plan_lanes(share.split, LANES, SEED)
        spans = [span for epoch in range(40) for span in plan.run(epoch, lane).spans]
        queues.append(
            [d for s in spans for d in share.split.shards[s.shard].read(s.first, s.last)][::-1]
        )
    weights = [Fraction(s.weight, sum(s.weight for s in mixture)) for s in mixture]
    while sum(read_of) < length:
        behind = [weight * sum(read_of) - n for weight, n in zip(weights, read_of, strict=True)]
        corpus = behind.index(max(behind))
        document = queues[corpus].pop()
        read_of[corpus] += len(document)
        found.append(document)
    return np.concatenate(found)[:length]


@pytest.mark.parametrize("weights", [(1, 1, 1), (5, 1, 3), (1, 9, 1)])
@pytest.mark.parametrize("lane", range(LANES))
def test_at_a_documents_end_the_corpus_furthest_behind_comes_next(
    corpora: list[CorpusIndex], weights: tuple[int, ...], lane: int
) -> None:
    mixture = mixture_of(corpora, weights)
    np.testing.assert_array_equal(
        read(open_lane(mixture, lane), 6000), plain_lane(mixture, lane, 6000)
    )


@settings(max_examples=40)
@given(
    before=st.integers(0, 5000),
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=5),
    lane=st.integers(0, LANES - 1),
)
def test_a_mixture_resumes_anywhere(
    corpora: list[CorpusIndex], before: int, lengths: list[int], lane: int
) -> None:
    mixture = mixture_of(corpora, (3, 1, 2))
    through = open_lane(mixture, lane)
    read(through, before)
    resumed = open_lane(mixture, lane, through.cursors)
    assert resumed.cursors == through.cursors
    parts = [read(resumed, length) for length in lengths]
    np.testing.assert_array_equal(read(through, sum(lengths)), np.concatenate(parts))
    assert resumed.cursors == through.cursors
    assert sum(cursor.tokens for cursor in resumed.cursors) == before + sum(lengths)


def test_every_corpus_is_read_once_an_epoch_of_its_own(corpora: list[CorpusIndex]) -> None:
    mixture = mixture_of(corpora, (1, 1, 1))
    seen = [Counter() for _ in mixture]
    known = [documents(share) for share in mixture]
    for lane in range(LANES):
        stream = open_lane(mixture, lane)
        runs = [plan_lanes(share.split, LANES, SEED).run(0, lane).documents for share in mixture]
        open_runs = set(range(len(mixture)))
        while open_runs:
            text = read_document(stream)
            corpus = next(c for c, of in enumerate(known) if text in of)
            if corpus in open_runs:
                seen[corpus][text] += 1
                runs[corpus] -= 1
                if not runs[corpus]:
                    open_runs.remove(corpus)
    assert [dict(counter) for counter in seen] == [dict.fromkeys(of, 1) for of in known]


def documents(share: Share) -> list[bytes]:
    shards = share.split.shards
    return [d.tobytes() for shard in shards for d in shard.read(0, shard.entry.documents)]


def read_document(stream: LaneStream) -> bytes:
    found = [int(read(stream, 1)[0])]
    while found[-1] != END:
        found.append(int(read(stream, 1)[0]))
    return np.array(found, "<u2").tobytes()


@pytest.mark.parametrize("weights", [(1, 1), (9, 1), (0.7, 0.3), (1, 3, 5)])
def test_weights_are_kept_within_one_percent_after_a_million_tokens(
    weights: tuple[float, ...],
) -> None:
    chance = np.random.default_rng(0)
    whole = whole_weights(weights)
    tokens = [0] * len(weights)
    while sum(tokens) < 1_000_000:
        corpus = furthest_behind(whole, tokens)
        tokens[corpus] += int(chance.integers(1, 200 + 4000 * corpus))
    for read_of, weight in zip(tokens, weights, strict=True):
        assert read_of / sum(tokens) == pytest.approx(weight / sum(weights), abs=0.01)


def test_weights_are_exact() -> None:
    assert whole_weights([0.1, 0.2, 0.3]) == (1, 2, 3)
    assert whole_weights([1e-9, 1]) == (1, 10**9)
    assert whole_weights([2.0]) == (2,)
