"""`rlt-dist estimate`: what is said, what is refused, and what would fit."""

from pathlib import Path
from typing import Any

import pytest

from rlt_dist.config.load import load_typed, read_yaml, write_yaml
from rlt_dist.config.run import RunConfig
from rlt_dist.costs.cluster import load_cluster
from rlt_dist.costs.fit import fullest_rank, remedies
from rlt_dist.costs.run import run_of
from rlt_dist.mesh.axes import Axes
from rlt_dist.parallel.plan.counts import count_parameters
from rlt_dist.util.errors import UserError

ROOT = Path(__file__).parents[2]
LARGE, CLUSTERS = ROOT / "configs/rlt_48x48.yaml", ROOT / "configs/clusters"
H100 = CLUSTERS / "h100.yaml"
SMALL = ROOT / "configs/verify/rlt1.yaml"


@pytest.mark.parametrize("name", ["h100", "h200", "local"])
def test_every_cluster_says_where_its_figures_are_from(name: str) -> None:
    cluster = load_cluster(CLUSTERS / f"{name}.yaml")
    assert set(cluster.sources) >= {"flops", "memory", "within_node", "between_nodes"}
    assert cluster.flops.keys() == {"bfloat16", "float32", "float64"}


def test_a_figure_without_a_source_is_refused(tmp_path: Path) -> None:
    content = read_yaml(H100)
    del content["sources"]["launch"]
    (tmp_path / "c.yaml").write_text(write_yaml(content))
    with pytest.raises(UserError, match="sources do not say where these are from: launch"):
        load_cluster(tmp_path / "c.yaml")


LOCAL_RATE = dict.fromkeys(("flop", "attention", "score", "number", "operation", "call"), 1e-9)
OLD = {name: figure for name, figure in LOCAL_RATE.items() if name != "score"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rates": {"encode": OLD, "decode": OLD}}, "encode lacks score; `rlt-dist scale calibr"),
        ({"rates": {"encod": LOCAL_RATE}}, "encod is no kind of work; `rlt-dist scale calibrate`"),
        ({"rates": {"embed": LOCAL_RATE | {"call": -1.0}}}, "rates.embed.call: .* equal to 0"),
        ({"rates": 5}, "rates: Input should be a valid dictionary"),
        ({"flops": {"float32": 1e9, "float64": 1e9}}, "flops lack bfloat16"),
        ({"collectives": {"0 of 2": 1.0}}, "collectives: the key '0 of 2': String should match"),
        ({"collectives": {2: 1.0}}, 'collectives: the key 2 is no text; quote it, as in "2"'),
        ({"contention": 0.5}, "contention: Input should be greater than or equal to 1"),
        ({"memory_bandwidth": None}, "memory_bandwidth: Input should be a valid number"),
    ],
)
def test_a_mistake_in_a_cluster_is_one_line(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    content, file = read_yaml(H100) | changes, tmp_path / "c.yaml"
    content["sources"] |= dict.fromkeys(changes, "a guess")
    file.write_text(write_yaml(content))
    with pytest.raises(UserError, match=said) as error:
        load_cluster(file)
    assert str(error.value).startswith(f"{file}: ")
    assert "\n" not in str(error.value)


def test_the_reference_run_fits_the_nodes_that_its_file_names(command: Any) -> None:
    given = ["--cluster", H100, "--nodes", 8, "--vocabulary", 32_000]
    code, out, err = command("estimate", LARGE, *given)
    assert (code, err) == (0, "")
    for said in ("2,971,019,264", "all_to_all", "recomputation", "fits: "):
        assert said in out


def test_figures_as_one_object(command: Any, strict_json: Any) -> None:
    given = ["--mesh", "1x2x1", "--vocabulary", 509, "--json"]
    _, out, _ = command("estimate", SMALL, *given)
    record = strict_json(out)
    config = load_typed(SMALL, RunConfig)
    counts = count_parameters(config.model, 509, Axes(1, 2, 1))
    assert record["parameters"] == counts.parameters
    held = counts.largest(record["memory"]["stage"]).parameters
    assert record["memory"]["parts"]["parameters"] == 8 * held
    assert {row["axis"] for row in record["traffic"]} == {"pipeline", "replica", "world"}
    model, executed = record["model_flops_per_token"], record["executed_flops_per_token"]
    assert min(model.values()) > 0
    assert executed["recomputation"] > 0
    assert "recomputation" not in model


def test_what_does_not_fit_is_refused_with_what_would(command: Any, is_one_error: Any) -> None:
    given = ["recompute.decoder_chunk=none", "--cluster", H100, "--nodes", 8]
    result = command("estimate", LARGE, *given, "--vocabulary", 32_000)
    assert result[0] == 2
    is_one_error(result, "a rank of stage 0 needs", "it fits with", "recompute.decoder_chunk=")


def test_every_remedy_fits_and_the_one_before_does_not() -> None:
    config = load_typed(LARGE, RunConfig, ["recompute.decoder_chunk=none"])
    run, cluster = run_of(config, 32_000, Axes(8, 8, 1), compiled=False), load_cluster(H100)
    assert fullest_rank(run)[1].peak > cluster.usable
    found = remedies(run, cluster.usable, devices=None)
    assert len(found) >= 2
    for remedy in found:
        assert remedy.peak == fullest_rank(remedy.run)[1].peak <= cluster.usable
        assert remedy.overrides
    (length,) = (
        r.choices["recompute.decoder_chunk"]
        for r in found
        if len(r.choices) == 1 and "recompute.decoder_chunk" in r.choices
    )
    longer = load_typed(LARGE, RunConfig, [f"recompute.decoder_chunk={2 * length}"])
    before = run_of(longer, 32_000, Axes(8, 8, 1), compiled=False)
    assert 2 * length >= config.data.segment or fullest_rank(before)[1].peak > cluster.usable


def test_pipeline_and_tensor_axis_together_where_neither_is_enough() -> None:
    run, usable = run_of(load_typed(SMALL, RunConfig), 509, Axes(1, 1, 1)), 700_000
    (found,) = remedies(run, usable, devices=None)
    assert found.choices.keys() >= {"mesh.pipeline", "mesh.tensor"}
    assert found.peak == fullest_rank(found.run)[1].peak <= usable
    assert remedies(run, 100_000, devices=None) == []
    long = run_of(load_typed(SMALL, RunConfig), 509, Axes(1, 2, 1))
    (found,) = remedies(long, 1_300_000, devices=2)
    assert found.run.axes == Axes(1, 1, 2)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--nodes", 2], "--nodes needs --cluster"),
        (["--nodes", 2, "--mesh", "1x2x2", "--cluster", H100], "needs 4 processes"),
        (["--mesh", "3x1x1"], "8 lanes cannot be shared equally"),
        (["--mesh", "1x9x1"], "mesh.pipeline 9 exceeds"),
    ],
)
def test_what_cannot_be_is_one_line(
    command: Any, is_one_error: Any, given: list[Any], said: str
) -> None:
    is_one_error(command("estimate", SMALL, *given, "--vocabulary", 509), said)
