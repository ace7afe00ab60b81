"""Predictions of whole studies."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rlt_dist.cli.main import app
from rlt_dist.config.load import write_yaml
from rlt_dist.data.corpus.index import read_content
from rlt_dist.mesh.axes import Axes
from rlt_dist.study.grid import Study, load_study
from rlt_dist.study.meshes import meshes_of
from rlt_dist.study.predict import Prediction, meshes, predict, timeline
from rlt_dist.study.step import SHARES
from rlt_dist.util.errors import UserError

CLUSTERS = Path(__file__).parents[2] / "configs/clusters"
RLT = {
    **{"kind": "rlt", "d_model": 64, "heads": 4, "ffn": 128, "memory_len": 32},
    **{"encoder_layers": 4, "decoder_layers": 4},
}


def study_file(folder: Path, **changes: Any) -> Path:
    run = {
        "run_folder": "none",
        "model": RLT,
        "data": {"path": "none", "lanes": 32, "segment": 16},
        "optimizer": {"learning_rate": 1e-3},
        "train": {"steps": 1},
    }
    (folder / "run.yaml").write_text(write_yaml(run))
    study = {
        "title": "small",
        "config": "run.yaml",
        "cluster": str(CLUSTERS / "h100.yaml"),
        "vocabulary": 50,
        "nodes": [1],
    }
    file = folder / "study.yaml"
    file.write_text(write_yaml(study | changes))
    return file


def study(folder: Path, **changes: Any) -> Study:
    return load_study(study_file(folder, **changes))


def test_shares_of_every_mesh_are_the_whole_step(tmp_path: Path) -> None:
    vary: dict[str, dict[str, list[str]]] = {"cut": {}}
    for axes in meshes(8):
        if axes.pipeline <= 4 and axes.tensor <= 4:
            cut = [f"mesh.pipeline={axes.pipeline}", f"mesh.tensor={axes.tensor}"]
            vary["cut"][str(axes)] = cut
    for cluster in ("h100.yaml", "local.yaml"):
        nodes = [1] if cluster == "h100.yaml" else [8]
        own = study(tmp_path, vary=vary, cluster=str(CLUSTERS / cluster), nodes=nodes)
        for found in predict(own):
            assert tuple(found.shares) == SHARES
            assert sum(found.shares.values()) == pytest.approx(1)
            assert min(found.shares.values()) >= 0
            assert found.axes == found.labels["cut"]
            assert found.tokens_per_second == pytest.approx(32 * 16 / found.seconds)
            waiting = found.shares["bubble"] + found.shares["pipeline"]
            assert (waiting > 1e-9) == ("x1x" not in found.axes)
            assert (found.shares["tensor"] > 0) == (not found.axes.endswith("x1"))


def test_the_best_mesh_is_the_fastest_of_all(tmp_path: Path) -> None:
    (best,) = predict(study(tmp_path, mesh="best", nodes=[2]))
    seconds = {}
    for axes in meshes(16):
        own = [f"mesh.pipeline={axes.pipeline}", f"mesh.tensor={axes.tensor}"]
        try:
            (found,) = predict(study(tmp_path, overrides=own, nodes=[2]))
        except UserError:
            continue
        seconds[found.axes] = found.seconds
    assert best.seconds == min(seconds.values()) == seconds[best.axes]
    assert {best.axes, *(other.axes for other in best.rejected)} == set(seconds)
    for other in best.rejected:
        assert other.least <= seconds[other.axes] * (1 + 1e-9)
        assert other.seconds is None or other.seconds == seconds[other.axes]
        assert other.seconds is not None or other.least >= best.seconds


def test_where_nothing_fits_the_smallest_is_told(tmp_path: Path) -> None:
    (found,) = predict(study(tmp_path, mesh="best", overrides=["model.d_model=100000"]))
    assert not found.fits
    assert not any(other.fits or other.seconds for other in found.rejected)


def test_a_model_that_cannot_be_cut_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be cut over 24 devices"):
        predict(study(tmp_path, mesh="best", nodes=[3], overrides=["data.lanes=31"]))


def test_what_cannot_be_cut_is_told_by_study_and_point(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"study\.yaml: nodes=1: .*lanes cannot be shared"):
        predict(study(tmp_path, overrides=["data.lanes=12"]))


def test_a_choice_of_mesh_is_made_anew_for_another_run(tmp_path: Path) -> None:
    said: list[str] = []
    before, out = study(tmp_path, mesh="best"), tmp_path / "out"
    meshes_of(before, out, said.append)
    now = study(tmp_path, mesh="best", overrides=["data.lanes=2"])
    chosen = meshes_of(now, out, said.append)
    assert str(chosen["nodes=1"]) == predict(now)[0].axes
    assert len(said) == 1
    assert meshes_of(now, out, said.append) == chosen
    assert len(said) == 1


def test_the_fastest_of_what_fits_is_marked(command: Any, tmp_path: Path) -> None:
    vary = {"size": {"far": ["model.d_model=100000"], "near": [], "next": ["model.ffn=65536"]}}
    file = study_file(tmp_path, vary=vary)
    _, shown, _ = command("scale", "predict", file, "--output", tmp_path / "out")
    (near,) = (line for line in shown.splitlines() if line.split()[:2] == ["1", "near"])
    assert "* " in near
    assert shown.count("* ") == 1
    assert "*: the most tokens a second" in shown
    file = study_file(tmp_path, vary={"size": {"far": vary["size"]["far"]}})
    _, shown, _ = command("scale", "predict", file, "--output", tmp_path / "out")
    assert "*" not in shown
    assert "size=far.nodes=1 does not fit into memory" in shown


def test_a_timeline_can_be_drawn_however_long_the_pass_is(tmp_path: Path) -> None:
    own = ["mesh.pipeline=4", "data.segment=4096", "train.micro_batch=1"]
    long = study(tmp_path, overrides=own)
    drawn = timeline(long, long.points[0], Axes(2, 4, 1))
    assert len(drawn) == 4
    assert sum(map(len, drawn)) < 30_000


def test_the_pass_that_is_drawn_is_that_of_the_mesh(tmp_path: Path) -> None:
    chosen = study(tmp_path, mesh="best")
    for stages in (1, 2, 4):
        assert len(timeline(chosen, chosen.points[0], Axes(8 // stages, stages, 1))) == stages


def test_a_corpus_is_asked_for_its_vocabulary_once_for_all_meshes(
    make_study: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []

    def ask(corpus: Any) -> Any:
        asked.append(corpus)
        return read_content(corpus)

    monkeypatch.setattr("rlt_dist.study.predict.read_content", ask)
    predict(load_study(make_study(tmp_path, mesh="best", nodes=[4])))
    assert len(asked) == 2  # for the six meshes, and for the digest


def test_the_command_writes_what_it_shows(tmp_path: Path) -> None:
    vary = {"feedback": {"1": ["model.feedback=1"], "4": ["model.feedback=4"]}}
    file, out = study_file(tmp_path, vary=vary), tmp_path / "out"
    result = CliRunner().invoke(app, ["scale", "predict", str(file), "--output", str(out)])
    assert result.exit_code == 0, result.output
    assert "8x1x1" in result.output
    content = json.loads((out / "predictions.json").read_text())
    found = [Prediction.model_validate(each) for each in content]
    assert [each.name for each in found] == ["feedback=1.nodes=1", "feedback=4.nodes=1"]
    assert found[0].seconds > found[1].seconds
