"""`rlt-dist bench` on shapes small enough for a test; nothing is asserted about speed."""

import os
from pathlib import Path
from typing import Any

import pytest

from rlt_dist.bench import checkpoint, compare, evaluation, recurrence, transformer_xl
from rlt_dist.bench.compare import FLOOR, Bench, Variant
from rlt_dist.config.model import RltConfig, TransformerXLConfig
from rlt_dist.ops.recurrence import dispatch
from rlt_dist.ops.recurrence.native import build

UNTRIED = ("python", "rlt0")
"""Built as their neighbours are; each variant is a process that imports torch."""
FIELDS = ["bench", "variant", "shape", "threads", "seconds", "ratio", "peak_bytes"]
TO_JUDGE_BY = ["quartiles", "over_floor", "rounds", "disturbance"]
UNCOMPILED = ["reference", "python", "rlt0"]
RLT = RltConfig(
    d_model=16, heads=2, ffn=24, encoder_layers=1, decoder_layers=2, window=3, memory_len=6
)
XL = TransformerXLConfig(d_model=16, heads=2, d_inner=24, layers=2, memory_len=6)
TINY: dict[str, tuple[Bench, Any]] = {
    "recurrence": (recurrence.BENCH, recurrence.RecurrenceShape(RLT, lanes=2, tokens=6)),
    "transformer_xl": (
        transformer_xl.BENCH,
        transformer_xl.TransformerXLShape(XL, vocabulary=40, lanes=2, tokens=6),
    ),
    "evaluation": (
        evaluation.BENCH,
        evaluation.EvaluationShape(
            XL.model_copy(update={"same_length": True}), vocabulary=evaluation.SEGMENT
        ),
    ),
}


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shape named `tiny` in every benchmark."""
    for bench, shape in TINY.values():
        monkeypatch.setitem(bench.shapes, "tiny", shape)


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("name", TINY)
def test_every_variant_is_one_object_a_line(command: Any, strict_json: Any, name: str) -> None:
    bench, _ = TINY[name]
    variants = [v for v in bench.variants if v not in UNTRIED]
    code, out, _ = command(
        *("bench", name, "--shape", "tiny", "--threads", 1, "--seconds", 0, "--json"),
        *(word for variant in variants for word in ("--variant", variant)),
    )
    assert code == 0
    rows = [strict_json(line) for line in out.splitlines()]
    assert [row["variant"] for row in rows] == variants
    for row in rows:
        assert list(row) == FIELDS + TO_JUDGE_BY
        low, high = row["quartiles"]
        assert low <= row["seconds"] <= high
        assert row["rounds"] == 3
        assert (row["bench"], row["shape"], row["threads"]) == (name, "tiny", 1)
        assert row["seconds"] > 0
        if row["variant"] == FLOOR:
            assert row["peak_bytes"] is None
        else:
            assert row["peak_bytes"] >= 0
    of_reference = next(row for row in rows if row["variant"] == bench.reference)
    assert of_reference["ratio"] == 1.0
    for row in rows:
        assert row["ratio"] == pytest.approx(of_reference["seconds"] / row["seconds"])


@pytest.mark.usefixtures("tiny")
def test_people_get_a_table_of_the_chosen_variants(command: Any) -> None:
    code, out, _ = command(
        *("bench", "transformer_xl", "--shape", "tiny", "--seconds", 0, "--threads", 1),
        *("--variant", "ours", "--variant", "floor", "--segments", 3),
    )
    assert code == 0
    assert "transformer_xl tiny, threads: 1" in out
    assert "peak MiB, 3 segments" in out
    assert "ours" in out
    assert "floor" in out
    assert "straightforward" not in out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--shape", "d257"), ("unknown shape 'd257'", "d256, d128, d512")),
        (("--shape", "d256", "--shape", "huge"), ("unknown shape 'huge'", "d256_b16")),
        (("--variant", "cuda"), ("unknown variant 'cuda'", "reference, python, native")),
    ],
)
def test_an_unknown_name_is_one_line_that_lists_the_known(
    command: Any, is_one_error: Any, options: tuple[str, ...], said: tuple[str, ...]
) -> None:
    is_one_error(command("bench", "recurrence", *options), *said)


def test_no_threads_are_refused(command: Any) -> None:
    code, out, err = command("bench", "recurrence", "--threads", 0)
    assert code != 0
    assert out == ""
    assert "--threads" in err


def test_more_threads_than_cores_are_refused(command: Any, is_one_error: Any) -> None:
    cores = len(os.sched_getaffinity(0))
    is_one_error(command("bench", "recurrence", "--threads", 999), "999", f"cores, {cores}")


@pytest.mark.parametrize("mode", [(), ("--json",)])
@pytest.mark.parametrize(("cores", "warned"), [(0.05, False), (1.5, True), (None, False)])
def test_a_busy_machine_is_told_in_both_modes(
    command: Any,
    monkeypatch: pytest.MonkeyPatch,
    mode: tuple[str, ...],
    cores: float | None,
    warned: bool,
) -> None:
    class Seen(compare.Disturbance):
        def __exit__(self, *error: object) -> None:
            self.cores = cores

    monkeypatch.setattr(compare, "Disturbance", Seen)
    monkeypatch.setitem(transformer_xl.BENCH.variants, FLOOR, Variant(lambda _: list))
    options = ("--variant", "floor", "--seconds", 0, "--threads", 1)
    code, out, err = command("bench", "transformer_xl", *options, *mode)
    assert code == 0
    assert out
    assert ("other processes kept 1.5 cores busy" in err) == warned


@pytest.mark.usefixtures("tiny")
def test_what_cannot_be_compiled_is_left_out_unless_it_is_asked_for(
    command: Any,
    is_one_error: Any,
    strict_json: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("CXX", "false")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build.library.cache_clear()
    dispatch._native.cache_clear()
    monkeypatch.setattr(compare, "peak_above_inputs", lambda *_: None)
    bench = ("bench", "recurrence", "--shape", "tiny", "--threads", 1, "--seconds", 0, "--json")
    code, out, err = command(*bench)
    assert code == 0
    assert [strict_json(line)["variant"] for line in out.splitlines()] == UNCOMPILED
    compiled = [name for name in recurrence.BENCH.variants if name not in UNCOMPILED]
    assert f"left out: {', '.join(compiled)}: " in err
    assert "false cannot compile" in err
    assert "exit status 1" in err
    for name in ("native", "core", "floor"):
        is_one_error(command(*bench, "--variant", name), "false cannot compile")


@pytest.mark.parametrize("as_json", [True, False])
def test_saving_is_measured_side_by_side_and_leaves_no_file(
    command: Any, strict_json: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, as_json: bool
) -> None:
    monkeypatch.setitem(checkpoint.MODEL, "d_model", 16)
    options = ("--rounds", 2, "--threads", 1, "--folder", tmp_path)
    code, out, _ = command("bench", "checkpoint", *options, *["--json"] * as_json)
    assert code == 0
    assert not list(tmp_path.iterdir())
    if not as_json:
        assert all(way in out for way in checkpoint.WAYS)
        return
    none, *saving = [strict_json(line) for line in out.splitlines()]
    assert [row["variant"] for row in (none, *saving)] == list(checkpoint.WAYS)
    assert none["interval_ratio"] == 1
    assert none["blocked_share"] is none["bytes"] is None
    for row in saving:
        assert row["blocked_share"] == pytest.approx(row["blocked_seconds"] / none["seconds"])
        assert row["bytes"] > row["tensor_bytes"] > 0
