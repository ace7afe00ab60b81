"""The processes of a run, as one object that is passed to whoever needs it."""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from rlt_dist.mesh.watch import Alone, Watch, watched
from rlt_dist.util.errors import UserError

TIMEOUT = timedelta(minutes=5)
"""How long processes wait for each other to meet."""

LONGEST_WAIT = timedelta(hours=2)
"""How long a collective waits for a rank, which may load, compile or wait for a slow disk. One that
is gone is missed sooner (`watch`), and so is one that is stuck in a step (`train.watchdog`)."""

SERVED = "TORCHELASTIC_USE_AGENT_STORE"
"""Set where the launcher serves the processes' store; otherwise rank 0 does."""

_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class World:
    """This process among all processes of a run.

    Attributes:
        rank, size: this process and how many there are.
        device: where this process computes.
        watch: ends them all.
    """

    rank: int
    size: int
    device: torch.device
    watch: Watch
    _groups: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup]
    _purpose: str = ""

    @property
    def group(self) -> dist.ProcessGroup:
        """The group of all processes."""
        return self.group_of(range(self.size))

    def beside(self, purpose: str) -> "World":
        """The same processes on their hosts, with a group of their own for a thread that works
        beside.

        Messages of one group must come in the same order on all ranks, and nothing orders those of
        two threads. All processes call this at the same place.
        """
        other = replace(self, device=torch.device("cpu"), _purpose=purpose)
        other.make_groups([range(self.size)])
        return other

    def make_groups(self, members: Iterable[Iterable[int]]) -> None:
        """Make the groups of these ranks that are not there yet; all processes give the same.

        Also those that this process is not in: torch names a group by how many it has made (and
        one that only its members make by how many they have), and members meet by that name.
        """
        backend = "gloo" if self._purpose else None
        for ranks in map(tuple, members):
            if (self._purpose, ranks) not in self._groups:
                group = dist.new_group(list(ranks), LONGEST_WAIT, backend)
                self._groups[self._purpose, ranks] = group

    def group_of(self, ranks: Iterable[int]) -> dist.ProcessGroup:
        """The group of these processes, this one among them, which was made before.

        It lasts as long as the world. Keep the ranks, or the world, and not the group: groups hold
        threads, and one that is left when Python ends may still be letting go of a tensor, and
        aborts a run that had succeeded (torch 2.13, gloo).
        """
        return self._groups[self._purpose, tuple(ranks)]

    def end(self, why: str) -> NoReturn:
        """End all processes at once, from any thread, for a reason of this one."""
        self.watch.end(f"rank {self.rank}: {why}" if self.size > 1 else why)

    @property
    def leads(self) -> bool:
        """Whether this process writes what is written once."""
        return self.rank == 0


@contextmanager
def open_world(environment: Mapping[str, str] = os.environ) -> Iterator[World]:
    """Join the processes that a launcher such as torchrun started; alone, be a world of one.

    The processes of one machine share its cores, unless OMP_NUM_THREADS says how many each takes.
    Several processes end together: an error on one of them ends all (`watch.watched`).

    Raises:
        UserError: the launcher's variables are incomplete.
    """
    rank, size, local_rank, local_size = _launched(environment)
    device = _device(local_rank)
    if "OMP_NUM_THREADS" not in environment:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_size))
    store, watching = _meet(rank, size, served=bool(environment.get(SERVED)))
    groups: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}
    try:
        with watching as watch:
            groups["", tuple(range(size))] = _group_of_all(store, rank, size, device)
            yield World(rank, size, device, watch, groups)
    finally:
        if groups:
            groups.clear()
            dist.destroy_process_group()


def _meet(rank: int, size: int, served: bool) -> tuple[dist.Store, AbstractContextManager[Watch]]:
    """A store that all processes reach, and what watches that none of them fails unseen."""
    if size == 1:
        return dist.HashStore(), nullcontext(Alone())
    store, *_ = next(dist.rendezvous("env://", rank, size, timeout=TIMEOUT))
    return store, watched(store, rank, size, rank == 0 and not served, served)


def _group_of_all(
    store: dist.Store, rank: int, size: int, device: torch.device
) -> dist.ProcessGroup:
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=LONGEST_WAIT)
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _launched(environment: Mapping[str, str]) -> tuple[int, int, int, int]:
    """rank, size, rank and size on this machine."""
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        return 0, 1, 0, 1
    missing = [name for name in _LAUNCHER if name not in environment]
    if missing:
        raise UserError(
            f"{', '.join(missing)} not set though other launcher variables are; start with torchrun"
        )
    rank, size, local_rank = (int(environment[name]) for name in _LAUNCHER[:3])
    return rank, size, local_rank, int(environment.get("LOCAL_WORLD_SIZE", "1"))


def _device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)
