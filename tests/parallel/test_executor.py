"""Four stages at work, held to their plan: real processes, all cases in one start of Python."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlt_dist.mesh.local import run_ranks
from rlt_dist.util.errors import UserError

PROGRAM = Path(__file__).parent / "stages.py"
STAGES = 4
RLT = {
    "kind": "rlt",
    "d_model": 8,
    "heads": 2,
    "ffn": 12,
    "encoder_layers": 4,
    "decoder_layers": 5,
    "window": 3,
    "memory_len": 9,
    "dropout": 0.1,
}
XL = {"kind": "transformer_xl", "d_model": 8, "heads": 2, "d_inner": 12, "layers": 5}


def configured(model: dict[str, Any], micro_batch: int, **sections: Any) -> dict[str, Any]:
    return {
        "run_folder": "run",
        "model": model,
        "data": {"path": "none", "lanes": 8, "segment": 6},
        "optimizer": {"learning_rate": 1e-3},
        "train": {"steps": 1, "precision": "float64", "micro_batch": micro_batch},
        "mesh": {"pipeline": STAGES},
        **sections,
    }


RING = configured(RLT | {"feedback": 1}, 1, pipeline={"group": 4})
FEW = configured(RLT | {"feedback": 1}, 4, recompute={"decoder_chunk": 4})
CHUNKS = configured(RLT | {"feedback": 2, "tied": True, "decoder_layers": 4}, 2)
TWICE = configured(RLT | {"feedback": 0}, 2, recompute={"decoder_chunk": 4})
STACK = configured(XL | {"memory_len": 4}, 1)
GPIPE = configured(XL | {"memory_len": 4}, 2, pipeline={"schedule": "gpipe"})

KEPT: dict[str, dict[str, Any]] = {
    "ring": {"config": RING, "passes": 2},
    "few-recomputed": {"config": FEW},
    "chunks": {"config": CHUNKS, "passes": 2},
    "two-passes": {"config": TWICE},
    "1f1b": {"config": STACK, "passes": 2},
    "gpipe": {"config": GPIPE},
    "ring-losses": {"config": RING, "learn": False},
    "1f1b-losses": {"config": STACK, "learn": False},
}
EXTRA = {"extra": {"config": STACK, "extra": True}}
FAILING = {"failing": {"config": RING, "fail": 2}}

Found = dict[str, Any]


@pytest.fixture(scope="session")
def results(once: Callable[..., Path]) -> Path:
    def make(folder: Path) -> None:
        cases = [{"name": name, **case} for name, case in (KEPT | EXTRA | FAILING).items()]
        arguments = [str(PROGRAM), json.dumps(cases), str(folder)]
        with pytest.raises(UserError) as error:
            run_ranks(STAGES, arguments, folder / "output.txt")
        (folder / "error.txt").write_text(str(error.value))

    return once("stages", make)


@pytest.fixture
def stages(results: Path) -> Callable[[str], list[Found]]:
    """`stages(case)`: what the stages have written."""

    def read(name: str) -> list[Found]:
        files = [results / f"{name}-{rank}.json" for rank in range(STAGES)]
        return [json.loads(file.read_text()) for file in files]

    return read


@pytest.mark.parametrize("name", KEPT)
def test_a_stage_does_what_its_plan_says_and_nothing_else(stages, name):
    for found in stages(name):
        assert found["seen"] == found["planned"] == found["done"]
        times = [time for span in found["times"] for time in span]
        assert times == sorted(times)


def test_an_instruction_too_many_is_seen(stages):
    first, *others = stages("extra")
    assert Counter(first["seen"]) - Counter(first["planned"]) == Counter(["embed 0:0"])
    assert first["seen"] != first["planned"]
    assert all(found["seen"] == found["planned"] for found in others)


@pytest.mark.parametrize("name", KEPT)
def test_nothing_is_left_of_a_step(stages, name):
    assert [found["held"] for found in stages(name)] == [0] * STAGES


@pytest.mark.parametrize("name", ["ring", "1f1b"])
def test_what_was_sent_does_not_stay_until_the_step_ends(stages, name):
    for found in stages(name):
        sends = sum(what.startswith("send ") for what in found["seen"])
        assert found["most"] <= sends * 2 // 3


@pytest.mark.parametrize(("name", "group", "steps"), [("ring", 4, 6), ("few-recomputed", 2, 6)])
@pytest.mark.parametrize("kind", ["decode", "decode backward"])
def test_every_micro_batch_gets_its_turn(stages, name, group, steps, kind):
    for found in stages(name):
        turns = Counter(dict.fromkeys(range(8 if name == "ring" else group), 0))
        for micro in micro_batches(found["seen"], kind):
            turns[micro] += 1
            of_group = [turns[micro - micro % group + i] for i in range(group)]
            assert max(of_group) - min(of_group) <= 1
        assert set(turns.values()) == {steps}


def micro_batches(seen: list[str], kind: str) -> Iterator[int]:
    """Whose turn it was."""
    for what in seen:
        name, _, place = what.rpartition(" ")
        if name == kind:
            yield int(place.partition(":")[0])


def test_every_byte_of_a_step_is_counted(stages):
    """Forward e and x, backward de and dx, of 8 lanes of 6 tokens; u and du, s and ds by token."""
    whole = 8 * 6 * 8 * 8
    between = 2 * whole  # u and du, as x and dx
    first, *inner, last = [found["sent"] for found in stages("ring")]
    assert first == whole + whole + whole + whole * 5 // 6  # x, u, de, ds
    assert inner == [2 * between + whole] * 2  # x, u, dx, du, de
    assert last == whole * 3 + whole + whole * 2  # e to three, s, dx and du


def test_a_stage_that_raises_ends_the_others_and_is_the_one_shown(results):
    assert "rank 2" in (error := (results / "error.txt").read_text())
    assert "ValueError: stage 2 cannot do this" in error
    assert not list(results.glob("failing-*.json"))
