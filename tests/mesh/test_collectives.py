"""Sums and shared errors in a world of one; tests/distributed has them on several processes."""

import errno

import pytest
import torch

from rlt_dist.mesh.axes import Axes
from rlt_dist.mesh.collectives import all_sum, everyones, on_leader, sum_all, together
from rlt_dist.mesh.mesh import open_mesh
from rlt_dist.mesh.world import open_world
from rlt_dist.util.errors import Trouble, UserError


def fail() -> None:
    raise UserError("no such file")


def test_alone_an_error_names_no_rank_and_is_marked_as_shared() -> None:
    with open_world({"OMP_NUM_THREADS": "1"}) as world:
        for everywhere in (together, on_leader):
            with pytest.raises(UserError, match=r"^no such file$") as raised:
                everywhere(world, fail)
            assert raised.value.shared


def test_what_may_pass_stays_so_when_it_is_shared() -> None:
    def no_room() -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "a file")

    with open_world({"OMP_NUM_THREADS": "1"}) as world:
        for everywhere in (together, on_leader, everyones):
            with pytest.raises(Trouble, match=r"^a file: No space left on device; make room$"):
                everywhere(world, no_room)
            with pytest.raises(UserError) as raised:
                everywhere(world, fail)
            assert not isinstance(raised.value, Trouble)


def test_alone_the_result_is_the_actions_own() -> None:
    with open_world({"OMP_NUM_THREADS": "1"}) as world:
        assert together(world, lambda: 3) == 3
        assert on_leader(world, lambda: "x") == "x"


def test_a_defect_is_not_taken_for_a_persons_mistake() -> None:
    with open_world({"OMP_NUM_THREADS": "1"}) as world, pytest.raises(ZeroDivisionError):
        together(world, lambda: 1 // 0)


def test_a_sum_leaves_its_argument_alone() -> None:
    values = torch.tensor([1.0, 2.0])
    with open_world({"OMP_NUM_THREADS": "1"}) as world, open_mesh(world, Axes(1, 1, 1)) as mesh:
        total = all_sum(values, mesh.everyone)
        total += 1
    assert values.tolist() == [1.0, 2.0]


def test_tensors_of_several_types_keep_their_shapes_types_and_the_sum_of_one_process() -> None:
    tensors = [torch.arange(6.0).view(2, 3), torch.arange(4, dtype=torch.float64)]
    with open_world({"OMP_NUM_THREADS": "1"}) as world, open_mesh(world, Axes(1, 1, 1)) as mesh:
        sum_all(tensors, mesh.everyone)
    assert tensors[0].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert tensors[1].dtype == torch.float64
    assert tensors[1].tolist() == [0, 1, 2, 3]
