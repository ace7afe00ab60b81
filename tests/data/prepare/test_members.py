"""A tar written by whole tables is the tar that tarfile and NumPy write, byte for byte."""

import io
import tarfile
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
import webdataset as wds
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlt_dist.data.prepare.members import tar_end, tar_members


def write_plainly(ordinals: list[int], documents: list[np.ndarray]) -> tuple[bytes, list[int]]:
    """The tar, and where each member begins."""
    stream = io.BytesIO()
    offsets = []
    with tarfile.TarFile(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for ordinal, tokens in zip(ordinals, documents, strict=True):
            content = io.BytesIO()
            np.save(content, tokens)
            member = tarfile.TarInfo(f"{ordinal:010d}.npy")
            member.size = content.tell()
            content.seek(0)
            offsets.append(stream.tell())
            tar.addfile(member, content)
    return stream.getvalue(), offsets


@settings(max_examples=60)
@given(
    documents=st.dictionaries(
        st.integers(0, 10**10 - 1), st.sampled_from([0, 1, 8, 9, 98, 99, 127, 128, 191, 999, 9999])
    ),
    dtype=st.sampled_from(["<u2", "<u4"]),
    labelled=st.booleans(),
)
@example(documents={10**10 - 1: 1_000_000, 7: 0}, dtype="<u2", labelled=False)
@example(documents={10**10 - 1: 1_000_000, 7: 0}, dtype="<u2", labelled=True)
@example(documents={}, dtype="<u2", labelled=False)
def test_the_tar_is_that_of_tarfile(documents: dict[int, int], dtype: str, labelled: bool) -> None:
    ordinals = sorted(documents)
    lengths = np.array([documents[ordinal] for ordinal in ordinals], np.int64)
    nothing = np.iinfo(dtype).max
    chance = np.random.default_rng(0)
    ids = chance.integers(0, 1 << 16, lengths.sum(), dtype=np.int32)
    labels = chance.integers(-1, 1000, lengths.sum()) if labelled else None
    content, table = tar_members(
        np.array(ordinals, np.int64), ids, lengths, 600, np.dtype(dtype), labels
    )
    cuts = np.cumsum(lengths)[:-1]
    expected = [np.append(part, 600).astype(dtype) for part in np.split(ids, cuts)]
    if labels is not None:
        said = np.split(np.where(labels < 0, nothing, labels), cuts)
        rows = [np.append(part, nothing).astype(dtype) for part in said]
        expected = [np.stack(both) for both in zip(expected, rows, strict=True)]
    expected = expected[: len(ordinals)]
    plain, offsets = write_plainly(ordinals, expected)
    assert content.tobytes() + tar_end(len(content)) == plain
    assert table["offset"].tolist() == offsets
    assert table["tokens"].tolist() == [document.shape[-1] for document in expected]
    assert table["checksum"].tolist() == [crc32(document.tobytes()) for document in expected]


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
def test_plain_webdataset_reads_it(tmp_path: Path, dtype: str) -> None:
    lengths = np.array([3, 0, 500], np.int64)
    ids = np.arange(503, dtype=np.int32)
    content, _ = tar_members(np.array([4, 5, 9]), ids, lengths, 600, np.dtype(dtype))
    (tmp_path / "some.tar").write_bytes(content.tobytes() + tar_end(len(content)))
    read = list(wds.WebDataset(str(tmp_path / "some.tar"), shardshuffle=False).decode())
    assert [sample["__key__"] for sample in read] == ["0000000004", "0000000005", "0000000009"]
    assert {sample["npy"].dtype for sample in read} == {np.dtype(dtype)}
    assert [sample["npy"].tolist() for sample in read] == [
        [0, 1, 2, 600],
        [600],
        [*range(3, 503), 600],
    ]
