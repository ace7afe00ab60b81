"""Mistakes in a study's file, each one line that names the file and the key."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlt_dist.study.grid import load_study
from rlt_dist.util.errors import UserError

LONG = "x" * 100


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"overrides": "data.lanes=4"}, "overrides: Input should be a valid list"),
        ({"vary": {"feedback": {4: ["model.feedback=4"]}}}, 'feedback: the key 4 .*quote it.* "4"'),
        ({"vary": {4: {"a": []}}}, 'vary: the key 4 is no text; quote it, as in "4"'),
        ({"cluster": "none.yaml"}, "cluster: .*none.yaml: no such file"),
        ({"config": "none.yaml"}, "config: .*none.yaml: no such file"),
        ({"vary": {"mesh": {"a": []}}}, "vary.mesh: is a column of points.csv"),
        ({"vary": {"nodes": {"a": []}}}, "vary.nodes: is a column of points.csv"),
        ({"vary": {"error_of_seconds": {"a": []}}}, "vary.error_of_seconds: is a column"),
        ({"vary": {"measured_mfu": {"a": []}}}, "vary.measured_mfu: is a column of points.csv"),
        ({"vary": {LONG: {LONG: []}}}, "209 characters name a folder; .* at most 200"),
        (
            {"vary": {"a": {"1.b=2": [], "1": []}, "b": {"2": [], "2.b=2": []}}},
            "2 points are named a=1.b=2.b=2.nodes=1; take other labels",
        ),
        ({"overrides": ["train.steps=4"]}, "train.steps=4: train.steps is the study's `steps`"),
        ({"overrides": ["run_folder=x"]}, "run_folder=x: run_folder is that of a point"),
        (
            {"vary": {"a": {"b": ["train.cluster=x"]}}},
            "train.cluster=x: .* is the study's `cluster`",
        ),
        ({"overrides": ["train={steps: 5}"]}, "train={steps: 5}: train.steps is the study's"),
        (
            {"vary": {"a": {"b": ["mesh={data: 2}"]}}},
            "mesh={data: 2}: mesh.data is what other axes",
        ),
        ({"overrides": ["mesh.data=2"]}, "mesh.data=2: mesh.data is what other axes leave"),
        (
            {"overrides": ["mesh={tensor: 2}"], "mesh": "best"},
            "mesh={tensor: 2}: mesh.tensor is chosen by the study's `mesh: best`",
        ),
        ({"overrides": ["train=5"]}, "run.yaml: train: Input should be a valid"),
        ({"overrides": ["train"]}, "override 'train': write key.sub=value"),
        ({"vary": {"a": {"b": ["model.fnn=3"]}}}, "a=b: .*run.yaml: unknown key 'model.fnn'"),
        ({"overrides": ["mesh.tensor=2"]}, "1 processes cannot be shared out .* mesh.tensor 2"),
        ({"scaling": "weak", "nodes": [3, 4]}, "8 lanes on 3 nodes do not grow to 4"),
        ({"nodes": []}, "nodes: List should have at least 1 item"),
        ({"vary": {"a": {}}}, "vary.a has no values"),
        ({"nodes": [0]}, "nodes.0: Input should be greater than 0"),
        ({"steps": "many"}, "steps: Input should be a valid integer"),
        ({"clusters": "x"}, "unknown key 'clusters'; did you mean 'cluster'"),
    ],
)
def test_a_mistake_is_one_line(
    make_study: Callable[..., Path], tmp_path: Path, keys: dict[str, Any], said: str
) -> None:
    file = make_study(tmp_path, **keys)
    with pytest.raises(UserError, match=said) as error:
        load_study(file)
    assert str(error.value).startswith(f"{file}: ")
    assert "\n" not in str(error.value)
