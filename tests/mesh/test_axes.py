"""Ranks on a mesh, and meshes that the number of processes makes impossible."""

import pytest

from rlt_dist.config.run import MeshConfig
from rlt_dist.mesh.axes import Axes, Group, Place, axes_of, parse_axes
from rlt_dist.util.errors import UserError

SHAPES = [Axes(1, 1, 1), Axes(2, 1, 3), Axes(1, 4, 1), Axes(2, 3, 4)]


@pytest.mark.parametrize("axes", SHAPES, ids=str)
def test_every_rank_has_one_place_and_neighbours_share_the_tensor_axis(axes: Axes) -> None:
    places = [axes.place(rank) for rank in range(axes.size)]
    assert places == [
        Place(data, stage, tensor)
        for data in range(axes.data)
        for stage in range(axes.pipeline)
        for tensor in range(axes.tensor)
    ]
    assert [axes.rank(place) for place in places] == list(range(axes.size))
    assert parse_axes(str(axes)) == axes


def alike(axes: Axes, group: Group, rank: int) -> list[int]:
    """Ranks that differ from one along a group's axes alone."""

    def together(other: Place) -> bool:
        data, stage = other.data == place.data, other.stage == place.stage
        tensor = other.tensor == place.tensor
        if isinstance(group, tuple):
            return data and tensor and other.stage in group
        alike = {"data": stage and tensor, "pipeline": data and tensor, "tensor": data and stage}
        return (alike | {"replica": data, "world": True})[group]

    place = axes.place(rank)
    return [other for other in range(axes.size) if together(axes.place(other))]


@pytest.mark.parametrize("axes", SHAPES, ids=str)
def test_members_of_a_group_differ_along_its_axes_alone(axes: Axes) -> None:
    groups: list[Group] = ["data", "pipeline", "tensor", "replica", "world"]
    groups.append((0, axes.pipeline - 1) if axes.pipeline > 1 else (0,))
    for rank in range(axes.size):
        for group in groups:
            assert list(axes.members(group, axes.place(rank))) == alike(axes, group, rank)


@pytest.mark.parametrize("text", ["", "2", "2x2", "2x2x2x2", "0x1x1", "2x-1x1", "axbxc", "2x1x1 "])
def test_a_mesh_that_is_not_three_positive_numbers_is_refused(text: str) -> None:
    with pytest.raises(UserError) as refused:
        parse_axes(text)
    assert str(refused.value) == (
        f"mesh {text!r}: write data x pipeline x tensor, for example 2x1x4"
    )


def test_what_pipeline_and_tensor_leave_is_the_data_axis() -> None:
    assert axes_of(MeshConfig(), 6) == Axes(6, 1, 1)
    assert axes_of(MeshConfig(pipeline=3, tensor=2), 12) == Axes(2, 3, 2)
    assert axes_of(MeshConfig(data=2, pipeline=3, tensor=2), 12) == Axes(2, 3, 2)


@pytest.mark.parametrize(
    ("mesh", "processes", "line"),
    [
        (
            MeshConfig(data=2, pipeline=2, tensor=2),
            4,
            "mesh.data 2 x mesh.pipeline 2 x mesh.tensor 2 needs 8 processes, and there are 4",
        ),
        (
            MeshConfig(pipeline=2, tensor=2),
            6,
            "6 processes cannot be shared out over mesh.pipeline 2 x mesh.tensor 2; "
            "start a multiple of 4",
        ),
        (
            MeshConfig(tensor=2),
            1,
            "1 processes cannot be shared out over mesh.pipeline 1 x mesh.tensor 2; "
            "start a multiple of 2",
        ),
    ],
)
def test_a_mesh_that_does_not_fit_the_processes_is_one_line_with_the_numbers(
    mesh: MeshConfig, processes: int, line: str
) -> None:
    with pytest.raises(UserError) as refused:
        axes_of(mesh, processes)
    assert str(refused.value) == line
