"""Four processes on several meshes: everyone is in the groups that the rank arithmetic says."""

from typing import Any

import pytest

from rlt_dist.mesh.axes import Axes, parse_axes


def expected(axes: Axes, rank: int) -> dict[str, list[int]]:
    """By asking of every other rank whether it stands on the same line."""
    own = axes.place(rank)
    others = {other: axes.place(other) for other in range(axes.size)}

    def where(*same: str) -> list[int]:
        return [
            other
            for other, place in others.items()
            if all(getattr(place, axis) == getattr(own, axis) for axis in same)
        ]

    groups = {
        "data": where("stage", "tensor"),
        "pipeline": where("data", "tensor"),
        "tensor": where("data", "stage"),
        "replica": where("data"),
    }
    return groups | ({"[0, 1]": where("data", "tensor")} if axes.pipeline == 2 else {})


@pytest.mark.parametrize("mesh", ["1x2x2", "2x2x1", "2x1x2"])
def test_groups_are_the_lines_of_the_mesh(result: Any, mesh: str) -> None:
    axes, found = parse_axes(mesh), result(4, mesh)
    for rank in range(4):
        groups = expected(axes, rank)
        assert found["groups"][rank] == groups
        assert found["sums"][rank] == {
            name: sum(2**member for member in members) for name, members in groups.items()
        }
        place = axes.place(rank)
        assert list(found["at"][rank]) == [place.data, place.stage, place.tensor]
