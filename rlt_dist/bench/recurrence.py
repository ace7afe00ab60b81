"""The recurrence's backends: a whole step of training, behind a state that was carried in.

A step is forward, loss and backward of one segment. `memory_len` is the segment's length, so every
segment but the first reads as much memory as the next. Variants:

- `reference`, `python`, `native`: the backends of the whole model, RLT-1;
- `native_chunk32`: native with `recompute.decoder_chunk: 32`;
- `rlt0`: the same model without feedback under plain autograd, so the decoder is no loop;
- `core`, `core_chunk32`: native's decoder and its feedback alone, between given encoder outputs
  and gradients;
- `floor`: the matrix products of native's whole step alone (`floor.py`).
"""

from dataclasses import dataclass
from functools import partial

import torch

from rlt_dist.bench.compare import FLOOR, Bench, Variant
from rlt_dist.bench.floor import Floor
from rlt_dist.bench.steps import TrainingStep, model_of
from rlt_dist.bench.timing import Step
from rlt_dist.config.model import RltConfig
from rlt_dist.ops.recurrence.dispatch import Kind, Recurrence
from rlt_dist.ops.recurrence.problem import (
    FeedbackInputs,
    LayerMasks,
    LayerWeights,
    Memory,
    Operands,
    Plan,
    Shape,
)
from rlt_dist.ops.rotary import rotary_tables

VOCABULARY = 256


@dataclass(frozen=True)
class RecurrenceShape:
    """A model and the segment it is trained on: lanes B, tokens T, behind as many or `past`."""

    config: RltConfig
    lanes: int
    tokens: int
    past: int | None = None

    @property
    def before(self) -> int:
        """Tokens of the document before the segment, all of them in the memory."""
        return self.tokens if self.past is None else self.past


def _shape(d: int, lanes: int, tokens: int) -> RecurrenceShape:
    config = RltConfig(
        d_model=d,
        heads=4,
        ffn=round(8 / 3 * d),
        encoder_layers=4,
        decoder_layers=4,
        window=8,
        memory_len=tokens,
    )
    return RecurrenceShape(config, lanes, tokens)


def whole_step(recurrence: Recurrence, feedback: int, shape: RecurrenceShape) -> Step:
    """A step of training of the whole model."""
    config = shape.config.model_copy(update={"feedback": feedback})
    return TrainingStep(model_of(config, VOCABULARY, recurrence), shape.lanes, shape.tokens)


def core_step(recurrence: Recurrence, shape: RecurrenceShape) -> Step:
    """Forward and backward of the decoder layers and the feedback alone, all gradients formed."""
    recurrence.prepare(Kind("cpu"))
    plan, operands = plan_of(shape), operands_of(shape)
    tensors = [tensor.requires_grad_() for tensor in operands.flat()]

    def step() -> None:
        s, _ = recurrence.run(plan, operands)
        torch.autograd.grad(s, tensors, torch.ones_like(s), allow_unused=True)

    return step


def floor_step(shape: RecurrenceShape) -> Step:
    """The matrix products alone."""
    return Floor(shape.config, VOCABULARY, shape.lanes, shape.tokens)


def plan_of(shape: RecurrenceShape) -> Plan:
    """A segment inside a document, which began `shape.before` tokens before."""
    config, (lanes, tokens) = shape.config, (shape.lanes, shape.tokens)
    position = torch.arange(shape.before, shape.before + tokens)[:, None].repeat(1, lanes)
    tables = rotary_tables(position, config.head_width, config.rotary_base, torch.float32)
    layers = config.decoder_layers
    return Plan(
        shape=Shape(
            config.heads, config.key_value_heads, config.head_width, config.window, config.eps
        ),
        position=position,
        cos=tables[0],
        sin=tables[1],
        feedback=config.feedback,
        past=shape.before,
        carried=config.window - 1,
        reach=config.memory_len,
        groups=[config.memory_group(j) for j in range(layers)],
        masks=[LayerMasks()] * layers,
        alpha=config.alpha,
    )


def operands_of(shape: RecurrenceShape) -> Operands:
    """Made-up values of all that has a gradient."""
    config, (lanes, tokens, d) = shape.config, (shape.lanes, shape.tokens, shape.config.d_model)
    kv, width, queries = config.key_value_heads, config.head_width, config.heads * config.head_width
    memory = (lanes, kv, shape.before + tokens, width)

    def weight(outputs: int, inputs: int) -> torch.Tensor:
        return torch.randn(outputs, inputs) * inputs**-0.5

    return Operands(
        e=torch.randn(tokens, lanes, d),
        fed=FeedbackInputs(
            gate_e=torch.randn(tokens, lanes, d),
            weight=weight(2 * d, d),
            initial=torch.randn(lanes, d),
            s=torch.randn(lanes, d),
            boundary=torch.randn(lanes, d),
        ),
        memories=[
            Memory(torch.randn(memory), torch.randn(memory)) for _ in range(config.memory_groups)
        ],
        windows=[
            torch.randn(config.window - 1, lanes, 2, kv, width)
            for _ in range(config.decoder_layers)
        ],
        weights=[
            LayerWeights(
                qkv=weight(queries + 2 * kv * width, d),
                o=weight(d, queries),
                cross_q=weight(queries, d),
                cross_o=weight(d, queries),
                gate_up=weight(2 * config.ffn, d),
                down=weight(d, config.ffn),
            )
            for _ in range(config.decoder_layers)
        ],
    )


BENCH = Bench(
    name="recurrence",
    reference="reference",
    shapes={
        "d256": _shape(256, lanes=8, tokens=128),
        "d128": _shape(128, lanes=4, tokens=256),
        "d512": _shape(512, lanes=32, tokens=40),
        "d256_b16": _shape(256, lanes=16, tokens=128),
        "d256_t512": _shape(256, lanes=8, tokens=512),
    },
    variants={
        "reference": Variant(partial(whole_step, Recurrence("reference"), 1)),
        "python": Variant(partial(whole_step, Recurrence("python", "none"), 1)),
        "native": Variant(partial(whole_step, Recurrence("native", "none"), 1)),
        "native_chunk32": Variant(partial(whole_step, Recurrence("native", 32), 1)),
        "rlt0": Variant(partial(whole_step, Recurrence("reference"), 0)),
        "core": Variant(partial(core_step, Recurrence("native", "none"))),
        "core_chunk32": Variant(partial(core_step, Recurrence("native", 32))),
        FLOOR: Variant(floor_step),
    },
)
