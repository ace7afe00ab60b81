"""Evaluation of Transformer-XL: the carried memory against a window recomputed for every token.

The model has enwik8's base shape (Dai et al., ACL 2019), one lane, `same_length`; a shape's name
says how many tokens each token attends to, as in the paper's table of speeds. Seconds are those of
one token. Variants:

- `window`: all those tokens run through the model afresh, for the last one's -log p;
- `cached`: a segment behind a full memory, every token scored.
"""

from dataclasses import dataclass

from rlt_dist.bench.compare import Bench, Variant
from rlt_dist.bench.steps import CachedEvaluation, WindowEvaluation, model_of
from rlt_dist.bench.timing import Step
from rlt_dist.config.model import TransformerXLConfig
from rlt_dist.models.transformer_xl.model import TransformerXL

SEGMENT = 128


@dataclass(frozen=True)
class EvaluationShape:
    """A model with the memory that it evaluates with."""

    config: TransformerXLConfig
    vocabulary: int


def window_step(shape: EvaluationShape) -> Step:
    """One token."""
    return WindowEvaluation(_model(shape))


def cached_step(shape: EvaluationShape) -> Step:
    """One segment."""
    return CachedEvaluation(_model(shape), SEGMENT)


def _model(shape: EvaluationShape) -> TransformerXL:
    model = model_of(shape.config, shape.vocabulary)
    assert isinstance(model, TransformerXL)
    return model


def _enwik8(length: int) -> EvaluationShape:
    config = TransformerXLConfig(
        d_model=512, heads=8, d_inner=2048, layers=12, memory_len=length, same_length=True
    )
    return EvaluationShape(config, vocabulary=204)


BENCH = Bench(
    name="evaluation",
    reference="window",
    shapes={f"len{length}": _enwik8(length) for length in (800, 1800, 2800, 3800)},
    variants={"window": Variant(window_step), "cached": Variant(cached_step, lambda _: SEGMENT)},
)
