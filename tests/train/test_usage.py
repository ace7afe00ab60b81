"""Utilisation and memory in a run's metrics, by one process."""

from pathlib import Path
from typing import Any

import pytest

from rlt_dist.config.load import write_yaml
from rlt_dist.costs.cluster import load_cluster
from rlt_dist.costs.flops import flops_per_token
from rlt_dist.mesh.axes import Axes
from rlt_dist.mesh.mesh import open_mesh
from rlt_dist.mesh.world import open_world
from rlt_dist.train.usage import known_peak, peak_flops
from rlt_dist.util.errors import UserError
from rlt_dist.util.records import read_records

LOGGED = {"waiting", "sent", "bubble", "peak_memory"}
BYTES = 257


@pytest.fixture
def cluster(repository: Path) -> Path:
    return repository / "configs" / "clusters" / "h100.yaml"


@pytest.mark.parametrize("model", ["rlt1", "rlt2", "xl"])
def test_utilisation_is_of_the_clusters_peak(
    driver: Any, configure: Any, tmp_path: Path, cluster: Path, model: str
) -> None:
    config = configure(tmp_path, model, f"train.cluster={cluster}", "train.log_every=2")
    driver.train(config)
    of_token = flops_per_token(config, BYTES)
    records = read_records(config.run_folder / "metrics.jsonl")
    for record in records:
        done = of_token * record["tokens_per_second"]
        assert record["mfu"] == pytest.approx(done / load_cluster(cluster).flops["float64"])
        assert record["tokens_per_second_per_device"] == record["tokens_per_second"]
    assert [record["step"] for record in records if record.keys() >= LOGGED] == [2, 4, 5]
    for record in records[1::2]:
        assert not any(record["waiting"].values())
        assert not any(record["sent"].values())
        assert record["bubble"] == 0
    # None where all of it fits into what an earlier run of this process has left.
    assert records[-1]["peak_memory"] >= records[1]["peak_memory"] >= 0


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float64"])
def test_without_a_cluster_the_peak_is_measured(
    configure: Any, tmp_path: Path, precision: str
) -> None:
    config = configure(tmp_path, "rlt1", f"train.precision={precision}")
    assert known_peak(config, 1) is None
    with open_world({"OMP_NUM_THREADS": "1"}) as world, open_mesh(world, Axes(1, 1, 1)) as mesh:
        assert 1e8 < peak_flops(config, mesh) < 1e14


def test_ranks_beyond_a_machines_cores_have_no_peak(
    configure: Any, tmp_path: Path, cluster: Path
) -> None:
    content = load_cluster(cluster).model_dump(mode="json", exclude_unset=True)
    content |= {"cores": 2, "sources": content["sources"] | {"cores": "an example"}}
    (tmp_path / "mine.yaml").write_text(write_yaml(content))
    config = configure(tmp_path, "rlt1", f"train.cluster={tmp_path}/mine.yaml")
    one, cores = (known_peak(config, ranks) for ranks in (1, 2))
    assert one is not None
    assert cores == 2 * one == known_peak(config, 8)


def test_a_cluster_without_the_precision_is_refused(
    driver: Any, configure: Any, tmp_path: Path, cluster: Path
) -> None:
    content = load_cluster(cluster).model_dump(mode="json", exclude_unset=True)
    (tmp_path / "mine.yaml").write_text(write_yaml(content | {"flops": {"float32": 1e12}}))
    config = configure(tmp_path, "rlt1", f"train.cluster={tmp_path}/mine.yaml")
    with pytest.raises(UserError, match="flops lack bfloat16, float64"):
        driver.train(config)
    assert not config.run_folder.exists()
