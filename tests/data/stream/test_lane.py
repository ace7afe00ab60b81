"""A lane's tokens do not depend on how they are cut, nor on where reading was interrupted."""

import io
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import webdataset as wds
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlt_dist.data.corpus.index import CorpusIndex, SplitIndex
from rlt_dist.data.stream.documents import plan_lanes
from rlt_dist.data.stream.lane import LaneStream
from rlt_dist.data.stream.lanes import Cursor
from rlt_dist.data.stream.mixture import Share
from rlt_dist.util.errors import UserError

LANES, SEED = 3, 5
EPOCHS = 3


@pytest.fixture(scope="module")
def split(corpus: CorpusIndex) -> SplitIndex:
    assert len(corpus.split("train").shards) >= 5
    return corpus.split("train")


def plain_lane(split: SplitIndex, lane: int) -> list[np.ndarray]:
    """A lane's documents over some epochs, by plain webdataset: what the stream is held to."""
    shards = []
    for shard in split.shards:
        dataset = wds.WebDataset(shard.address, shardshuffle=False).decode()
        shards.append([sample["npy"].astype(np.int64) for sample in dataset])
    plan = plan_lanes(split, LANES, SEED)
    spans = [span for epoch in range(EPOCHS) for span in plan.run(epoch, lane).spans]
    return [document for s in spans for document in shards[s.shard][s.first : s.last]]


@dataclass
class Segment:
    """What `LaneStream.fill` writes."""

    tokens: np.ndarray
    document_start: np.ndarray
    loss_mask: np.ndarray


class Lane:
    """A stream over one corpus, with new arrays for every segment."""

    def __init__(
        self, split: SplitIndex, lane: int, cursor: Cursor | None = None, **options: object
    ) -> None:
        plans = [plan_lanes(split, LANES, SEED)]
        cursors = None if cursor is None else [cursor]
        self.stream = LaneStream((Share(split, 1),), plans, lane, cursors=cursors, **options)

    @property
    def cursor(self) -> Cursor:
        (cursor,) = self.stream.cursors
        return cursor

    def next_segment(self, length: int) -> Segment:
        segment = Segment(
            np.empty(length + 1, np.int64), np.zeros(length, bool), np.ones(length, bool)
        )
        self.stream.fill(segment.tokens, segment.document_start, segment.loss_mask)
        return segment


open_lane = Lane


def join(segments: list[Segment]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs, document starts and masks of segments; each must overlap the next by one token."""
    for one, two in pairwise(segments):
        assert one.tokens[-1] == two.tokens[0]
    return (
        np.concatenate([segment.tokens[:-1] for segment in segments]),
        np.concatenate([segment.document_start for segment in segments]),
        np.concatenate([segment.loss_mask for segment in segments]),
    )


@pytest.mark.parametrize("lane", range(LANES))
@pytest.mark.parametrize("length", [1, 7, 64, 1000])
def test_lane_is_its_documents_epoch_after_epoch(split: SplitIndex, lane: int, length: int) -> None:
    documents = plain_lane(split, lane)
    expected = np.concatenate(documents)
    stream = open_lane(split, lane)
    count = min(len(expected) // length - 1, 1500)
    tokens, starts, mask = join([stream.next_segment(length) for _ in range(count)])
    ends = np.cumsum([len(document) for document in documents])
    first = np.isin(np.arange(len(tokens)), np.append(0, ends))
    np.testing.assert_array_equal(tokens, expected[: len(tokens)])
    np.testing.assert_array_equal(starts, first)
    np.testing.assert_array_equal(mask, tokens != 256)
    assert stream.cursor.tokens == len(tokens)
    if length > 1:
        assert stream.cursor.epoch >= 1


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    lane=st.integers(0, LANES - 1),
    before=st.integers(0, 9000),
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=6),
    max_document=st.sampled_from([None, 1, 5, 16]),
)
def test_resumed_anywhere_it_goes_on_exactly(
    split: SplitIndex, lane: int, before: int, lengths: list[int], max_document: int | None
) -> None:
    through = open_lane(split, lane, max_document=max_document)
    if before:
        through.next_segment(before)
    cursor = Cursor.from_numbers(through.cursor.to_tuple())
    resumed = open_lane(split, lane, cursor=cursor, max_document=max_document)
    whole = join([through.next_segment(sum(lengths))])
    parts = join([resumed.next_segment(length) for length in lengths])
    for one, two in zip(whole, parts, strict=True):
        np.testing.assert_array_equal(one, two)
    assert resumed.cursor == through.cursor
    assert resumed.cursor.tokens == before + sum(lengths)


def test_cursor_at_an_epochs_border(split: SplitIndex) -> None:
    run = plan_lanes(split, LANES, SEED).run(0, 1)
    tokens = sum(
        int(split.shards[span.shard].sidecar()["tokens"][span.first : span.last].sum())
        for span in run.spans
    )
    stream = open_lane(split, 1)
    assert not stream.next_segment(tokens).loss_mask[-1]
    assert stream.cursor == Cursor(epoch=1, document=0, offset=0, tokens=tokens)
    after = open_lane(split, 1, cursor=stream.cursor)
    assert after.next_segment(1).document_start.all()


def test_a_long_document_is_read_as_several(split: SplitIndex) -> None:
    plain = join([open_lane(split, 0).next_segment(2000)])
    cut = join([open_lane(split, 0, max_document=8).next_segment(2000)])
    np.testing.assert_array_equal(plain[0], cut[0])
    np.testing.assert_array_equal(plain[2], cut[2])
    begins = np.maximum.accumulate(np.where(plain[1], np.arange(2000), 0))
    np.testing.assert_array_equal(cut[1], (np.arange(2000) - begins) % 8 == 0)


def test_a_lane_opens_each_shard_once_and_reads_only_its_documents(
    split: SplitIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Path] = []
    real = Path.open

    def count(path: Path, *rest: object, **options: object) -> io.IOBase:
        opened.append(path)
        return real(path, *rest, **options)

    monkeypatch.setattr(Path, "open", count)
    run = plan_lanes(split, LANES, SEED).run(0, 1)
    stream = open_lane(split, 1)
    while stream.cursor.epoch == 0:
        stream.next_segment(1)
    mine = [Path(split.shards[span.shard].address) for span in run.spans]
    tars = [path for path in opened if path.suffix == ".tar"]
    assert tars[: len(mine)] == mine
    assert len(tars) == len(mine) + 1


@pytest.mark.parametrize("cursor", [Cursor(document=10_000), Cursor(offset=10_000)])
def test_a_cursor_from_elsewhere_is_refused(split: SplitIndex, cursor: Cursor) -> None:
    with pytest.raises(UserError, match=r"lane 2 has no (place|document)"):
        open_lane(split, 2, cursor=cursor)
