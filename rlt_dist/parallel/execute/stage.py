"""What the stages of both models have in common: micro-batches, and values by name."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from rlt_dist.models.rlt.model import RecurrentLoopedTransformer
from rlt_dist.models.state import State
from rlt_dist.models.transformer_xl.model import TransformerXL
from rlt_dist.ops.noise import Noise
from rlt_dist.parallel.plan.placement import Placement
from rlt_dist.parallel.schedule.instructions import Message, Value, Work

M = TypeVar("M", RecurrentLoopedTransformer, TransformerXL)

Precision = Callable[[], AbstractContextManager[Any]]
Head = Callable[[int, Tensor], None]
"""Given a micro-batch's number and the model's outputs [b, T, d] for it; where it gives them a
gradient, backward goes on from there."""


class Place(NamedTuple):
    """Where a value was made: for which micro-batch and step, on which stage."""

    value: Value
    micro: int
    step: int
    stage: int


@dataclass
class MicroBatch:
    """Some lanes of a batch, on their way through a stage.

    Attributes:
        tokens: int64 [b, T].
        document_start: bool [b, T].
        state: what the lanes carried here, of this stage's layers.
        noise: names the dropout masks; None: nothing drops.
        carried: the state after the segment, as far as it is known.
    """

    tokens: Tensor
    document_start: Tensor
    state: State
    noise: Noise | None
    carried: State = field(default_factory=dict)

    def carry(self, state: State) -> None:
        """Part of the state after the segment, cut off from its gradients."""
        self.carried |= {name: tensor.detach() for name, tensor in state.items()}


class BaseStage(Generic[M]):
    """Looks work up by its kind, and keeps values until they are used.

    Work before the layers is here: what every piece sees of a micro-batch, and the embedding.
    """

    def __init__(
        self,
        model: M,
        placement: Placement,
        micro_batches: list[MicroBatch],
        precision: Precision,
        head: Head,
    ) -> None:
        """
        Args:
            model: the stage's pieces.
            precision: makes the context that the model's forward runs in.
        """
        self.placement, self.micro_batches = placement, micro_batches
        self._model: M = model
        self._precision, self._give_output = precision, head
        self._values: dict[Place, Tensor] = {}
        self._segments: dict[int, Any] = {}
        self._embedded: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def number(self) -> int:
        """Which stage it is."""
        return self.placement.stage

    def finish(self) -> None:
        """What is done once, after all instructions."""

    def do(self, work: Work) -> None:
        """Carry work out by the method of its kind's name."""
        getattr(self, f"_do_{work.kind.replace(' ', '_')}")(work)

    def give(self, message: Message) -> Tensor:
        """A value of this stage, for the only stage that needs it; e alone goes to all."""
        place = Place(message.value, message.micro, message.step, self.number)
        return self._values[place] if message.value == Value.E else self._values.pop(place)

    def take(self, message: Message, value: Tensor) -> None:
        """Keep what came from another stage."""
        self._values[Place(message.value, message.micro, message.step, message.source)] = value

    def shape(self, message: Message) -> tuple[int, ...]:
        """[b, T, d]: that of a value that covers a segment."""
        return (*self.micro_batches[message.micro].tokens.shape, self._model.config.d_model)

    def _segment(self, micro: int) -> Any:
        """What every piece sees of a micro-batch, made once."""
        if micro not in self._segments:
            own = self.micro_batches[micro]
            self._segments[micro], counts = self._model.begin(
                own.document_start, own.state, own.noise
            )
            own.carry(counts)
        return self._segments[micro]

    def _do_embed(self, work: Work) -> None:
        tokens = self.micro_batches[work.micro].tokens
        with self._precision():
            embedded = self._model.embedded(tokens, self._segment(work.micro))
        self._embedded[work.micro] = embedded, leaf(embedded)

    def _do_embed_backward(self, work: Work) -> None:
        embedded, given = self._embedded.pop(work.micro)
        torch.autograd.backward(embedded, gradient(given))

    def _layer_input(self, work: Work) -> Tensor:
        """What the first layer here is given, where a graph of its own begins."""
        if self.placement.first:
            embedded = self._embedded
            learns = torch.is_grad_enabled()
            _, given = embedded[work.micro] if learns else embedded.pop(work.micro)
            return given
        return leaf(self._use(Value.X, work, self.number - 1))

    def _put(self, value: Value, work: Work, tensor: Tensor, step: int = 0) -> None:
        self._values[Place(value, work.micro, step, self.number)] = tensor.detach()

    def _use(self, value: Value, work: Work, stage: int, step: int = 0) -> Tensor:
        """A value that nothing needs after this."""
        return self._values.pop(Place(value, work.micro, step, stage))


def leaf(tensor: Tensor) -> Tensor:
    """The tensor where a graph of its own begins, to be given a gradient."""
    return tensor.detach().requires_grad_(torch.is_grad_enabled())


def gradient(tensor: Tensor) -> Tensor:
    """What a leaf was given; zeros where nothing came back to it."""
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
