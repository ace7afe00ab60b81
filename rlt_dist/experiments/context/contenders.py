"""The models that are compared: as many parameters, the same text, the same number of steps."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlt_dist.config.load import validate
from rlt_dist.config.model import ModelConfig, RltConfig, TransformerXLConfig
from rlt_dist.config.run import RunConfig
from rlt_dist.data.corpus.index import CorpusIndex
from rlt_dist.parallel.plan.counts import parameters_of

SEGMENT, LANES = 64, 32
"""T and G of all runs. T is the plain Transformer's context, and Transformer-XL's memory."""

_REACH = 2 * SEGMENT
"""How far Transformer-XL's attention goes in training, memory and segment together; RLT's, too."""
_WIDTH: dict[str, Any] = {"d_model": 128, "heads": 4}
_ROUND = 8
"""Inner widths are multiples of it."""


@dataclass(frozen=True)
class Kind:
    """What is particular about a model.

    Attributes:
        model: of an inner width of the feed-forward.
        data: how it reads, beside what is alike for all.
        choices: of the model when it is measured; its results then do not depend on where
            segments are cut.
        window: the longest context that it can have; None: any.
        memories: memory lengths that it is measured with beside; none where it carries nothing.
    """

    model: Callable[[int], ModelConfig]
    data: Mapping[str, Any] = field(default_factory=dict)
    choices: Mapping[str, Any] = field(default_factory=dict)
    window: int | None = None
    memories: tuple[int, ...] = (16, 32, 64, 128, 256, 512)


@dataclass(frozen=True)
class Contender:
    """A model as it is trained and measured.

    Attributes:
        parameters: how many it has.
    """

    name: str
    kind: Kind
    config: RunConfig
    parameters: int


def contenders(
    names: Sequence[str], corpus: CorpusIndex, runs: Path, steps: int
) -> list[Contender]:
    """The models that are named, each with a run in a folder of its name; RLT sets their size."""
    vocabulary = corpus.tokenizer.vocabulary
    budget = parameters_of(_rlt(), vocabulary)
    found = []
    for name in names:
        kind = KINDS[name]
        model = _matched(kind.model, vocabulary, budget)
        config = _config(runs / name, model, corpus.location, steps, kind.data)
        found.append(Contender(name, kind, config, parameters_of(model, vocabulary)))
    return found


def _rlt(ffn: int = 344) -> ModelConfig:
    """RLT-1."""
    reach = _REACH - 1  # and the token itself
    return RltConfig(
        **_WIDTH, encoder_layers=2, decoder_layers=2, ffn=ffn, memory_len=reach, tie_output=True
    )


def _transformer_xl(inner: int) -> ModelConfig:
    """The paper's, but for the norms' place: post-norm needs thousands of steps of warm-up."""
    return TransformerXLConfig(**_WIDTH, layers=4, d_inner=inner, memory_len=SEGMENT, pre_norm=True)


def _transformer(ffn: int) -> ModelConfig:
    """RLT's encoder alone; its documents are cut at the window."""
    return RltConfig(
        **_WIDTH, encoder_layers=4, decoder_layers=0, ffn=ffn, feedback=0, tie_output=True
    )


KINDS = {
    # Trained queries see 0 .. REACH - 1 tokens back, by their place in the segment; with
    # same_length all see REACH - 1.
    "transformer_xl": Kind(_transformer_xl, choices={"same_length": True, "memory_len": _REACH}),
    "rlt": Kind(_rlt),
    # Nothing is carried: a context of a fixed length, as in the paper's comparison.
    "transformer": Kind(_transformer, data={"max_document": SEGMENT}, window=SEGMENT, memories=()),
}
"""By name, in the order in which they are trained."""


def _matched(make: Callable[[int], ModelConfig], vocabulary: int, budget: int) -> ModelConfig:
    """A model of that many parameters, as nearly as its inner width can have it."""
    base, more = (parameters_of(make(width), vocabulary) for width in (_ROUND, 2 * _ROUND))
    return make(_ROUND * max(1, 1 + round((budget - base) / (more - base))))


def _config(
    run: Path, model: ModelConfig, corpus: str, steps: int, data: Mapping[str, Any]
) -> RunConfig:
    content = {
        "run_folder": run,
        "model": model.model_dump(),
        "data": {"path": corpus, "lanes": LANES, "segment": SEGMENT, **data},
        "optimizer": {"learning_rate": 3e-3},
        "schedule": {"warmup": min(100, steps), "minimum": 3e-4},
        "train": {"steps": steps},
        "validation": {"every": None},
        "checkpoint": {"keep": 2},
    }
    return validate(content, RunConfig, f"the context experiment's {run.name}").resolved()
