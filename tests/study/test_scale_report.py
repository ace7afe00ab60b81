"""`rlt-dist scale report` from outside: what the page and the table say of a study."""

import csv
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlt_dist.checkpoint.run_folder import record
from rlt_dist.config.load import read_yaml, write_yaml
from rlt_dist.data.stream.corpora import open_corpora
from rlt_dist.mesh.axes import Axes, least_axes
from rlt_dist.study.grid import COLUMNS, OWN_COLUMNS, Study, load_study
from rlt_dist.study.measure import measure
from rlt_dist.study.meshes import keep_predictions
from rlt_dist.study.predict import Prediction, digest_of, predict
from rlt_dist.study.run import check_begun, folder_of, point_config
from rlt_dist.study.scaling_report import amdahl, gustafson
from rlt_dist.util.errors import UserError

SECONDS = {1: 2.0, 2: 1.25, 4: 0.875}
"""Of a step, measured: a serial share of a quarter, by Amdahl's law."""
EXACT = dict.fromkeys(SECONDS, 1.0)
VARY = {"feedback": {"1": ["model.feedback=1"], "2": ["model.feedback=2"]}}
TOKENS = 80
"""Of a step."""


def keep_measurements(study: Study, out: Path, **more: Any) -> None:
    """Run folders of all points: six steps, the first two ten times as slow, the last with more."""
    for point in study.points:
        folder = folder_of(out, point)
        folder.mkdir(parents=True)
        config = point_config(study, point, least_axes(point.config.mesh), folder)
        record(folder, config, open_corpora(config.data).tokenizer)
        seconds = SECONDS[point.nodes]
        steps = [
            {"step": step, "loss": 3.0 - step / 10, "seconds": seconds * (10 if step < 3 else 1)}
            for step in range(1, 7)
        ]
        steps[-1] |= more
        lines = (json.dumps(each) + "\n" for each in steps)
        (folder / "metrics.jsonl").write_text("".join(lines))


def predictions(study: Study, factors: Mapping[int, float] = EXACT) -> list[Prediction]:
    """Of all points: measured seconds times a factor by nodes."""
    return [
        Prediction(
            name=point.name,
            digest=digest_of(study, point),
            nodes=point.nodes,
            labels=dict(point.labels),
            axes=str(least_axes(point.config.mesh)),
            seconds=SECONDS[point.nodes] * factors[point.nodes],
            tokens_per_second=TOKENS / SECONDS[point.nodes] / factors[point.nodes],
            mfu=0.25,
            shares={"compute": 0.5, "memory": 0.25, "data": 0.125, "other": 0.125},
            peak_memory=1 << 30,
            fits=True,
            sent={"data": 100},
        )
        for point in study.points
    ]


@pytest.fixture
def study(make_study: Callable[..., Path], tmp_path: Path) -> Path:
    """A study of 1, 2 and 4 nodes by feedback."""
    keys = {"nodes": [1, 2, 4], "vary": VARY, "token_budget": 7.2e6, "device_hour": 2.0}
    return make_study(tmp_path, **keys)


def reported(command: Any, study: Path, out: Path) -> tuple[str, list[dict[str, str]], str]:
    """What the terminal shows, the table, and the page."""
    code, shown, err = command("scale", "report", study, "--output", out)
    assert code == 0, err
    rows = list(csv.DictReader((out / "points.csv").open()))
    return shown, rows, (out / "report.html").read_text()


