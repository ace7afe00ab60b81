"""Reading for epochs takes no more memory than reading for one."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rlt_dist.data.corpus.index import CorpusIndex
from rlt_dist.data.prepare.inputs import InputOptions
from rlt_dist.data.prepare.prepare import prepare_corpus
from rlt_dist.data.stream.loader import LaneLoader
from rlt_dist.data.stream.reading import Reading
from rlt_dist.data.stream.workers import Worker

LANES, SEGMENT, EPOCHS = 8, 512, 15
MEBIBYTE = 1 << 20


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory, bytes_tokenizer: Path) -> CorpusIndex:
    """4 MiB of text, so 8 MiB of tokens, in 30,000 documents and 16 shards."""
    folder = tmp_path_factory.mktemp("large")
    chance = np.random.default_rng(0)
    lengths = chance.integers(20, 260, 30_000)
    text = b"\n".join(bytes(chance.integers(97, 123, n, np.uint8)) for n in lengths)
    (folder / "text").write_bytes(text)
    return prepare_corpus(
        [folder / "text"],
        folder / "out",
        bytes_tokenizer,
        options=InputOptions(separator="\n"),
        shares={"train": 1.0},
        shard_bytes=MEBIBYTE // 4,
    ).corpus


def test_a_readers_memory_is_flat_over_epochs(
    large: CorpusIndex, reading_of: Callable[..., Reading]
) -> None:
    reading = reading_of([large], [1], lanes=LANES, segment=SEGMENT)
    batches = large.split("train").tokens // (LANES * SEGMENT)
    sizes = []
    with LaneLoader(reading, range(LANES), workers=1) as loader:
        (worker,) = (source for source in loader._sources if isinstance(source, Worker))
        for _ in range(2 * batches):  # what buffers and allocator take once
            loader.next()
        for _ in range(EPOCHS):
            for _ in range(batches):
                batch = loader.next()
            sizes.append(resident_bytes(worker._process.pid))
    assert int(batch.cursors[:, 0, 0].min()) >= EPOCHS + 1
    slope = np.polyfit(range(EPOCHS), sizes, 1)[0]
    # One epoch's tokens are 8 MiB, its sidecars 0.8 MiB.
    assert slope < 0.2 * MEBIBYTE, [size / MEBIBYTE for size in sizes]


def resident_bytes(pid: int) -> int:
    line = next(
        line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "VmRSS" in line
    )
    return int(line.split()[1]) * 1024
