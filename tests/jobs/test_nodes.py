"""Which mesh fits on the nodes that a job was given."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlt_dist.config.run import RunConfig
from rlt_dist.jobs.nodes import lay_out
from rlt_dist.util.errors import UserError

Changed = Callable[..., RunConfig]


@pytest.fixture
def changed(configure: Callable[..., RunConfig], tmp_path: Path) -> Changed:
    """A run with other lanes, micro-batches and mesh, on which nothing else depends."""
    config = configure(tmp_path)

    def change(lanes: int, micro: int | None, data: int | None, stages: int, tensor: int):
        mesh = config.mesh.model_copy(update={"data": data, "pipeline": stages, "tensor": tensor})
        update = {
            "mesh": mesh,
            "data": config.data.model_copy(update={"lanes": lanes}),
            "train": config.train.model_copy(update={"micro_batch": micro}),
        }
        return config.model_copy(update=update)

    return change


@pytest.mark.parametrize(
    ("nodes", "processes", "mesh", "ranks", "idle"),
    [
        (4, 8, "8x2x2", (8, 8, 8, 8), 0),
        (3, 8, "4x2x2", (8, 8, 0), 8),
        (2, 8, "4x2x2", (8, 8), 0),
        (3, 4, "2x2x2", (4, 4, 0), 4),
        (3, 3, "2x2x2", (3, 3, 2), 1),
        (16, 8, "16x2x2", (8,) * 8 + (0,) * 8, 64),
    ],
)
def test_the_data_axis_shrinks_and_grows_with_the_nodes(
    changed: Changed, nodes: int, processes: int, mesh: str, ranks: tuple[int, ...], idle: int
) -> None:
    layout = lay_out(changed(16, None, None, 2, 2), nodes, processes)
    assert (str(layout.axes), layout.ranks, layout.idle) == (mesh, ranks, idle)


def test_a_replica_that_does_not_fit_is_a_mistake(changed: Changed) -> None:
    with pytest.raises(UserError, match="needs 4 processes, and 1 nodes of 3 have room for 3"):
        lay_out(changed(16, None, None, 2, 2), 1, 3)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_every_layout_is_one_that_training_accepts_and_no_longer_one_would_fit(
    changed: Changed, data: st.DataObject
) -> None:
    lanes, nodes = data.draw(st.integers(1, 48)), data.draw(st.integers(1, 9))
    micro = data.draw(st.sampled_from([None, *(n for n in range(1, 9) if lanes % n == 0)]))
    processes, stages = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 3))
    tensor = data.draw(st.sampled_from([1, 2]))
    wished = data.draw(st.none() | st.integers(1, 12))
    config, one = changed(lanes, micro, wished, stages, tensor), stages * tensor
    if one > nodes * processes:
        return
    layout = lay_out(config, nodes, processes)
    axes = layout.axes
    assert (axes.pipeline, axes.tensor) == (stages, tensor)
    assert sum(layout.ranks) == axes.size == nodes * processes - layout.idle
    assert len(layout.ranks) == nodes
    assert max(layout.ranks) <= processes
    assert list(layout.ranks) == sorted(layout.ranks, reverse=True)
    assert lanes % axes.data == 0
    config.micro_batch_lanes(lanes // axes.data)
    for longer in range(axes.data + 1, nodes * processes // one + 1):
        fits = lanes % longer == 0 and (lanes // longer) % (micro or 1) == 0
        assert not fits or longer > (wished or longer)
