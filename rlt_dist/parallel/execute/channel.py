"""Messages between the stages of a pipeline."""

from collections import defaultdict, deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor

from rlt_dist.mesh.line import Line
from rlt_dist.parallel.schedule.instructions import Message

_TAGS = 1 << 20


@dataclass
class Channel:
    """Sends without waiting, receives in the order of sending.

    Attributes:
        line: the processes of a pipeline; a stage is a rank of it.
        device: where values live.
        dtype: of all values.
    """

    line: Line
    device: torch.device
    dtype: torch.dtype
    _sent: deque[Future[bool]] = field(default_factory=deque)
    _waiter: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "sends"))
    _expected: dict[Message, tuple[dist.Work, Tensor]] = field(default_factory=dict)
    _numbers: dict[tuple[bool, int], int] = field(default_factory=lambda: defaultdict(int))

    @property
    def ahead(self) -> int:
        """How many values to expect before the next one is waited for.

        Gloo sends a value once it has been told where to put it: told early, nobody waits for that.
        NCCL takes what two processes have for each other in turn: an early receive would hold up
        the sends behind it.
        """
        return 4 if self.device.type == "cpu" else 0

    def send(self, message: Message, value: Tensor) -> None:
        """Hand a value over; it stays alive until it has left.

        Gloo tells that only to who waits for it, so a thread waits.
        """
        value = value.contiguous()
        began = perf_counter()
        tag = self._tag(sending=True, stage=message.target)
        work = dist.isend(value, group=self.line.group, group_dst=message.target, tag=tag)
        assert work is not None
        self.line.note(value.nbytes, began)
        self._sent.append(self._waiter.submit(_see_off, work, value))

    def expect(self, message: Message, shape: tuple[int, ...]) -> None:
        """Make room for a value; those of one source come in the order in which it sends them."""
        value = torch.empty(shape, dtype=self.dtype, device=self.device)
        tag = self._tag(sending=False, stage=message.source)
        work = dist.irecv(value, group=self.line.group, group_src=message.source, tag=tag)
        assert work is not None
        self._expected[message] = work, value

    def receive(self, message: Message) -> Tensor:
        """Wait for a value that is expected."""
        work, value = self._expected.pop(message)
        began = perf_counter()
        work.wait()
        self.line.note(0, began)
        return value

    def flush(self) -> None:
        """Wait until all that was sent has left."""
        began = perf_counter()
        while self._sent:
            self._sent.popleft().result()
        self.line.note(0, began)
        self._waiter.shutdown()

    def _tag(self, *, sending: bool, stage: int) -> int:
        """A message's number among those between two stages: gloo mixes up what has one tag."""
        number = self._numbers[sending, stage]
        self._numbers[sending, stage] = number + 1
        return number % _TAGS


def _see_off(work: dist.Work, _: Tensor) -> bool:
    """Keep a value until it has left."""
    return work.wait()
