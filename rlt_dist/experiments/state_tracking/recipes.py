"""What is trained on each task, as data; and the models compared, of as many parameters each.

Those of parity and five_state are as large as the small models of arXiv 2610.07591, and like them
trained on at most 32 operations. Layers, heads, windows, rates and the mixtures of lengths are this
project's choices. Long programs are frequent in every step: otherwise attention's shortcut through
short ones is learned instead of the recurrence.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from rlt_dist.config.load import Strict, apply_override, validate
from rlt_dist.config.model import GruConfig, ModelConfig, RltConfig
from rlt_dist.config.run import RunConfig
from rlt_dist.parallel.plan.counts import parameters_of

_LOOKS = 10
"""Validations and checkpoints of a run."""

_WIDEST = 1 << 14
"""A size at which any model has more parameters than the largest recipe's RLT-1."""


Lengths = Annotated[tuple[PositiveInt, ...], Field(min_length=1)]
Width = Annotated[int, Field(gt=0, le=1 << 12)]


class Recipe(Strict):
    """How a task is learned."""

    lengths: Lengths
    """Of the programs in every row of a batch, each row in an order of its own."""
    tested: Lengths
    """Lengths of the programs that a trained model is tested by."""
    width: Width
    """With ffn, RLT-1's; the other models are given as many parameters."""
    ffn: Width
    heads: PositiveInt = 2
    window: PositiveInt = 4
    alpha: float = 0.5
    rate: PositiveFloat
    """Peak learning rate; a twentieth of it at the last step."""
    warmup: PositiveInt = 200
    steps: PositiveInt
    reach: Literal["trained", "whole"] = "trained"
    """How far back a token of a longer program than those trained on reaches, where a state is
    carried on: as far as in training, which costs as much for each token; or to its start."""
    lanes: PositiveInt = 128
    """Rows of a batch."""
    rows: PositiveInt
    """That are drawn, at most; each is learned from in several epochs."""

    @model_validator(mode="after")
    def _check(self) -> "Recipe":
        if self.rows % self.lanes:
            raise ValueError(f"lanes {self.lanes} do not divide rows {self.rows}")
        return self


_BITS: dict[str, Any] = {"width": 32, "ffn": 136, "rate": 3e-3, "steps": 500, "rows": 1 << 14}
_BITS |= {"lengths": (4, 8, 16, 32), "tested": (16, 32, 64, 128, 256, 512, 1024)}
_GROUP: dict[str, Any] = {"width": 64, "ffn": 172, "lanes": 64}
_GROUP |= {"tested": (16, 32, 64, 128, 256, 512)}
_VALUE: dict[str, Any] = {"width": 64, "ffn": 172, "rate": 2e-3, "steps": 5000, "rows": 1 << 15}
_VALUE |= {"lengths": (3, 5, 7, 11, 15, 23, 31, 39), "tested": (15, 31, 39, 63)}

RECIPES: Mapping[str, Mapping[str, Any]] = {
    "parity": _BITS,
    "five_state": _BITS,
    "s5_swaps": _GROUP | {"lengths": (8, 16, 24, 32), "rate": 2e-3, "steps": 4000, "rows": 1 << 15},
    # Narrower ones, and larger batches for fewer steps, often stay with a coset of a subgroup.
    "s5": _GROUP
    | {"width": 96, "ffn": 256, "alpha": 1.0, "rate": 2e-3, "lanes": 32}
    | {"lengths": (2, 2, 4, 4, 8, 8, 16, 32), "steps": 12000, "rows": 1 << 16},
    "mod5": _VALUE,
    "mod5_brackets": _VALUE,
    "addition": _VALUE | {"lengths": (1, 2, 3, 4, 5, 6, 7, 8), "tested": (4, 8, 16, 32)},
}
"""By task, the values of its `Recipe`."""

_OWN: Mapping[str, Mapping[str, Any]] = {
    "rlt1": {},
    "rlt2": {"feedback": 4},
    "rlt0": {"feedback": 0},
    "token": {"feedback_from": "token"},
    "transformer": {"encoder_layers": 4, "decoder_layers": 0, "feedback": 0},
}
"""By model, what it has of its own, the size left out that is fitted."""

MODELS = (*_OWN, "gru")


def recipe_of(task: str, changes: Iterable[str]) -> Recipe:
    """A task's recipe.

    Args:
        changes: values that replace its own, written `KEY=VALUE`.

    Raises:
        UserError: a change is wrong.
    """
    content = dict(RECIPES[task])
    for change in changes:
        apply_override(content, change)
    return validate(content, Recipe, f"the recipe of {task}")


def run_config(
    folder: Path,
    corpus: Path,
    seed: int,
    recipe: Recipe,
    model: str,
    vocabulary: int,
    sizes: Sequence[int],
) -> RunConfig:
    """A run of a recipe, whose segments are rows.

    Args:
        folder: the run's.
        sizes: tokens of each program of a row, without its end; as far back as that of the longest
            a token reaches.

    Raises:
        UserError: the recipe does not make a model.
    """
    looks = max(1, recipe.steps // _LOOKS)
    content: dict[str, Any] = {
        "run_folder": str(folder),
        "model": fitted(model, recipe, vocabulary, max(sizes)).model_dump(),
        "data": {"path": str(corpus), "lanes": recipe.lanes, "segment": sum(sizes) + len(sizes)},
        "optimizer": {"learning_rate": recipe.rate},
        "schedule": {"warmup": min(recipe.warmup, recipe.steps), "minimum": recipe.rate / 20},
        "train": {"steps": recipe.steps, "seed": seed},
        "validation": {"every": looks, "segments": 1},
        "checkpoint": {"every": looks, "keep": 1},
    }
    return validate(content, RunConfig, f"{model} by the recipe")


def fitted(model: str, recipe: Recipe, vocabulary: int, memory_len: int) -> ModelConfig:
    """A model with as many parameters as the recipe's RLT-1, or as few more as its size allows.

    Raises:
        UserError: the recipe does not make a model.
    """

    def sized(name: str, size: int) -> ModelConfig:
        if name == "gru":
            return GruConfig(d_model=size)
        content = {
            "d_model": recipe.width,
            "heads": recipe.heads,
            "ffn": size,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "window": recipe.window,
            "memory_len": memory_len,
            "alpha": recipe.alpha,
        }
        return validate({**content, **_OWN[name]}, RltConfig, f"{name} by the recipe")

    def parameters(size: int) -> int:
        return parameters_of(sized(model, size), vocabulary)

    wanted = parameters_of(sized("rlt1", recipe.ffn), vocabulary)
    candidates = range(1, _WIDEST)
    return sized(model, candidates[bisect_left(candidates, wanted, key=parameters)])
