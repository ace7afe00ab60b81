"""`rlt-dist checkpoint explain`: what would become of a checkpoint, as `train` decides it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rlt_dist.config.run import RunConfig
from rlt_dist.mesh.world import open_world
from rlt_dist.util.errors import UserError


@pytest.fixture
def explain(command: Any, run: RunConfig) -> Any:
    """`explain(*arguments)`: exit status and the object it prints; of the run's newest."""

    def ask(*arguments: str, file: Path | None = None) -> tuple[int, dict[str, Any]]:
        file = file or run.run_folder.parent / "run.yaml"
        code, out, err = command(
            "checkpoint", "explain", run.run_folder, "--config", file, "--json", *arguments
        )
        assert len(out.splitlines()) == 1, err
        return code, json.loads(out)

    return ask


def fates(answer: dict[str, Any]) -> dict[str, tuple[str, dict[str, list[str]]]]:
    return {part["name"]: (part["fate"], part["changes"]) for part in answer["parts"]}


def test_on_the_mesh_that_wrote_it_all_is_as_it_is(explain: Any, run: RunConfig) -> None:
    code, answer = explain()
    assert (code, answer["ok"], answer["refused"]) == (0, True, [])
    assert answer["checkpoint"] == str(run.run_folder / "checkpoints" / "step-00000005")
    assert (answer["step"], answer["tokens"], answer["from"]) == (5, 400, "1x1x1")
    assert all(fate == ("as it is", {}) for fate in fates(answer).values())


def test_on_another_mesh_each_part_names_the_axes_that_cut_it(explain: Any) -> None:
    code, answer = explain("--mesh", "4x1x2")
    found = fates(answer)
    assert code == 0
    assert found["parameters"] == ("cut differently", {"tensor": ["1", "2"]})
    assert found["optimizer"] == ("cut differently", {"data": ["1", "4"], "tensor": ["1", "2"]})
    assert found["state"] == found["optimizer"]
    assert found["cursors"] == ("cut differently", {"data": ["1", "4"]})
    assert found["step, tokens seen"] == ("as it is", {})


def test_memories_of_whole_inputs_are_not_cut_by_the_tensor_axis(
    command: Any, driver: Any, configure: Any, tmp_path: Path
) -> None:
    driver.train(configure(tmp_path, "xl", "train.steps=2", "train.precision=float32"))
    arguments = ["--config", tmp_path / "run.yaml", "optimizer.engine=deepspeed", "--json"]
    arguments += ["--mesh", "1x1x2"]
    code, out, _ = command("checkpoint", "explain", tmp_path / "run", *arguments)
    found = fates(json.loads(out))
    assert code == 0
    assert found["state"] == ("as it is", {})
    assert found["optimizer"][1] == {"tensor": ["1", "2"], "engine": ["torch", "deepspeed"]}


def test_an_older_checkpoint_can_be_asked_about(command: Any, run: RunConfig) -> None:
    folder = run.run_folder / "checkpoints" / "step-00000002"
    file = run.run_folder.parent / "run.yaml"
    code, out, _ = command("checkpoint", "explain", folder, "--config", file, "--mesh", "2x1x1")
    assert code == 0
    assert "step-00000002: step 2, 160 tokens seen, written on 1x1x1" in out
    assert "data 1 -> 2" in out


REFUSED = [
    (["train.seed=3"], "another run (train.seed: 0 -> 3)"),
    (["train.precision=float32"], "another run (train.precision: float64 -> float32)"),
    (["model.ffn=32"], "encoder.0.ffn.down.weight ([16, 24] there, [16, 32] in the model)"),
    (["model.encoder_layers=2"], "holds another model; missing: encoder.1.attn"),
    (["data.lanes=4"], "data.lanes: 8 -> 4"),
]


@pytest.mark.parametrize(("overrides", "says"), REFUSED)
def test_what_train_refuses_is_refused_in_the_same_words(
    explain: Any, driver: Any, configure: Any, run: RunConfig, overrides: list[str], says: str
) -> None:
    code, answer = explain(*overrides)
    assert code == 1
    assert not answer["ok"]
    assert any(says in reason for reason in answer["refused"])
    with pytest.raises(UserError) as raised:
        driver.train(configure(run.run_folder.parent, "rlt1", *overrides))
    assert str(raised.value) == f"{answer['checkpoint']}: {'; '.join(answer['refused'])}"


MESHES = [
    ("1x1x3", "mesh.tensor 3 does not divide model.heads 2"),
    ("1x2x1", "mesh.pipeline 2 exceeds model.encoder_layers 1"),
    ("16x1x1", "8 lanes cannot be shared equally by 16 data-parallel ranks"),
    ("3x1x1", "8 lanes cannot be shared equally by 3 data-parallel ranks"),
]


@pytest.mark.parametrize(("mesh", "says"), MESHES)
def test_a_mesh_that_cannot_be_had_is_refused(explain: Any, mesh: str, says: str) -> None:
    code, answer = explain("--mesh", mesh)
    assert (code, answer["ok"]) == (1, False)
    assert says in answer["refused"][0]


def test_another_corpus_and_tokenizer_are_named(
    explain: Any, other_corpus: Path, words_corpus: Path
) -> None:
    _, answer = explain(f"data.path={other_corpus}")
    assert [reason.split(" than ")[0] for reason in answer["refused"]] == [
        "was trained on another corpus"
    ]
    code, answer = explain(f"data.path={words_corpus}")
    said = "\n".join(answer["refused"])
    assert code == 1
    assert "another corpus" in said
    assert "another tokenizer" in said
    assert "embed.weight ([257, 16] there, [16, 16] in the model)" in said


def test_a_reset_says_where_the_lanes_will_start(explain: Any) -> None:
    code, answer = explain("data.lanes=4", "--reset-state")
    found = fates(answer)
    assert code == 0
    assert found["state"][0] == found["cursors"][0] == "made afresh"
    assert found["parameters"] == ("as it is", {})
    assert "8 lanes became 4" in answer["note"]


def test_lanes_that_disagree_with_their_cursors_are_counted(
    explain: Any, driver: Any, run: RunConfig
) -> None:
    with open_world({"OMP_NUM_THREADS": "1"}) as world, driver.opened(run, world) as session:
        session.cursors[2:5, 0, 3] += 1
        with session.saver() as saver:
            session.save(saver)
    code, answer = explain()
    assert code == 1
    assert "lane 2 carries state of 50 tokens and has read 51 (2 more lanes too)" in " ".join(
        answer["refused"]
    )


def test_a_damaged_one_and_a_manifest_of_another_run_are_refused(
    command: Any, run: RunConfig, driver: Any, configure: Any, tmp_path: Path
) -> None:
    file = run.run_folder.parent / "run.yaml"
    driver.train(configure(tmp_path / "other", "rlt1", "train.seed=9"))
    folders = [run.run_folder / "checkpoints" / f"step-0000000{n}" for n in (5, 4)]
    other = tmp_path / "other" / "run" / "checkpoints" / "step-00000005"
    shutil.copy(other / "manifest.json", folders[0])
    next(folders[1].glob("*.distcp")).unlink()
    for folder, says in zip(folders, ("manifest", "is missing"), strict=True):
        code, out, _ = command("checkpoint", "explain", folder, "--config", file)
        assert code == 1
        assert "refused: " in out
        assert says in out