def test_predictions_stand_beside_measurements_with_their_error(
    command: Any, study: Path, tmp_path: Path
) -> None:
    loaded, out = load_study(study), tmp_path / "out"
    waiting = {"tensor": 0.0, "pipeline": 0.0, "data": 0.25, "replica": 0.0, "world": 0.05}
    more = {"waiting": waiting, "mfu": 0.2, "sent": {"data": 100}, "peak_memory": 1 << 31}
    keep_measurements(loaded, out, **more)
    keep_predictions(out, predictions(loaded, {1: 1.0, 2: 0.9, 4: 1.3}))
    shown, rows, page = reported(command, study, out)
    assert len(rows) == 6
    four = next(row for row in rows if row["point"] == "feedback=2.nodes=4")
    assert float(four["error_of_seconds"]) == pytest.approx(0.3)
    assert float(four["measured_seconds"]) == 0.875  # warm-up is left out
    assert float(four["measured_tokens_per_second"]) == pytest.approx(TOKENS / 0.875)
    assert float(four["measured_efficiency"]) == pytest.approx(2.0 / 0.875 / 4)
    assert float(four["predicted_efficiency"]) == pytest.approx(2.0 / 0.875 / 1.3 / 4)
    assert float(four["measured_share_data"]) == pytest.approx(0.25 / 0.875)
    assert float(four["measured_share_computing"]) == pytest.approx(1 - 0.3 / 0.875)
    assert float(four["measured_peak_memory_of_process"]) == 1 << 31
    assert "copies for checkpoints" in page  # the two are not said to be the same quantity
    assert set(four) - set(VARY) <= {*COLUMNS, *(n for n in four if n.startswith(OWN_COLUMNS))}
    assert (four["measured_sent_data"], four["predicted_sent_data"]) == ("100", "100")
    # 7.2 million tokens at 80 tokens in 0.875 s on 4 devices, at 2 an hour
    assert float(four["device_hours"]) == pytest.approx(7.2e6 / (TOKENS / 0.875) / 3600 * 4)
    assert float(four["price"]) == pytest.approx(2 * float(four["device_hours"]))
    verdict = "over 6 points: median error 10.0%, worst 30.0%."
    assert verdict in page
    assert verdict in shown
    assert page.count("0.2500</td>") == 2  # the serial share of both measured series
    assert {path.name for path in (out / "figures").iterdir()} == {
        *("throughput.png", "efficiency.png", "shares.png", "step.svg")
    }


@pytest.mark.parametrize("kind", ["measured", "predicted"])
def test_either_measurements_or_predictions_are_enough(
    command: Any, study: Path, tmp_path: Path, kind: str
) -> None:
    loaded, out = load_study(study), tmp_path / "out"
    if kind == "measured":
        keep_measurements(loaded, out)
    else:
        keep_predictions(out, predictions(loaded))
    _, rows, page = reported(command, study, out)
    assert f"Only {kind} figures" in page
    other = "predicted" if kind == "measured" else "measured"
    for row in rows:
        assert float(row[f"{kind}_tokens_per_second"]) > 0
        assert row[f"{other}_tokens_per_second"] == ""
    assert page.count("0.2500</td>") == 2
    assert (out / "figures" / "step.svg").exists() is (kind == "predicted")


def test_the_page_needs_nothing_outside_itself(command: Any, study: Path, tmp_path: Path) -> None:
    loaded, out = load_study(study), tmp_path / "out"
    keep_predictions(out, predictions(loaded))
    *_, page = reported(command, study, out)
    assert not re.search(r'(?:src|href)="(?!#)|url\((?!#)|@import', page)
    identities = re.findall(r' id="([^"]*)"', page)
    assert len(set(identities)) == len(identities)
    for words in ("Figure 1.", "Figure 4.", "Table 1.", "Assumptions", "an assumption, of Python"):
        assert words in page


def test_figures_of_another_mesh_are_not_compared(
    command: Any, study: Path, tmp_path: Path
) -> None:
    loaded, out = load_study(study), tmp_path / "out"
    keep_measurements(loaded, out)
    others = [each.model_copy(update={"axes": "1x1x2"}) for each in predictions(loaded)]
    keep_predictions(out, [*predictions(loaded)[:1], *others[1:]])
    shown, rows, _ = reported(command, study, out)
    assert "over 1 point:" in shown
    assert sum(row["error_of_seconds"] != "" for row in rows) == 1


def test_what_does_not_fit_has_no_figures_but_its_memory(
    command: Any, study: Path, tmp_path: Path
) -> None:
    loaded, out = load_study(study), tmp_path / "out"
    first, *others = predictions(loaded)
    keep_predictions(out, [first.model_copy(update={"fits": False}), *others])
    _, rows, page = reported(command, study, out)
    assert (rows[0]["predicted_seconds"], rows[0]["device_hours"]) == ("", "")
    assert float(rows[0]["predicted_peak_memory_of_tensors"]) == 1 << 30
    assert page.count("does not fit</span>") == 1
    assert float(rows[1]["predicted_efficiency"]) == 1.0  # of the fewest nodes that fit


