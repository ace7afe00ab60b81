"""`rlt-dist params`: a table or an object, the vocabulary's two sources, and meshes."""

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def file(configure: Any, tmp_path: Path) -> Path:
    """A configuration whose corpus is there, of 257 ids; untied RLT-1, d 16, 1 + 2 layers."""
    configure(tmp_path)
    return tmp_path / "run.yaml"


def test_the_vocabulary_is_the_corpuss_unless_another_is_given(
    command: Any, file: Path, strict_json: Any
) -> None:
    of_corpus, given = (
        strict_json(command("params", file, "--json", *wish)[1])
        for wish in ([], ["--vocabulary", 1000])
    )
    assert (of_corpus["vocabulary"], given["vocabulary"]) == (257, 1000)
    assert given["parameters"] - of_corpus["parameters"] == 2 * 16 * (1000 - 257)


def test_without_corpus_and_vocabulary_it_says_what_to_give(
    command: Any, is_one_error: Any, file: Path
) -> None:
    is_one_error(command("params", file, "data.path=nowhere"), "nowhere", "give --vocabulary")
    code, out, err = command("params", file, "data.path=nowhere", "--vocabulary", 10)
    assert (code, err) == (0, "")
    assert "vocabulary 10" in out


def test_a_mesh_says_what_the_fullest_ranks_hold_and_what_is_shared(
    command: Any, file: Path, strict_json: Any
) -> None:
    asked = ("params", file, "model.encoder_layers=2", "--mesh", "1x2x2")
    found = strict_json(command(*asked, "--json")[1])
    assert found["mesh"] == "1x2x2"
    assert [(rank["stage"], rank["tensor"]) for rank in found["ranks"]] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    assert all(rank["parameters"] == sum(rank["pieces"].values()) for rank in found["ranks"])
    # 257 rows are cut into 129 and 128.
    assert found["ranks"][0]["parameters"] - found["ranks"][1]["parameters"] == 16
    assert found["over_stages"]["memory.0.k.weight"] == [0, 1]
    assert "memory.norm.weight" in found["over_tensor"]
    _, out, _ = command(*asked)
    lines = out.splitlines()
    assert f"{found['parameters']:,}" in out
    assert any(line.split()[-1:] == [f"{found['ranks'][0]['parameters']:,}"] for line in lines)
    assert any(line.startswith("stages 0-1 all hold memory.norm.weight") for line in lines)
    assert "decoder.*.cross_norm.weight" in out


def test_the_configurations_own_mesh_is_taken_where_none_is_given(
    command: Any, file: Path, strict_json: Any
) -> None:
    _, out, _ = command("params", file, "mesh.data=3", "mesh.tensor=2", "--json")
    assert strict_json(out)["mesh"] == "3x1x2"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["--mesh", "2x2"], "write data x pipeline x tensor"),
        (["--mesh", "1x3x1"], "mesh.pipeline 3 exceeds model.encoder_layers 1"),
        (["--mesh", "1x1x4"], "mesh.tensor 4 does not divide model.heads 2"),
        (["--mesh", "1x1x2", "--vocabulary", "1"], "the vocabulary of 1 cannot be cut"),
    ],
)
def test_an_impossible_mesh_is_one_line(
    command: Any, is_one_error: Any, file: Path, asked: list[str], said: str
) -> None:
    is_one_error(command("params", file, *asked), said)
