"""`skip_bad_shards`: what cannot be read is left out and counted, alike for every reader."""

import errno
import io
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


def test_resumed_in_a_document_that_can_no_longer_be_read_the_next_one_begins(
    copied: CorpusIndex, reading_of: Callable[..., Reading]
) -> None:
    """Its offset is not another document's."""
    reading = reading_of([copied], [1], lanes=LANES, segment=9, skip_bad_shards=True)
    through, inside = LaneLoader(reading, range(LANES)), 0
    batches = [through.next() for _ in range(40)]
    shards = copied.split("train").shards
    plan = plan_lanes(copied.split("train"), LANES, reading.seed)
    for batch in batches:
        for lane in range(LANES):
            epoch, document, offset, tokens = batch.cursors[lane, 0].tolist()
            gone = Path(shards[plan.run(epoch, lane).after(document)[0].shard].address)
            content = gone.read_bytes()
            gone.unlink()
            resumed = LaneLoader(
                reading, range(lane, lane + 1), cursors=batch.cursors[lane : lane + 1]
            )
            after = resumed.next()
            gone.write_bytes(content)
            inside += offset > 0
            assert after.document_start[0, 0]
            assert after.cursors[0, 0, 3] == tokens + 9
            assert resumed.take_notices()[0] > 0
    assert inside > 40


def test_a_lane_whose_run_is_bad_for_some_epochs_goes_on(
    copied: CorpusIndex, reading_of: Callable[..., Reading]
) -> None:
    """As many lanes as there are shards: a run lies in one or two, and all but two are gone."""
    shards = copied.split("train").shards
    for shard in shards[2:]:
        Path(shard.address).unlink()
    lanes = len(shards)
    reading = reading_of([copied], [1], lanes=lanes, segment=40, skip_bad_shards=True)
    loader = LaneLoader(reading, range(lanes))
    epochs = [loader.next().cursors[:, 0, 0] for _ in range(12)]
    assert max(int(e.max()) for e in epochs) > 4


def test_what_is_not_the_shards_fault_is_never_skipped(
    copied: CorpusIndex, reading_of: Callable[..., Reading], monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = reading_of([copied], [1], lanes=LANES, segment=9, skip_bad_shards=True)
    for code, words in [
        (errno.EMFILE, "Too many open files.; allow more open files with `ulimit -n`"),
        (errno.ESTALE, "Stale file handle.; the shard itself may be whole: start again"),
    ]:
        for suffix in (".tar", ".npy"):

            def fail(path: Path, *_: Any, code: int = code, suffix: str = suffix, **__: Any) -> Any:
                if path.suffix == suffix:
                    raise OSError(code, os.strerror(code))
                return io.FileIO(path)

            monkeypatch.setattr(Path, "open", fail)
            with pytest.raises(UserError, match=rf"train-\d+{suffix}: cannot be read \({words}"):
                LaneLoader(reading, range(LANES))


def test_lanes_may_open_as_many_files_as_the_system_lets_them(
    copied: CorpusIndex, reading_of: Callable[..., Reading]
) -> None:
    """Systems begin with a limit of 1024, and each lane of a worker holds a shard open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    now_open = len(list(Path("/proc/self/fd").iterdir()))
    reading = reading_of([copied], [1], lanes=100, segment=9)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (now_open + 9, hard))
        LaneLoader(reading, range(100)).next()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
