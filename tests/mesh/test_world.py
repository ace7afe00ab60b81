"""The world: alone without a launcher, among others with a whole set of its variables."""

import pytest
import torch
import torch.distributed as dist

from rlt_dist.mesh.world import _device, open_world
from rlt_dist.util.errors import UserError


def test_without_a_launcher_it_is_a_world_of_one() -> None:
    with open_world({"OMP_NUM_THREADS": "1"}) as world:
        assert (world.rank, world.size, world.leads) == (0, 1, True)


def test_a_world_is_closed_after_use_also_after_an_error() -> None:
    for _ in range(2):
        with pytest.raises(KeyError), open_world({"OMP_NUM_THREADS": "1"}):
            raise KeyError
        assert not dist.is_initialized()


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"])
def test_half_a_set_of_launcher_variables_is_refused_by_name(missing: str) -> None:
    whole = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
    }
    environment = {name: value for name, value in whole.items() if name != missing}
    with pytest.raises(UserError, match=f"^{missing} not set"), open_world(environment):
        pass


@pytest.mark.parametrize(("shown", "index"), [(1, 0), (4, 3)])
def test_a_process_that_is_shown_one_device_takes_it_whatever_its_rank(
    monkeypatch: pytest.MonkeyPatch, shown: int, index: int
) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: shown)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert _device(3) == torch.device("cuda", index)
    assert chosen == [torch.device("cuda", index)]
