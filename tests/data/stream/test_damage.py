"""`skip_bad_shards`: what cannot be read is left out and counted, alike for every reader."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rlt_dist.data.corpus.index import CorpusIndex, SplitIndex, load_corpus
from rlt_dist.data.stream.documents import plan_lanes
from rlt_dist.data.stream.loader import Batch, LaneLoader
from rlt_dist.data.stream.reading import Reading
from rlt_dist.util.errors import UserError

LANES, BAD = 3, 1


@pytest.fixture
def copied(corpus: CorpusIndex, tmp_path: Path) -> CorpusIndex:
    shutil.copytree(corpus.location, tmp_path / "copy")
    return load_corpus(tmp_path / "copy")


def break_document(split: SplitIndex, document: int) -> None:
    """Flip a bit of a document's tokens in shard BAD."""
    shard = split.shards[BAD]
    path = Path(shard.address)
    content = bytearray(path.read_bytes())
    content[int(shard.sidecar()["offset"][document]) + 512 + 128] ^= 1
    path.write_bytes(content)


def expected_of(split: SplitIndex, whole: SplitIndex, seed: int, lane: int, first_bad: int) -> list:
    """A lane's documents of epoch 0; of a span of BAD only those before the first bad one."""
    found = []
    for span in plan_lanes(split, LANES, seed).run(0, lane).spans:
        bad = span.shard == BAD and span.first <= first_bad < span.last
        last = first_bad if bad else span.last
        found += whole.shards[span.shard].read(span.first, last)
    return found


@pytest.mark.parametrize("workers", [0, 2])
def test_the_rest_of_a_bad_shard_is_skipped_and_counted(
    copied: CorpusIndex, corpus: CorpusIndex, reading_of: Callable[..., Reading], workers: int
) -> None:
    split, whole = copied.split("train"), corpus.split("train")
    break_document(split, 3)
    reading = reading_of([copied], [1], lanes=LANES, segment=1, skip_bad_shards=True)
    skipped = 0
    with LaneLoader(reading, range(LANES), workers=workers) as loader:
        lanes = [expected_of(split, whole, reading.seed, lane, 3) for lane in range(LANES)]
        tokens = [np.concatenate(documents) for documents in lanes]
        batches = [loader.next().tokens[:, 0] for _ in range(max(map(len, tokens)))]
        skipped, notices = loader.take_notices()
    for lane, expected in enumerate(tokens):
        got = [int(batch[lane]) for batch in batches[: len(expected)]]
        np.testing.assert_array_equal(got, expected)
    left_out = sum(s.entry.documents for s in whole.shards) - sum(map(len, lanes))
    assert left_out > 0
    assert skipped >= left_out
    assert any("train-000001.tar: is damaged, document 3" in notice for notice in notices)
    assert all(notice.startswith("skipped ") for notice in notices)


def test_resumed_inside_or_behind_a_bad_shard_the_lane_is_the_same(
    copied: CorpusIndex,
    reading_of: Callable[..., Reading],
    assert_same: Callable[[list[Batch], list[Batch]], None],
) -> None:
    break_document(copied.split("train"), 5)
    reading = reading_of([copied], [1], lanes=LANES, segment=7, skip_bad_shards=True)
    through = LaneLoader(reading, range(LANES))
    cursors = None
    for _ in range(150):
        resumed = LaneLoader(reading, range(LANES), cursors=cursors)
        batch = through.next()
        assert_same([batch], [resumed.next()])
        cursors = batch.cursors


def test_a_missing_shard_may_be_skipped(
    copied: CorpusIndex, reading_of: Callable[..., Reading]
) -> None:
    Path(copied.split("train").shards[BAD].address).unlink()
    reading = reading_of([copied], [1], lanes=1, segment=500, skip_bad_shards=True)
    loader = LaneLoader(reading, range(1))
    for _ in range(20):
        loader.next()
    skipped, notices = loader.take_notices()
    assert skipped >= copied.split("train").shards[BAD].entry.documents
    assert "train-000001.tar: this shard file is missing" in notices[0]


def test_where_nothing_can_be_read_it_ends(
    copied: CorpusIndex, reading_of: Callable[..., Reading]
) -> None:
    for shard in copied.split("train").shards:
        Path(shard.address).unlink()
    reading = reading_of([copied], [1], lanes=2, segment=5, skip_bad_shards=True)
    with pytest.raises(UserError, match=r"'train': lane 0 found no readable document"):
        LaneLoader(reading, range(2))
