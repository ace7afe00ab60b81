"""`rlt-dist bench stream` on a little text; nothing is asserted about speed."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlt_dist.bench import stream, stream_material
from rlt_dist.bench.compare import Bench
from rlt_dist.bench.stream_material import Material, StreamShape, made
from rlt_dist.config.load import load_typed
from rlt_dist.config.run import RunConfig

FIELDS = ["bench", "variant", "shape", "threads", "seconds", "ratio", "peak_bytes"]
TO_JUDGE_BY = ["quartiles", "over_floor", "rounds", "disturbance"]
CONFIG = Path(__file__).parents[2] / "configs" / "rlt_stdlib.yaml"
SMALL = StreamShape("\n\n", tokens=50_000, lanes=3, segment=8, vocabulary=400, most_bytes=100_000)
LARGE = replace(SMALL, separator=None)
TINY: dict[str, tuple[Bench, StreamShape]] = {
    "tiny_read": (stream.READ, SMALL),
    "tiny_prepare": (stream.PREPARE, LARGE),
    "tiny_step": (stream.STEP, LARGE),
}


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shape of each benchmark."""
    for name, (bench, shape) in TINY.items():
        monkeypatch.setitem(bench.shapes, name, shape)


@pytest.fixture(scope="module", params=[SMALL, LARGE], ids=["small", "large"])
def material(request: pytest.FixtureRequest) -> Iterator[Material]:
    with made(replace(request.param, lanes=1)) as found:
        yield found
    assert not found.folder.exists()


@pytest.mark.usefixtures("tiny")
def test_every_variant_is_one_object_a_line_against_the_yardstick_it_names(
    command: Any, strict_json: Any
) -> None:
    shapes = (word for name in TINY for word in ("--shape", name))
    code, out, _ = command(
        *("bench", "stream", *shapes, "--threads", 1, "--seconds", 0, "--json"),
    )
    assert code == 0
    rows = [strict_json(line) for line in out.splitlines()]
    assert [(row["shape"], row["variant"]) for row in rows] == [
        (name, variant) for name, (bench, _) in TINY.items() for variant in bench.variants
    ]
    seconds = {(row["shape"], row["variant"]): row["seconds"] for row in rows}
    for row in rows:
        assert list(row) == FIELDS + TO_JUDGE_BY
        assert (row["bench"], row["threads"], row["rounds"]) == ("stream", 1, 3)
        yardstick = row["variant"].rpartition("/")[2]
        expected = seconds[row["shape"], yardstick] / row["seconds"]
        assert row["ratio"] == pytest.approx(expected)
        assert row["peak_bytes"] is None or row["peak_bytes"] >= 0


@pytest.mark.usefixtures("tiny")
def test_people_get_a_table_of_the_chosen_variants(command: Any) -> None:
    chosen = ("--variant", "prepare/sentencepiece")
    code, out, _ = command(
        *("bench", "stream", "--shape", "tiny_prepare", "--seconds", 0, "--threads", 1), *chosen
    )
    assert code == 0
    assert "stream tiny_prepare, threads: 1" in out
    assert "prepare/sentencepiece" in out
    assert " sentencepiece " not in out


def test_a_shape_knows_no_variant_of_another(command: Any, is_one_error: Any) -> None:
    is_one_error(
        command("bench", "stream", "--shape", "read_large", "--variant", "step"),
        "unknown variant 'step'",
        "webdataset, lanes/webdataset, workers/webdataset",
    )


@pytest.mark.parametrize("workers", [0, 1])
def test_one_epoch_of_the_lanes_is_one_epoch_of_webdataset(
    material: Material, workers: int
) -> None:
    plain = stream.webdataset_documents(material)
    documents = [next(plain) for _ in range(material.split().documents)]
    assert sum(map(len, documents)) == material.tokens
    again = next(plain)
    assert np.array_equal(again, documents[0])
    segments = stream.lane_segments(workers, material)
    flat = chain.from_iterable(map(np.ravel, segments))
    lane = np.fromiter(flat, np.int64, material.tokens)
    segments.close()  # type: ignore[attr-defined]
    assert np.array_equal(np.bincount(lane), np.bincount(np.concatenate(documents)))


def test_a_reader_takes_as_many_tokens_as_it_is_told_whatever_the_pieces() -> None:
    taken: list[int] = []

    def pieces() -> Iterator[np.ndarray]:
        for size in (3, 9, 1, 2, 4, 7, 5):
            taken.append(size)
            yield np.empty(size)

    reader = stream.Reader(pieces(), 10)
    for calls in (1, 2, 3):
        reader()
        assert 10 * calls <= sum(taken) < 10 * calls + taken[-1]


@pytest.mark.parametrize("step", [stream.sentencepiece_step, stream.prepare_step])
def test_a_variant_that_leaves_tokens_out_fails(material: Material, step: Any) -> None:
    step(material)()
    with pytest.raises(RuntimeError, match=f"{material.tokens} tokens were made"):
        step(replace(material, tokens=material.tokens + 1))()


def test_preparing_takes_as_many_workers_as_threads(
    material: Material, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def workers(number: int) -> Any:
        asked.append(number)
        return local_workers(1)

    local_workers = stream_material.local_workers
    monkeypatch.setattr(stream_material, "local_workers", workers)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    stream.prepare_step(material)()
    assert asked == [3]


def test_the_model_that_eats_is_the_one_the_main_job_trains() -> None:
    config = load_typed(CONFIG, RunConfig)
    assert config.model == stream.SMALL_MODEL
    shape = stream.STEP.shapes["step"]
    assert (shape.lanes, shape.segment) == (config.data.lanes, config.data.segment)
