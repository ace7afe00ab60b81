"""What a run makes of its machines: utilisation, waiting, messages, memory.

Numbers of a step's record in `metrics.jsonl`. At every step:

tokens_per_second_per_device    `tokens_per_second` over the number of ranks
mfu     model FLOPs done in a second over the peak of all ranks (`costs.flops.utilisation`): forward
        and backward with full state, nothing that is formed twice. A rank's peak is that of the
        file `train.cluster`, and ranks beyond its cores have none; without a file it is what a
        large product in the run's precision reaches when training starts, on all ranks at once, so
        that ranks that share cores share what these can do.

And of steps that are logged (`train.log_every`), since all ranks tell of them in a message:

waiting     by axis, seconds of the step that a rank stood in messages, mean over ranks. On CUDA a
            call ends when its work is queued, so there it is less than what messages take.
sent        by axis, bytes that the rank that sends most along it handed over, as `rlt-dist
            estimate` counts them. What DeepSpeed sends over the data axis itself is in neither.
bubble      share of the pipeline's pass, from start to the last stage's end, that stages wait for
            messages or have ended, mean over stages; 0 without a pipeline. What a stage waits here
            is in `waiting` too.
peak_memory     bytes, of the rank with most, since training started: on CUDA what tensors took
            (the allocator's peak); else by how much the process grew above what was resident before
            the model was built, copies for checkpoints and compiled code included.

Axes are data, pipeline and tensor, replica for messages of all ranks of the same lanes, world for
those of all.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from rlt_dist.config.run import RunConfig
from rlt_dist.costs.cluster import load_cluster
from rlt_dist.costs.flops import flops_per_token, utilisation
from rlt_dist.inference.forward import product_dtype
from rlt_dist.mesh.collectives import all_sum, on_leader
from rlt_dist.mesh.mesh import METERED, Mesh
from rlt_dist.train.step import PassTime
from rlt_dist.util.memory import forget_peak, peak_resident, resident

_WIDTHS = {"cpu": 512, "cuda": 8192}
"""Of the matrices whose product shows the peak."""
_SECONDS = 0.06
"""How long the peak is measured."""


class Usage:
    """Measures steps of a run.

    Attributes:
        peak: FLOP/s of all ranks together.
    """

    def __init__(self, config: RunConfig, vocabulary: int, mesh: Mesh, before: int) -> None:
        """Find the peak, on all ranks together.

        Args:
            before: what `memory_before` gave.

        Raises:
            UserError: on every process alike; see `known_peak`.
        """
        self._flops = flops_per_token(config, vocabulary)
        self._mesh, self._before = mesh, before
        self.peak = peak_flops(config, mesh)
        self._spent = torch.zeros(2, len(METERED), dtype=torch.float64)

    def speed(self, tokens_per_second: float) -> dict[str, float]:
        """What is told of every step."""
        return {
            "tokens_per_second_per_device": tokens_per_second / self._mesh.axes.size,
            "mfu": utilisation(self._flops, tokens_per_second, self.peak),
        }

    @contextmanager
    def metered(self) -> Iterator[None]:
        """Count what a step sends."""
        before = self._meters()
        yield
        self._spent = self._meters() - before

    def measure(self, passed: PassTime | None) -> dict[str, Any]:
        """What is told of the step that was metered last; one message to all ranks."""
        whole, waited = passed or PassTime(0.0, 0.0)
        memory = peak_memory(self._mesh.world.device, self._before)
        own = torch.tensor([whole, waited, memory], dtype=torch.float64)
        table = self._of_all(torch.cat((self._spent.flatten(), own)))
        axes = len(METERED)
        seconds, sent = table[:, :axes].mean(0), table[:, axes : 2 * axes].max(0).values
        wholes, waits, memories = table[:, 2 * axes :].unbind(1)
        longest = float(wholes.max())
        return {
            "waiting": dict(zip(METERED, seconds.tolist(), strict=True)),
            "sent": dict(zip(METERED, map(int, sent.tolist()), strict=True)),
            "bubble": 1 - float((wholes - waits).mean()) / longest if longest else 0.0,
            "peak_memory": int(memories.max()),
        }

    def _meters(self) -> Tensor:
        """float64 [2, axes]: seconds and bytes so far."""
        meters = [self._mesh.meters[name] for name in METERED]
        numbers = [[meter.seconds for meter in meters], [meter.bytes for meter in meters]]
        return torch.tensor(numbers, dtype=torch.float64)

    def _of_all(self, own: Tensor) -> Tensor:
        """[ranks, n]: every rank's numbers [n]."""
        world = self._mesh.world
        table = own.new_zeros(world.size, len(own))
        table[world.rank] = own
        return all_sum(table.to(world.device), self._mesh.everyone).cpu()


def memory_before(device: torch.device) -> int:
    """Begin to watch memory, before a model is built; bytes that are there already."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return 0
    forget_peak()
    return resident()


def peak_memory(device: torch.device, before: int) -> int:
    """Bytes of this process at the fullest moment so far, above what was there before."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return max(0, peak_resident() - before)


def peak_flops(config: RunConfig, mesh: Mesh) -> float:
    """FLOP/s that all ranks together could do; see this module."""
    ranks = mesh.axes.size
    known = on_leader(mesh.world, lambda: known_peak(config, ranks))
    if known is not None:
        return known
    rate = torch.tensor(_rate(mesh, product_dtype(config)), dtype=torch.float64)
    return float(all_sum(rate.to(mesh.world.device), mesh.everyone))


def known_peak(config: RunConfig, ranks: int) -> float | None:
    """FLOP/s of all ranks by `train.cluster`; None where there is none.

    Raises:
        UserError: the file is not right.
    """
    if config.train.cluster is None:
        return None
    return load_cluster(config.train.cluster).peak(config.train.precision, ranks)


def _rate(mesh: Mesh, dtype: torch.dtype) -> float:
    """FLOP/s of this rank while all form products; all begin together."""
    device = mesh.world.device
    width = _WIDTHS[device.type]
    factor = torch.ones(width, width, dtype=dtype, device=device)
    product = factor @ factor
    all_sum(product[0, :1].float(), mesh.everyone)
    began, count, spent = perf_counter(), 0, 0.0
    while spent < _SECONDS:
        torch.mm(factor, factor, out=product)
        product[0, 0].item()  # On CUDA it waits until the product is there.
        count, spent = count + 1, perf_counter() - began
    return 2 * width**3 * count / spent
