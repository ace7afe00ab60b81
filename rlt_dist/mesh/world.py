"""The processes of a run, as one object that is passed to whoever needs it."""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from socket import gethostname
from typing import NoReturn

import torch
import torch.distributed as dist

from rlt_dist.mesh.launched import (
    THREADS,
    Launched,
    address_towards,
    interface_of,
    launched,
    name_process,
    share_of,
)
from rlt_dist.mesh.watch import Watch, alone, watched
from rlt_dist.util import log

TIMEOUT = timedelta(minutes=5)
"""How long processes wait for each other to meet."""

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
"""gloo's network interface, where a person wants another one than `_choose_interface`."""

LONGEST_WAIT = timedelta(hours=2)
"""How long a collective waits for a rank, which may load, compile, or wait for a slow disk. One
that is gone is missed sooner (`watch`), and so is one stuck in training (`train.watchdog`)."""


@dataclass(frozen=True)
class World:
    """This process among all processes of a run.

    Attributes:
        rank, size: this process and how many there are.
        device: where this process computes.
        name: this process in the words of an error: `rank 3 (n2 cuda:1)`.
        watch: ends them all.
    """

    rank: int
    size: int
    device: torch.device
    name: str
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
        self.watch.end(f"{self.name}: {why}" if self.size > 1 else why)

    def keep_in(self, run_folder: Path) -> None:
        """From now on what this process says, and how all end, is kept in a run's folder."""
        self.watch.recorder.folder = run_folder
        log.keep_in(run_folder)

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
    place = launched(environment)
    rank, size, device = place.rank, place.size, _device(place.local_rank)
    where = f"{gethostname()} {device}"
    name_process(rank)
    log.be_rank(rank, size, where)
    if THREADS not in environment:
        torch.set_num_threads(share_of(place.local_size))
    if place.size > place.local_size:
        choose_interface(place.address, place.port, environment)
    store, watching = _meet(place)
    groups: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}
    try:
        with watching as watch:
            everybody = _group_of_all(store, rank, size, device)
            groups["", tuple(range(size))] = everybody
            dist.all_gather_object(watch.names, f"rank {rank} ({where})", group=everybody)
            yield World(rank, size, device, watch.names[rank], watch, groups)
    finally:
        if groups:
            groups.clear()
            dist.destroy_process_group()


def choose_interface(address: str, port: int, environment: Mapping[str, str] = os.environ) -> None:
    """Let gloo speak to other machines the way that leads to where all meet.

    By itself it takes the interface to which this machine's name belongs, which may be loopback.
    """
    with suppress(OSError):
        own = address_towards(address, port)
        name = None if own.startswith("127.") else interface_of(own)
        if name is not None and GLOO_INTERFACE not in environment:
            os.environ[GLOO_INTERFACE] = name


def _meet(place: Launched) -> tuple[dist.Store, AbstractContextManager[Watch]]:
    """A store that all processes reach, and what watches that none of them fails unseen."""
    if place.size == 1:
        return dist.HashStore(), alone()
    serves = place.rank == 0 and not place.served
    store = dist.TCPStore(
        place.address,
        place.port,
        place.size,
        is_master=serves,
        timeout=TIMEOUT,
        multi_tenant=True,
    )
    return store, watched(store, place.rank, place.size, serves, place.served)


def _group_of_all(
    store: dist.Store, rank: int, size: int, device: torch.device
) -> dist.ProcessGroup:
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=LONGEST_WAIT)
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    # Slurm may show each of its tasks its own device alone.
    device = torch.device("cuda", local_rank if torch.cuda.device_count() > 1 else 0)
    torch.cuda.set_device(device)
    return device
