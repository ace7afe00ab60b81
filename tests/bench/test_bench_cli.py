"""`rlt-dist bench` on shapes small enough for a test; nothing is asserted about speed."""

from typing import Any

import pytest

from rlt_dist.bench import evaluation, recurrence, transformer_xl
from rlt_dist.bench.compare import FLOOR, Bench
from rlt_dist.config.model import RltConfig, TransformerXLConfig

UNTRIED = ("python", "rlt0")
"""Built as their neighbours are; each variant is a process that imports torch."""
FIELDS = ["bench", "variant", "shape", "threads", "seconds", "ratio", "peak_bytes"]
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
        assert list(row) == FIELDS
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
