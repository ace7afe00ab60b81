"""`rlt-dist verify golden`: exact answers, and a single wrong number is found."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from rlt_dist.inference.golden import relative_error

FOLDER = Path(__file__).parents[1] / "golden"
FILES = sorted(FOLDER.glob("*.safetensors"))


def changed(source: Path, target: Path, name: str, value: float | None) -> Path:
    """A copy with one number of one tensor changed: by a millionth of its size, or to `value`."""
    with safe_open(source, "pt") as file:
        metadata = file.metadata()
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    flat = tensors[name].view(-1)
    place = int(flat.abs().argmax())
    flat[place] = flat[place] * (1 + 1e-6) if value is None else value
    save_file(tensors, target, metadata)
    return target


def test_all_eleven_files_are_met_to_1e_9(command: Any, strict_json: Any) -> None:
    assert len(FILES) == 11
    code, out, _ = command("verify", "golden", *FILES, "--json")
    rows = [strict_json(line) for line in out.splitlines()]
    assert code == 0
    assert [row["file"] for row in rows] == [path.name for path in FILES]
    for row in rows:
        assert row.keys() == {"file", "max_relative_error", "ok"}
        assert row["ok"] is True
        assert 0 <= row["max_relative_error"] <= 1e-9


def test_people_get_one_row_a_file(command: Any) -> None:
    code, out, _ = command("verify", "golden", *FILES[:2])
    lines = out.splitlines()
    assert code == 0
    assert [line.split()[0] for line in lines] == [path.name for path in FILES[:2]]
    assert all(" ok " in line for line in lines)


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("rlt1_tbptt", "logits"),
        ("rlt1_tbptt", "grad.embed.weight"),
        ("rlt1_tbptt", "param.output_norm.weight"),
        ("rlt1_tbptt", "loss"),
        ("txl", "nll"),
        ("txl", "param.r_w_bias"),
    ],
)
@pytest.mark.parametrize("value", [None, torch.nan, torch.inf])
def test_one_changed_number_is_found(
    command: Any, tmp_path: Path, file: str, name: str, value: float | None
) -> None:
    good = FOLDER / f"{file}.safetensors"
    bad = changed(good, tmp_path / "bad.safetensors", name, value)
    code, out, _ = command("verify", "golden", good, bad, "--json")
    first, second = (json.loads(line) for line in out.splitlines())
    assert code != 0
    assert (first["ok"], second["ok"]) == (True, False)
    error = second["max_relative_error"]
    assert error is None or error > 1e-9


def test_an_error_beyond_all_numbers_is_json_all_the_same(
    command: Any, strict_json: Any, tmp_path: Path
) -> None:
    bad = changed(FOLDER / "txl.safetensors", tmp_path / "bad.safetensors", "nll", torch.nan)
    _, out, _ = command("verify", "golden", bad, "--json")
    assert strict_json(out)["ok"] is False


def test_a_wrong_file_among_good_ones_is_named(command: Any, tmp_path: Path) -> None:
    source = FOLDER / "rlt0.safetensors"
    bad = changed(source, tmp_path / "bad.safetensors", "logits", None)
    code, out, _ = command("verify", "golden", FILES[0], bad, FILES[1])
    assert code == 1
    assert [("WRONG" in line) for line in out.splitlines()] == [False, True, False]


def test_what_is_no_golden_file_is_one_line(
    command: Any, is_one_error: Any, tmp_path: Path
) -> None:
    noise = tmp_path / "noise.safetensors"
    noise.write_bytes(bytes(range(256)))
    empty = tmp_path / "empty.safetensors"
    empty.write_bytes(b"")
    plain = tmp_path / "plain.safetensors"
    save_file({"x": torch.ones(2)}, plain)
    short = tmp_path / "short.safetensors"
    shutil.copy(FILES[0], short)
    short.write_bytes(short.read_bytes()[:-8])
    for path in (noise, empty, plain, short, tmp_path / "missing", tmp_path):
        is_one_error(command("verify", "golden", path), str(path))


def test_the_error_is_relative_to_the_largest_number_of_the_tensor() -> None:
    x = torch.tensor([1.0, -4.0])
    assert relative_error(x, x) == 0
    assert relative_error(torch.tensor([1.0, -4.2]), x) == pytest.approx(0.05)
    assert relative_error(torch.tensor([1e-8]), torch.tensor([0.0])) == pytest.approx(0.01)
    assert relative_error(torch.tensor([torch.nan, -4.0]), x) == float("inf")
    assert relative_error(torch.ones(3), x) == float("inf")
