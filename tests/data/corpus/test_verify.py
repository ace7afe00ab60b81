"""`rlt-dist data verify`: whole corpora pass, each damaged shard is one line."""

import io
import json
import re
import tarfile
from collections.abc import Callable
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from rlt_dist.cli.data import data_app
from rlt_dist.data.corpus.index import CorpusIndex
from rlt_dist.data.tokenizers.base import content_hash
from rlt_dist.util.errors import UserError
from rlt_dist.util.files import sha256_file


def verify(folder: Path) -> Result:
    return CliRunner().invoke(data_app, ["verify", str(folder)])


def test_a_whole_corpus_passes(copy: Path, corpus: CorpusIndex) -> None:
    result = verify(copy)
    shards = sum(len(split.shards) for split in corpus.splits.values())
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.output == f"{copy}: all {shards} shards are whole\n"


def test_every_damaged_shard_is_one_line(copy: Path, flip: Callable) -> None:
    flip(copy / "train-000000.tar", 700)
    flip(copy / "train-000002.npy", -1)
    (copy / "test-000000.tar").unlink()
    result = verify(copy)
    assert result.exit_code == 1
    *lines, last = result.output.splitlines()
    assert [line.removeprefix(f"{copy}/").split(";")[0] for line in lines] == [
        "train-000000.tar: is damaged, its SHA-256 is not the index's",
        "train-000002.npy: is damaged, its SHA-256 is not the index's",
        "test-000000.tar: this shard file is missing",
    ]
    assert "3 of" in last


def write_index(folder: Path, content: dict) -> None:
    """Another index, whose hash is right."""
    content["hash"] = content_hash(content)
    (folder / "index.json").write_text(json.dumps(content))


def swap_splits(folder: Path) -> None:
    index = json.loads((folder / "index.json").read_bytes())
    splits = index["splits"]
    splits["train"], splits["test"] = splits["test"], splits["train"]
    (folder / "index.json").write_text(json.dumps(index))


def replace(name: str, old: str, new: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new, 1))

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (swap_splits, "index.json: is damaged, its hash does not match"),
        (replace("index.json", '"validation"', '"validatiom"'), "index.json: is damaged, its hash"),
        (replace("index.json", '"hidden_files": 0', '"hidden_files": 1'), "index.json: is damaged"),
        (
            replace("sources.json", "/0007.txt", "/0070.txt"),
            "sources.json: is damaged, its SHA-256",
        ),
        (lambda folder: (folder / "sources.json").unlink(), "sources.json: no such file"),
    ],
)
def test_a_change_beside_the_shards_is_seen(
    copy: Path, change: Callable[[Path], None], words: str
) -> None:
    change(copy)
    result = verify(copy)
    assert result.exit_code == 1
    assert words in str(result.exception)


Members = list[tuple[tarfile.TarInfo, bytes]]


def rewrite(folder: Path, name: str, change: Callable[[Members], None]) -> None:
    """Change a shard's members as only its writer could: sidecar and index agree with the tar."""
    tar, sidecar = folder / f"{name}.tar", folder / f"{name}.npy"
    with tarfile.open(tar) as old:
        members = [(member, old.extractfile(member).read()) for member in old]
    change(members)
    with tarfile.open(tar, "w", format=tarfile.USTAR_FORMAT) as new:
        for member, content in members:
            new.addfile(member, io.BytesIO(content))
    documents = np.load(sidecar)
    documents["checksum"] = [crc32(content[128:]) for _, content in members[: len(documents)]]
    np.save(sidecar, documents)
    index = json.loads((folder / "index.json").read_bytes())
    entry = next(e for shards in index["splits"].values() for e in shards if e["name"] == name)
    for key, path in (("tar", tar), ("sidecar", sidecar)):
        entry |= {f"{key}_size": path.stat().st_size, f"{key}_sha256": sha256_file(path)}
    write_index(folder, index)


def set_tokens(tokens: Callable[[int], list[int]]) -> Callable[[Members], None]:
    """Other tokens in the first document, as many as it has."""

    def change(members: Members) -> None:
        member, content = members[0]
        length = len(content[128:]) // 2
        members[0] = (member, content[:128] + np.array(tokens(length), "<u2").tobytes())

    return change


def set_header(old: bytes, new: bytes) -> Callable[[Members], None]:
    """Another NumPy header before the same bytes of the third document."""

    def change(members: Members) -> None:
        member, content = members[2]
        assert content.count(old) == 1
        members[2] = (member, content.replace(old, new))

    return change


def rename(member: int, name: str) -> Callable[[Members], None]:
    return lambda members: setattr(members[member][0], "name", name)


def add_member(members: Members) -> None:
    extra = tarfile.TarInfo("9999999999.npy")
    extra.size = members[0][0].size
    members.append((extra, members[0][1]))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (set_tokens(lambda n: [65] * n), "document 0 does not end with the end-of-text token 256"),
        (set_tokens(lambda n: [300] * (n - 1) + [256]), "document 0 holds token 300, the vocabul"),
        (set_tokens(lambda n: [256] * n), r"document 0 decodes to 0 bytes of text, it had \d+"),
        (set_header(b"<u2", b"<i2"), "document 2 is another one to a plain reader of tars"),
        (set_header(b"<u2", b">u2"), "document 2 is another one to a plain reader of tars"),
        (set_header(b"NUMPY", b"NUMPI"), "a plain reader of tars stops at it "),
        (rename(1, "0000000000.npy"), "document 1 is no member where the sidecar says"),
        (add_member, "the sidecar knows nothing of its member 9999999999.npy"),
    ],
)
def test_documents_are_read_even_where_the_hash_is_right(
    copy: Path, change: Callable[[Members], None], said: str
) -> None:
    """By position and by a plain reader of tars: training and webdataset see the same."""
    rewrite(copy, "train-000000", change)
    result = verify(copy)
    assert result.exit_code == 1, result.output
    assert re.search(rf"train-000000.tar: {said}", result.output.splitlines()[0]), result.output
    assert "1 of" in result.output.splitlines()[1]


def test_a_folder_without_a_corpus_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"index.json: no such file"):
        CliRunner().invoke(data_app, ["verify", str(tmp_path)], catch_exceptions=False)


def test_a_terminal_is_shown_a_bar(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    result = verify(copy)
    assert "verifying" in result.stderr
    assert "shards are whole" in result.stdout
