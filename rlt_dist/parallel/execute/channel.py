"""Messages between the stages of a pipeline."""

from collections import defaultdict, deque
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from rlt_dist.parallel.schedule.instructions import Message

_TAGS = 1 << 20


@dataclass
class Channel:
    """Sends without waiting, receives in the order of sending.

    Attributes:
        group: the processes of a pipeline; a stage is a rank of it.
        device: where values live.
    """

    group: dist.ProcessGroup
    device: torch.device
    _sent: deque[tuple[dist.Work, Tensor]] = field(default_factory=deque)
    _numbers: dict[tuple[bool, int], int] = field(default_factory=lambda: defaultdict(int))

    def send(self, message: Message, value: Tensor) -> None:
        """Hand a value over; it stays alive until it has left."""
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()
        value = value.contiguous()
        tag = self._tag(sending=True, stage=message.target)
        work = dist.isend(value, group=self.group, group_dst=message.target, tag=tag)
        if work is not None:
            self._sent.append((work, value))

    def receive(self, message: Message, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Wait for a value."""
        value = torch.empty(shape, dtype=dtype, device=self.device)
        tag = self._tag(sending=False, stage=message.source)
        dist.recv(value, group=self.group, group_src=message.source, tag=tag)
        return value

    def flush(self) -> None:
        """Wait until all that was sent has left."""
        while self._sent:
            self._sent.popleft()[0].wait()

    def _tag(self, *, sending: bool, stage: int) -> int:
        """A message's number among those between two stages: gloo mixes up what has one tag."""
        number = self._numbers[sending, stage]
        self._numbers[sending, stage] = number + 1
        return number % _TAGS
