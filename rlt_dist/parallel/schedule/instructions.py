"""What a stage can be told to do.

A stage's list is run from front to back. It is complete: whatever one stage's work needs of another
stage's is a `Send` there and a `Receive` here. What stays on a stage, such as its layers' state,
activations and weights, is the executor's to keep, by micro-batch.
"""

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """Kinds of work, each on the stage's own layers and for one micro-batch."""

    EMBED = "embed"
    """First stage: embed the tokens."""
    FORWARD = "forward"
    """Transformer-XL's layers."""
    ENCODE = "encode"
    """Encoder layers, over the whole segment."""
    MEMORY = "memory"
    """Project e to the memory that this stage's decoder layers read."""
    DECODE = "decode"
    """One chunk step of the decoder layers; the first stage merges the fed-back state before."""
    CARRY = "carry"
    """First stage: the last step's s is here, keep the fed-back state for the next segment.

    Its `step` is the number of steps: the one that would come next.
    """
    HEAD = "head"
    """Last stage: the loss of the whole segment and, in training, its gradients at once."""
    BACKWARD = "backward"
    """Transformer-XL's layers, weight gradients included."""
    REPLAY = "replay"
    """Compute again, in one batched pass, what the backward of these steps needs."""
    DECODE_BACKWARD = "decode backward"
    """Activation gradients of one chunk step; the first stage goes back through the merge."""
    MEMORY_GRADIENT = "memory gradient"
    """Add up the gradient of the memory's entries, from what the backward of these steps left."""
    WEIGHTS = "weights"
    """Add up the weight gradients of the decoder layers, and of the merge, likewise."""
    MEMORY_BACKWARD = "memory backward"
    """This stage's part of the gradient of e: through the memory, and through the first's merge."""
    ENCODE_BACKWARD = "encode backward"
    """Encoder layers, weight gradients included; the last stage adds up all parts of de before."""
    EMBED_BACKWARD = "embed backward"
    """First stage: the embedding's gradient."""


class Value(StrEnum):
    """What crosses stages, for b lanes, T tokens of a segment, C of a chunk, width d."""

    X = "x"
    """[b, T, d], a stack's activations, to the next stage."""
    E = "e"
    """[b, T, d], the encoder's output, from the last stage to every other."""
    U = "u"
    """[C, b, d], a chunk step's activations between decoder layers, to the next stage."""
    S = "s"
    """[b, d], the decoder's output at each lane's last token of a step, from last to first."""
    DX = "dx"
    DE = "de"
    """A part of the gradient of e, from every stage to the last."""
    DU = "du"
    DS = "ds"
    """The gradient of a step's fed-back s, from the first stage to the last."""


@dataclass(frozen=True, slots=True)
class Work:
    """Something to compute.

    Attributes:
        micro: number of the micro-batch.
        step: the first chunk step that it covers.
        count: how many it covers; what covers a whole segment covers all of its steps. In a model
            without chunks the segment is one step.
    """

    kind: Kind
    micro: int
    step: int = 0
    count: int = 1

    def __str__(self) -> str:
        last = f"..{self.step + self.count - 1}" if self.count > 1 else ""
        return f"{self.kind} {self.micro}:{self.step}{last}"


@dataclass(frozen=True, slots=True)
class Message:
    """A value on its way; no two messages of a schedule are equal.

    Attributes:
        step: the chunk step that it belongs to: u and du are of the step they are in, s is the
            output of its step and ds the gradient of that output. 0 for what has no steps.
        source, target: stages.
    """

    value: Value
    micro: int
    step: int
    source: int
    target: int

    def __str__(self) -> str:
        return f"{self.value} {self.micro}:{self.step}"


@dataclass(frozen=True, slots=True)
class Send:
    """Hand a value over, without waiting for the target to take it."""

    message: Message

    def __str__(self) -> str:
        return f"send {self.message} to {self.message.target}"


@dataclass(frozen=True, slots=True)
class Receive:
    """Wait for a value: the next one that the source has sent here."""

    message: Message

    def __str__(self) -> str:
        return f"receive {self.message} from {self.message.source}"


Instruction = Work | Send | Receive
Schedule = tuple[tuple[Instruction, ...], ...]
"""By stage, its instructions for one optimizer step."""