def test_a_study_of_which_nothing_is_known_is_refused(
    command: Any, is_one_error: Any, study: Path, tmp_path: Path
) -> None:
    said = command("scale", "report", study, "--output", tmp_path / "nowhere")
    is_one_error(said, "nothing is known of", "`rlt-dist scale predict`")
    keep_predictions(tmp_path / "out", predictions(load_study(study)))
    said = command("scale", "report", study, "--output", tmp_path / "out", "--step", "nodes=9")
    is_one_error(said, "nodes=9: is no point that was predicted to fit")


def edit(file: Path, **changes: Any) -> None:
    file.write_text(write_yaml(read_yaml(file) | changes))


@pytest.mark.parametrize("edited", ["override", "study", "run", "cluster"])
def test_predictions_of_something_else_are_made_anew(
    command: Any, make_study: Callable[..., Path], tmp_path: Path, edited: str
) -> None:
    file, out = make_study(tmp_path, nodes=[1], vary=VARY), tmp_path / "out"
    run, cluster = tmp_path / "run.yaml", tmp_path / "cluster.yaml"
    cluster.write_text(write_yaml(read_yaml(Path(read_yaml(file)["cluster"]))))
    edit(file, cluster=cluster.name)
    first = ["data.segment=8"] if edited == "override" else []
    assert command("scale", "predict", file, *first, "--output", out)[0] == 0
    match edited:
        case "study":
            edit(file, vary={"feedback": {"1": ["model.feedback=5"], "2": ["model.feedback=2"]}})
        case "run":
            edit(run, model=read_yaml(run)["model"] | {"ffn": 96})
        case "cluster":
            edit(cluster, memory=read_yaml(cluster)["memory"] + 1)
    code, _, err = command("scale", "report", file, "--output", out)
    assert code == 0
    others = 1 if edited == "study" else 2
    assert f"{others} of another configuration" in err
    rows = csv.DictReader((out / "points.csv").open())
    wished = [each.seconds for each in predict(load_study(file))]
    assert [float(row["predicted_seconds"]) for row in rows] == wished
    assert "anew" not in command("scale", "report", file, "--output", out)[2]


def test_runs_of_something_else_are_refused(
    command: Any, is_one_error: Any, study: Path, tmp_path: Path
) -> None:
    loaded, out = load_study(study), tmp_path / "out"
    keep_measurements(loaded, out)
    said = command("scale", "report", study, "--output", out, "data.lanes=64")
    is_one_error(said, "was begun with another configuration", "data.lanes: 8 -> 64")


def test_a_run_may_have_any_mesh_of_its_devices_where_the_study_chooses(
    make_study: Callable[..., Path], tmp_path: Path
) -> None:
    study, out = load_study(make_study(tmp_path, mesh="best", nodes=[2])), tmp_path / "out"
    (point,) = study.points
    for axes in (Axes(2, 1, 1), Axes(1, 1, 2), Axes(1, 1, 1)):
        folder = out / str(axes)
        folder.mkdir(parents=True)
        config = point_config(study, point, axes, folder)
        record(folder, config, open_corpora(config.data).tokenizer)
        if axes.size == 2:
            check_begun(study, point, folder)
    with pytest.raises(UserError, match="was begun on 1x1x1, which are not 2 devices"):
        check_begun(study, point, out / "1x1x1")


