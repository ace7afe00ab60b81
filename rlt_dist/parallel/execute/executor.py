"""Carry out one stage's instructions."""

import time
from collections.abc import Sequence
from itertools import islice
from typing import Protocol

from torch import Tensor

from rlt_dist.parallel.execute.channel import Channel
from rlt_dist.parallel.schedule.instructions import Instruction, Message, Receive, Send, Work
from rlt_dist.parallel.schedule.simulate import Timed


class Stage(Protocol):
    """What a stage's instructions are carried out on."""

    def do(self, work: Work) -> None:
        """Work on the stage's own layers, for one micro-batch."""

    def give(self, message: Message) -> Tensor:
        """The value that a message takes to another stage."""

    def take(self, message: Message, value: Tensor) -> None:
        """A value that a message has brought."""

    def shape(self, message: Message) -> tuple[int, ...]:
        """Of the value that a message will bring."""


def execute(instructions: Sequence[Instruction], stage: Stage, channel: Channel) -> list[Timed]:
    """Carry out the list from front to back, and nothing else.

    Returns:
        each instruction with its start and end, in seconds of this machine's monotonic clock.
    """
    done = []
    coming = (what.message for what in instructions if isinstance(what, Receive))

    def expect(count: int) -> None:
        for message in islice(coming, count):
            channel.expect(message, stage.shape(message))

    expect(channel.ahead)
    for instruction in instructions:
        start = time.monotonic()
        match instruction:
            case Work():
                stage.do(instruction)
            case Send(message):
                channel.send(message, stage.give(message))
            case Receive(message):
                expect(1)
                stage.take(message, channel.receive(message))
        done.append(Timed(instruction, start, time.monotonic()))
    channel.flush()
    return done
