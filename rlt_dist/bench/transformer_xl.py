"""A step of training of Transformer-XL, behind a full memory.

Variants:

- `straightforward`: the paper's equations written down plainly (`straightforward.py`);
- `ours`: the project's model;
- `floor`: the matrix products alone, as torch runs them: each projection and its gradients, queries
  of the segment only and no gradient into the memory; attention with every key, seen or not, for
  contents, for positions and for values; the head. Not counted: moving position scores to their
  keys, softmax, norms, the loss, and allocation.
"""

from dataclasses import dataclass

from rlt_dist.bench.compare import FLOOR, Bench, Variant
from rlt_dist.bench.products import (
    Product,
    Products,
    attention,
    forward,
    linear,
    towards_input,
    towards_weight,
)
from rlt_dist.bench.steps import TrainingStep, model_of
from rlt_dist.bench.straightforward import StraightforwardXL
from rlt_dist.bench.timing import Step
from rlt_dist.config.model import TransformerXLConfig


@dataclass(frozen=True)
class TransformerXLShape:
    """A model and the segment it is trained on: lanes B, tokens T."""

    config: TransformerXLConfig
    vocabulary: int
    lanes: int
    tokens: int


def ours_step(shape: TransformerXLShape) -> Step:
    """The project's model."""
    return TrainingStep(model_of(shape.config, shape.vocabulary), shape.lanes, shape.tokens)


def straightforward_step(shape: TransformerXLShape) -> Step:
    """The plain implementation with the same parameters."""
    model = StraightforwardXL(shape.config, shape.vocabulary)
    model.load_state_dict(model_of(shape.config, shape.vocabulary).state_dict())
    return TrainingStep(model, shape.lanes, shape.tokens)


def floor_step(shape: TransformerXLShape) -> Step:
    """The matrix products alone."""
    return Products(products(shape))


def products(shape: TransformerXLShape) -> list[Product]:
    """The matrix products of a step behind a full memory, forward and backward."""
    config, rows, d = shape.config, shape.lanes * shape.tokens, shape.config.d_model
    keys, inner = config.memory_len + shape.tokens, config.heads * config.head_width
    contents_and_values = attention(
        shape.lanes * config.heads, shape.tokens, keys, config.head_width
    )
    positions = [
        kind(rows, config.head_width, keys, config.heads)
        for kind in (forward, towards_input, towards_weight)
    ]
    key_or_value = [
        forward(shape.lanes * keys, d, inner),
        towards_input(rows, d, inner),
        towards_weight(shape.lanes * keys, d, inner),
    ]
    layer = [
        *linear(rows, d, inner),
        *2 * key_or_value,
        forward(keys, d, inner),
        towards_weight(keys, d, inner),
        *contents_and_values,
        *positions,
        *linear(rows, inner, d),
        *linear(rows, d, config.d_inner),
        *linear(rows, config.d_inner, d),
    ]
    return [*config.layers * layer, *linear(rows, d, shape.vocabulary)]


BENCH = Bench(
    name="transformer_xl",
    reference="straightforward",
    shapes={
        "base": TransformerXLShape(
            TransformerXLConfig(d_model=256, heads=4, d_inner=1024, layers=4, memory_len=128),
            vocabulary=10_000,
            lanes=8,
            tokens=128,
        )
    },
    variants={
        "straightforward": Variant(straightforward_step),
        "ours": Variant(ours_step),
        FLOOR: Variant(floor_step),
    },
)
