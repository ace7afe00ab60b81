"""`rlt-dist data verify`: whole corpora pass, each damaged shard is one line."""

import io
import json
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from rlt_dist.cli.data import data_app
from rlt_dist.data.corpus.index import CorpusIndex
from rlt_dist.util.errors import UserError
from rlt_dist.util.files import sha256_file


@pytest.fixture
def copy(corpus: CorpusIndex, tmp_path: Path) -> Path:
    """A corpus that a test may damage."""
    return shutil.copytree(corpus.location, tmp_path / "copy")


def verify(folder: Path) -> Result:
    return CliRunner().invoke(data_app, ["verify", str(folder)])


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_a_whole_corpus_passes(copy: Path, corpus: CorpusIndex) -> None:
    result = verify(copy)
    shards = sum(len(split.shards) for split in corpus.splits.values())
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.output == f"{copy}: all {shards} shards are whole\n"


def test_every_damaged_shard_is_one_line(copy: Path) -> None:
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


def set_tokens(folder: Path, name: str, tokens: list[int]) -> None:
    """Replace a shard's first document by other tokens, and make the index agree."""
    tar = folder / f"{name}.tar"
    with tarfile.open(tar) as old:
        members = [(member, old.extractfile(member).read()) for member in old]
    stream = io.BytesIO()
    np.save(stream, np.array(tokens, np.uint16))
    members[0] = (members[0][0], stream.getvalue())
    members[0][0].size = len(stream.getvalue())
    with tarfile.open(tar, "w", format=tarfile.USTAR_FORMAT) as new:
        for member, content in members:
            new.addfile(member, io.BytesIO(content))
    index = json.loads((folder / "index.json").read_bytes())
    entry = next(e for shards in index["splits"].values() for e in shards if e["name"] == name)
    entry |= {"tar_size": tar.stat().st_size, "tar_sha256": sha256_file(tar)}
    (folder / "index.json").write_text(json.dumps(index))


def test_documents_are_read_even_where_the_hash_is_right(copy: Path, corpus: CorpusIndex) -> None:
    length = int(corpus.split("train").shards[0].documents["tokens"][0])
    for tokens, said in [
        ([65] * length, "document 0 does not end with the end-of-text token 256"),
        ([300] * (length - 1) + [256], "document 0 holds token 300"),
        ([256] * length, f"document 0 decodes to 0 bytes of text, it had {length - 1}"),
    ]:
        set_tokens(copy, "train-000000", tokens)
        result = verify(copy)
        assert result.exit_code == 1
        assert f"train-000000.tar: {said}" in result.output.splitlines()[0]


def test_a_folder_without_a_corpus_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"index.json: no such file"):
        CliRunner().invoke(data_app, ["verify", str(tmp_path)], catch_exceptions=False)


def test_a_terminal_is_shown_a_bar(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    result = verify(copy)
    assert "verifying" in result.stderr
    assert "shards are whole" in result.stdout
