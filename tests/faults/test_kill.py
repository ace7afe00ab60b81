"""kill -9 at any moment: the same command goes on from the last whole checkpoint."""

import random
from pathlib import Path
from typing import Any

import pytest

from rlt_dist.checkpoint.manifest import checkpoints, verify

SAVING = ("checkpoint.every=1", "checkpoint.keep=2", "train.steps=3", "validation.every=2")
KILLED = -9


def assert_whole(run_folder: Path, *steps: int) -> None:
    """As if nobody had ever been killed: nothing half-written, nothing half-removed."""
    assert not list(run_folder.rglob("*.partial"))
    found = checkpoints(run_folder / "checkpoints")
    assert [path.name for path in found] == [f"step-{step:08}" for step in steps]
    for path in found:
        verify(path)


def moments(notes: list[str], stride: int) -> list[int]:
    """Moments of the third step's save, `stride` apart, and fewer before it; counted from 1."""
    begin = next(n for n, note in enumerate(notes, 1) if "step-00000003" in note)
    return [*range(1, begin, 5 * stride), *range(begin, len(notes) + 1, stride)]


@pytest.mark.parametrize(("model", "stride"), [("rlt1", 3), ("xl", 7)])
def test_killed_at_any_file_operation_the_run_ends_as_if_it_never_was(
    starts: Any, configure: Any, tmp_path: Path, metrics: Any, model: str, stride: int
) -> None:
    """Each run is killed once, at another open, make, rename or remove, and resumed once."""
    whole = tmp_path / "whole"
    config = configure(whole, model, *SAVING)
    (uninterrupted,) = starts(tmp_path, [(whole, None)])
    assert uninterrupted["status"] == 0, uninterrupted["told"]
    expected = metrics(config.run_folder)
    assert [record["step"] for record in expected] == [1, 2, 3]
    written = [note for note in uninterrupted["notes"] if note.startswith("saver: ")]
    for operation in ("open", "os.fsync", "os.mkdir", "os.rename"):
        assert any(operation in note and ".partial" in note for note in written)

    folders, plan = [], []
    for moment in moments(uninterrupted["notes"], stride):
        folder = tmp_path / f"{moment}"
        configure(folder, model, *SAVING)
        folders.append(folder)
        plan += [(folder, {"nth": moment}), (folder, None)]
    results = starts(tmp_path, plan)
    lefts = [killed["left"] for killed in results[::2]]
    assert any(".step-00000003.partial" in left for left in lefts)
    assert any("step-00000003" in left for left in lefts)
    for folder, killed, resumed in zip(folders, results[::2], results[1::2], strict=True):
        when = uninterrupted["notes"][int(folder.name) - 1]
        assert killed["status"] == KILLED, when
        assert resumed["status"] == 0, (when, resumed["told"])
        assert metrics(folder / "run") == expected, when
        assert_whole(folder / "run", 2, 3)


def test_killed_again_and_again_the_same_run_still_arrives(
    starts: Any, configure: Any, tmp_path: Path, metrics: Any
) -> None:
    """Twenty times: at random instants, and at the file operations of the next save."""
    chance = random.Random(3)
    steps = ("train.steps=12", "checkpoint.every=2", "checkpoint.keep=2")
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    configure(whole, "rlt1", *steps)
    configure(broken, "rlt1", *steps)
    kills = [
        {"seconds": chance.uniform(0.05, 0.5)} if n % 3 else {"nth": chance.randint(5, 60)}
        for n in range(20)
    ]
    results = starts(tmp_path, [(whole, None), *[(broken, kill) for kill in kills], (broken, None)])
    assert results[0]["status"] == results[-1]["status"] == 0, results[-1]["told"]
    ended = [result["status"] for result in results[1:-1]]
    assert set(ended) <= {KILLED, 0}, [r["told"] for r in results if r["status"] not in (KILLED, 0)]
    assert ended.count(KILLED) >= 5
    assert metrics(broken / "run") == metrics(whole / "run")
    assert_whole(broken / "run", 10, 12)
