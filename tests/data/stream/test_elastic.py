"""A lane is the same tokens on any number of ranks and workers, wherever it was interrupted."""

import os
import signal
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlt_dist.data.corpus.index import CorpusIndex
from rlt_dist.data.stream.documents import plan_lanes
from rlt_dist.data.stream.loader import LaneLoader, cursors_at_start, lanes_of_rank
from rlt_dist.data.stream.reading import Reading
from rlt_dist.data.stream.workers import Worker

LANES = 8
END = 256


@pytest.fixture(scope="module")
def corpora(make_corpus: Callable[..., CorpusIndex]) -> dict[tuple[int, int], CorpusIndex]:
    """Corpora by (documents, bytes of a shard)."""
    sizes = [(12, 1), (12, 10_000), (50, 60), (50, 300), (200, 900)]
    return {size: make_corpus(*size, shares={"train": 1.0}) for size in sizes}


def plain_lane(reading: Reading, lane: int, length: int) -> np.ndarray:
    """The first tokens of a lane of one corpus: its documents, put together."""
    (share,) = reading.mixture
    plan = plan_lanes(share.split, reading.lanes, reading.seed)
    found: list[np.ndarray] = []
    epoch = 0
    while sum(map(len, found)) < length:
        for span in plan.run(epoch, lane).spans:
            found += share.split.shards[span.shard].read(span.first, span.last)
        epoch += 1
    return np.concatenate(found)[:length]


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(
    size=st.sampled_from([(12, 1), (12, 10_000), (50, 60), (50, 300), (200, 900)]),
    lanes=st.sampled_from([8, 4]),
    segment=st.sampled_from([1, 13, 64, 400]),
    lives=st.lists(
        st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([0, 0, 1, 4]), st.integers(0, 7)),
        min_size=1,
        max_size=4,
    ),
    kill=st.booleans(),
)
def test_the_concatenated_lane_is_always_the_same(
    corpora: dict[tuple[int, int], CorpusIndex],
    reading_of: Callable[..., Reading],
    size: tuple[int, int],
    lanes: int,
    segment: int,
    lives: list[tuple[int, int, int]],
    kill: bool,
) -> None:
    """`lives`: (ranks, workers of each, batches that are read before it ends)."""
    reading = reading_of([corpora[size]], [1], lanes=lanes, segment=segment)
    cursors = cursors_at_start(lanes, 1)
    found: list[torch.Tensor] = []
    for ranks, workers, batches in lives:
        slices = [lanes_of_rank(lanes, rank, ranks) for rank in range(ranks)]
        loaders = [
            LaneLoader(reading, own, cursors=cursors[list(own)], workers=workers) for own in slices
        ]
        for number in range(batches):
            if kill and number == 1:
                kill_a_worker(loaders)
            parts = [loader.next() for loader in loaders]
            found.append(torch.cat([part.tokens[:, :-1] for part in parts]))
            cursors = torch.cat([part.cursors for part in parts])
        for loader in loaders:
            loader.close()
    length = segment * len(found)
    expected = [plain_lane(reading, lane, length) for lane in range(lanes)] if found else []
    for lane, tokens in enumerate(expected):
        np.testing.assert_array_equal(torch.cat([part[lane] for part in found]).numpy(), tokens)


def kill_a_worker(loaders: list[LaneLoader]) -> None:
    for source in loaders[-1]._sources[:1]:
        if isinstance(source, Worker):
            os.kill(source._process.pid, signal.SIGKILL)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_every_document_is_seen_once_an_epoch_and_again_in_the_next(
    corpora: dict[tuple[int, int], CorpusIndex], reading_of: Callable[..., Reading], ranks: int
) -> None:
    corpus = corpora[200, 900]
    reading = reading_of([corpus], [1], lanes=LANES, segment=1)
    (share,) = reading.mixture
    plan = plan_lanes(share.split, LANES, reading.seed)
    shards = share.split.shards
    everything = Counter(d.tobytes() for s in shards for d in s.read(0, s.entry.documents))
    for epoch in range(3):
        seen: Counter[bytes] = Counter()
        for rank in range(ranks):
            for lane in lanes_of_rank(LANES, rank, ranks):
                seen += documents_of_epoch(reading, lane, epoch, plan.run(epoch, lane).documents)
        assert seen == everything


def documents_of_epoch(reading: Reading, lane: int, epoch: int, documents: int) -> Counter[bytes]:
    start = torch.tensor([[[epoch, 0, 0, 0]]])
    loader = LaneLoader(reading, range(lane, lane + 1), cursors=start)
    found: Counter[bytes] = Counter()
    document: list[int] = []
    while found.total() < documents:
        batch = loader.next()
        document.append(int(batch.tokens[0, 0]))
        if document[-1] == END:
            found[np.array(document, "<u2").tobytes()] += 1
            document = []
    assert batch.cursors[0, 0].tolist()[:3] == [epoch + 1, 0, 0]
    return found


def test_a_rank_never_waits_for_another(
    corpora: dict[tuple[int, int], CorpusIndex], reading_of: Callable[..., Reading]
) -> None:
    """Lanes of very unequal documents go on for ever, each in epochs of its own."""
    reading = reading_of([corpora[12, 1]], [1], lanes=8, segment=100)
    ranks = [LaneLoader(reading, lanes_of_rank(8, rank, 8)) for rank in range(8)]
    for _ in range(20):
        batches = [rank.next() for rank in ranks]
    epochs = {int(batch.cursors[0, 0, 0]) for batch in batches}
    assert len(epochs) > 1
    assert all(int(batch.cursors[0, 0, 3]) == 2000 for batch in batches)