def test_a_damaged_run_is_named_and_the_rest_is_reported(
    command: Any, is_one_error: Any, study: Path, tmp_path: Path
) -> None:
    loaded, out = load_study(study), tmp_path / "out"
    keep_measurements(loaded, out)
    first, *others = (folder_of(out, point) / "metrics.jsonl" for point in loaded.points)
    first.write_text("{torn\n" + first.read_text())
    code, _, err = command("scale", "report", study, "--output", out)
    assert code == 0
    assert f"feedback=1.nodes=1: left out of what was measured: {first}:1: is no JSON" in err
    rows = list(csv.DictReader((out / "points.csv").open()))
    assert [row["measured_seconds"] == "" for row in rows] == [True, *[False] * 5]
    assert f"{first}:1" in (out / "report.html").read_text()
    for file in others:
        file.write_text("{torn\n")
    is_one_error(command("scale", "report", study, "--output", out), f"{first}:1: is no JSON")


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ('{"loss": 2.5}', "step"),
        ('{"step": 7, "loss": 2.5}', "seconds"),
        ('{"step": 7, "seconds": null}', "seconds"),
        ('{"step": 7, "seconds": 0.0}', "seconds"),
        ('{"step": "seven", "seconds": 1.0}', "step"),
        ('{"step": 7, "seconds": 1.0, "sent": {"data": "many"}}', "sent.data"),
    ],
)
def test_a_line_that_is_no_step_s_is_named_by_file_line_and_key(
    study: Path, tmp_path: Path, line: str, key: str
) -> None:
    loaded, out = load_study(study), tmp_path / "out"
    keep_measurements(loaded, out)
    folder = folder_of(out, loaded.points[0])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(UserError) as error:
        measure(loaded.points[0], folder, warmup=2)
    said = f"{folder}/metrics.jsonl:7: `{key}` is not a step's; remove the line, or the file"
    assert str(error.value) == said


def test_titles_are_shown_as_they_are(
    command: Any, make_study: Callable[..., Path], tmp_path: Path
) -> None:
    title = "[bold]One[/red] :warning: study"
    file, out = make_study(tmp_path, title=title), tmp_path / "out"
    for verb in ("predict", "report"):
        code, shown, err = command("scale", verb, file, "--output", out)
        assert code == 0, err
        assert title in shown


def test_a_folder_that_cannot_be_written_is_one_error(
    command: Any, is_one_error: Any, study: Path, tmp_path: Path
) -> None:
    file, out = tmp_path / "file", tmp_path / "out"
    file.touch()
    for folder in (file, file / "below", Path("/proc/none")):
        said = command("scale", "predict", study, "--output", folder)
        is_one_error(said, f"{folder}: ", "give a folder that can be written")
    keep_predictions(out, predictions(load_study(study)))
    (out / "figures").touch()
    said = command("scale", "report", study, "--output", out)
    is_one_error(said, f"{out / 'figures'}: is a file")


def test_of_one_number_of_nodes_series_are_compared(
    command: Any, make_study: Callable[..., Path], tmp_path: Path
) -> None:
    file, out = make_study(tmp_path, nodes=[2], vary=VARY), tmp_path / "out"
    keep_predictions(out, predictions(load_study(file)))
    *_, page = reported(command, file, out)
    assert "against nodes, both" not in page
    assert "Figure 2." not in page
    assert not (out / "figures" / "efficiency.png").exists()
    assert "feedback 2" in page


def test_a_run_that_has_only_warmed_up_is_not_measured(study: Path, tmp_path: Path) -> None:
    loaded, out = load_study(study), tmp_path / "out"
    keep_measurements(loaded, out)
    folder = folder_of(out, loaded.points[0])
    assert measure(loaded.points[0], folder, warmup=6) is None
    assert measure(loaded.points[0], folder, warmup=5) is not None
    assert measure(loaded.points[0], out / "nowhere", warmup=0) is None


numbers = st.lists(st.integers(1, 64), min_size=2, max_size=6, unique=True)
speed = st.floats(1, 1e6)
share = st.floats(0, 1)


@settings(max_examples=40)
@given(numbers, speed, share)
def test_a_serial_share_is_found_again(nodes: list[int], first: float, serial: float) -> None:
    least = min(nodes)
    strong = {n: first / (serial + (1 - serial) * least / n) for n in nodes}
    weak = {n: first * (n / least - serial * (n / least - 1)) for n in nodes}
    for law, speeds in ((amdahl, strong), (gustafson, weak)):
        found, worst = law(speeds)
        assert found == pytest.approx(serial, abs=1e-9)
        assert worst == pytest.approx(0, abs=1e-9)
