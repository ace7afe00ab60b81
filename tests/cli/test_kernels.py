"""`rlt-dist kernels`: what kernels compile to and what they must do, without a GPU."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

import rlt_dist.cli.kernels
from rlt_dist.ops.triton.build import Built

FIT = Built("product", "sm_90", 40, 0, 1024, "wgmma", 0.5)
UNFIT = Built("large", "sm_90", 255, 96, 4096, "wgmma", 2.0, ("96 bytes a thread do not fit",))


@pytest.fixture
def file(configure: Any, tmp_path: Path) -> Path:
    configure(tmp_path, "rlt1", "train.precision=bfloat16")
    return tmp_path / "run.yaml"


@pytest.fixture
def building(monkeypatch: pytest.MonkeyPatch) -> list[Built]:
    """What is built, in place of all kernels."""
    built: list[Built] = []
    monkeypatch.setattr(rlt_dist.ops.triton.build, "build_all", lambda *_: iter(built))
    return built


def test_kernels_that_fit_are_listed_with_the_shapes(
    command: Any, file: Path, building: list[Built]
) -> None:
    building[:] = [FIT]
    code, out, err = command("kernels", "build", file)
    assert (code, err) == (0, "")
    assert "softmaxes ((257, 16),)" in out
    (line,) = [line.split() for line in out.splitlines() if "product " in line]
    assert line == ["product", "sm_90", "40", "0", "1,024", "wgmma", "0.5", "fit"]


def test_one_that_spills_is_an_exit_status_of_1(
    command: Any, file: Path, building: list[Built], strict_json: Any
) -> None:
    building[:] = [FIT, UNFIT]
    code, out, _ = command("kernels", "build", file, "--json")
    assert code == 1
    found = [strict_json(line) for line in out.splitlines()]
    assert [(one["name"], one["spilled"]) for one in found] == [("product", 0), ("large", 96)]
    assert found[1]["trouble"] == ["96 bytes a thread do not fit"]


def test_a_target_that_is_none_is_named_with_those_that_are(
    command: Any, file: Path, is_one_error: Any
) -> None:
    result = command("kernels", "build", file, "--target", "sm_89")
    is_one_error(result, "--target sm_89 is none of sm_80, sm_90, sm_100, gfx942")


def test_floors_grow_with_the_shapes(command: Any, file: Path, strict_json: Any) -> None:
    def floors(*overrides: str) -> dict[str, float]:
        code, out, _ = command("kernels", "list", file, *overrides, "--json")
        assert code == 0
        records = [strict_json(line) for line in out.splitlines()]
        return {one["name"]: one["microseconds"] for one in records}

    small, large = floors(), floors("model.d_model=64", "model.ffn=96")
    assert small.keys() == large.keys()
    assert all(0 < small[name] < large[name] for name in small)
