"""Processes along an axis of the mesh: the one door of a step's messages, which counts them."""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import torch.distributed as dist
from torch import Tensor

from rlt_dist.mesh.world import World


@dataclass
class Meter:
    """What this process has done along an axis so far.

    Attributes:
        bytes: handed over: of an all-reduce or all-gather its own tensor once, of an all-to-all
            the parts for all, whatever leaves the process for it.
        seconds: that the process stood in calls. gloo's last until all is there; NCCL's only hand
            work to the device, where it then goes on beside the process.
    """

    bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Line:
    """Processes that exchange messages; one process alone sends none.

    It keeps ranks and not their group (`World.group_of` has the reason).

    Attributes:
        ranks: in the order of the axis.
        meter: of the axis.
    """

    world: World
    ranks: tuple[int, ...]
    meter: Meter

    @property
    def group(self) -> dist.ProcessGroup:
        """For calls that are not here; see `note`."""
        return self.world.group_of(self.ranks)

    @property
    def size(self) -> int:
        """How many processes there are."""
        return len(self.ranks)

    def all_reduce(
        self, tensor: Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> None:
        """Replace a tensor by its sum over the processes, or what else is asked for."""
        if len(self.ranks) > 1:
            began = perf_counter()
            dist.all_reduce(tensor, operation, group=self.group)
            self.note(tensor.nbytes, began)

    def all_to_all(self, received: Tensor, sent: Tensor) -> None:
        """Row r of `sent` to rank r of the line; a row of `received` from each."""
        began = perf_counter()
        dist.all_to_all_single(received, sent, group=self.group)
        self.note(sent.nbytes, began)

    def all_gather(self, received: Sequence[Tensor], sent: Tensor) -> None:
        """Every process's tensor, by rank of the line."""
        began = perf_counter()
        dist.all_gather(list(received), sent, group=self.group)
        self.note(sent.nbytes, began)

    def note(self, bytes_: int, began: float) -> None:
        """Count a call that has just ended.

        Args:
            began: `time.perf_counter` before it.
        """
        self.meter.bytes += bytes_
        self.meter.seconds += perf_counter() - began
