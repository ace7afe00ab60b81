"""A shard gives exactly what was written, or one error that names it."""

import json
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from io import FileIO
from pathlib import Path

import numpy as np
import pytest
import webdataset as wds
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlt_dist.data.corpus import shard as shard_module
from rlt_dist.data.corpus.index import CorpusIndex, load_corpus
from rlt_dist.data.corpus.shard import DOCUMENT, Shard
from rlt_dist.data.tokenizers.base import content_hash
from rlt_dist.util.errors import UserError

ONE = "train-000001"


@pytest.fixture
def shard(copy: Path) -> Shard:
    """The second shard of a corpus that a test may damage."""
    return load_corpus(copy).split("train").shards[1]


def read_all(shard: Shard) -> list[list[int]]:
    return [tokens.tolist() for tokens in shard.read(0, shard.entry.documents)]


def plain(shard: Shard) -> list[np.ndarray]:
    """The documents by plain webdataset: what a shard is held to."""
    return [sample["npy"] for sample in wds.WebDataset(shard.address, shardshuffle=False).decode()]


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), block=st.sampled_from([1, 700, 5000, 1 << 18]))
def test_any_documents_are_read_as_plain_webdataset_reads_them(
    corpus: CorpusIndex, monkeypatch: pytest.MonkeyPatch, data: st.DataObject, block: int
) -> None:
    shard = data.draw(st.sampled_from(corpus.split("train").shards))
    first = data.draw(st.integers(0, shard.entry.documents))
    last = data.draw(st.integers(first, shard.entry.documents))
    monkeypatch.setattr(shard_module, "_BLOCK", block)
    read, expected = list(shard.read(first, last)), plain(shard)[first:last]
    assert len(read) == len(expected) == last - first
    for one, two in zip(read, expected, strict=True):
        assert one.dtype == two.dtype == np.uint16
        assert not one.flags.writeable
        np.testing.assert_array_equal(one, two)


def test_another_process_gets_a_shard_without_its_sidecar(corpus: CorpusIndex) -> None:
    shard = corpus.split("train").shards[0]
    before = len(pickle.dumps(shard))
    expected = read_all(shard)
    assert len(pickle.dumps(shard)) == before
    assert read_all(pickle.loads(pickle.dumps(shard))) == expected


@settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_a_flipped_byte_is_found_wherever_it_matters(shard: Shard, data: st.DataObject) -> None:
    """In a document's tokens it is found there; anywhere else the tokens read are still right."""
    tar = Path(shard.address)
    whole, expected = tar.read_bytes(), read_all(shard)
    begins = shard.sidecar()["offset"] + 640
    ends = begins + 2 * shard.sidecar()["tokens"]
    inside = data.draw(st.integers(0, len(begins) - 1))
    place = data.draw(
        st.integers(int(begins[inside]), int(ends[inside]) - 1) | st.integers(0, len(whole) - 1)
    )
    damaged = bytearray(whole)
    damaged[place] ^= data.draw(st.integers(1, 255))
    tar.write_bytes(damaged)
    hit = np.flatnonzero((begins <= place) & (place < ends))
    try:
        if not len(hit):
            assert read_all(shard) == expected
        else:
            with pytest.raises(UserError, match=rf"{ONE}.tar: is damaged, document {hit[0]} "):
                read_all(shard)
    finally:
        tar.write_bytes(whole)


def _cut(file: Path) -> None:
    os.truncate(file, 1000)


def _swap(file: Path) -> None:
    """Another shard's content, cut or filled up to the same size."""
    size = file.stat().st_size
    other = file.with_name(file.name.replace("1", "2")).read_bytes()
    file.write_bytes(other[:size].ljust(size, b"\0"))


@pytest.mark.parametrize(
    ("suffix", "damage", "words"),
    [
        ("tar", _cut, r"holds 1000 bytes where the index says \d+; restore it"),
        ("tar", Path.unlink, "this shard file is missing; restore it"),
        ("tar", _swap, "is damaged, document 0 has another checksum than when it was written"),
        ("npy", lambda file: os.truncate(file, 100), "holds 100 bytes where the index says"),
        ("npy", Path.unlink, "this shard file is missing; restore it"),
        ("npy", _swap, "is damaged, its SHA-256 is not the index's; restore it"),
    ],
)
def test_damage_while_a_corpus_is_open_is_one_error_that_names_the_file(
    shard: Shard, suffix: str, damage: Callable[[Path], None], words: str
) -> None:
    damage(Path(shard.address).with_suffix(f".{suffix}"))
    with pytest.raises(UserError, match=rf"{ONE}.{suffix}: {words}"):
        read_all(shard)


def test_any_flipped_byte_of_a_sidecar_is_found(shard: Shard, flip: Callable) -> None:
    sidecar = Path(shard.address).with_suffix(".npy")
    for place in (0, 100, 128, -1):
        flip(sidecar, place)
        with pytest.raises(UserError, match=rf"{ONE}.npy: is damaged, its SHA-256"):
            _ = shard.sidecar()
        flip(sidecar, place)
    assert len(shard.sidecar()) == shard.entry.documents


def _agree(copy: Path, content: bytes) -> Shard:
    """The shard with another sidecar that the index agrees with."""
    (copy / f"{ONE}.npy").write_bytes(content)
    index = json.loads((copy / "index.json").read_bytes())
    index["splits"]["train"][1] |= {
        "sidecar_size": len(content),
        "sidecar_sha256": sha256(content).hexdigest(),
    }
    index["hash"] = content_hash(index)
    (copy / "index.json").write_text(json.dumps(index))
    return load_corpus(copy).split("train").shards[1]


def test_a_sidecar_that_does_not_describe_its_shard_is_found(copy: Path, shard: Shard) -> None:
    whole = (copy / f"{ONE}.npy").read_bytes()
    count = shard.entry.documents
    for content, words in [
        (b"nothing of the kind", "it is no array"),
        (whole[:-1], "it is no array"),
        (whole.replace(b"checksum", b"checkers"), "it does not describe the index's documents"),
        (whole.replace(b"(%d,)" % count, b"(%d,)" % (count - 1)), "it does not describe the index"),
        (_more_tokens(whole), "it does not add up to the index's tokens and bytes"),
    ]:
        with pytest.raises(UserError, match=rf"{ONE}.npy: is damaged, {words}"):
            _ = _agree(copy, content).sidecar()


def _more_tokens(sidecar: bytes) -> bytes:
    head, rows = sidecar[: -DOCUMENT.itemsize], sidecar[-DOCUMENT.itemsize :]
    last = np.frombuffer(rows, DOCUMENT).copy()
    last["tokens"] += 1
    return head + last.tobytes()


def test_another_tokenizers_end_of_text_is_named(shard: Shard) -> None:
    with pytest.raises(UserError, match="document 0 does not end with the end-of-text token 7"):
        read_all(replace(shard, end_of_text=7))


def test_a_system_that_gives_fewer_bytes_than_asked_for_is_asked_again(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As all do beyond 2 GiB at once."""
    expected = read_all(shard)

    class Reluctant(FileIO):
        def read(self, size: int = -1) -> bytes:
            return super().read(min(size, 100) if size > 0 else size)

    monkeypatch.setattr(Path, "open", lambda path, *_, **__: Reluctant(path))
    assert read_all(shard) == expected
