"""A trained model out of a run folder or one of its checkpoints."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlt_dist.checkpoint.load import load_parameters
from rlt_dist.checkpoint.saved_run import open_saved
from rlt_dist.config.load import validate
from rlt_dist.config.run import RunConfig
from rlt_dist.data.tokenizers.tokenizer import Tokenizer
from rlt_dist.inference.forward import parameter_dtype, recurrence
from rlt_dist.models.build import Model, build_model
from rlt_dist.util.errors import UserError


@dataclass(frozen=True)
class Trained:
    """A model with what it was trained by.

    Attributes:
        run_folder: where the run lives.
        step: optimizer steps the parameters have seen.
        config: the run's configuration, with the choices made for this use applied.
    """

    run_folder: Path
    step: int
    config: RunConfig
    model: Model
    tokenizer: Tokenizer


def load_trained(path: Path, choices: dict[str, Any] | None = None) -> Trained:
    """Load a run folder's newest whole checkpoint, or the checkpoint folder that is named.

    Args:
        choices: keys of the model that hold for this use instead, such as a longer memory_len.

    Raises:
        UserError: there is no whole checkpoint, it does not fit its run folder, or a choice is
            not one of this model's keys.
    """
    saved = open_saved(path)
    config, tokenizer = _with_choices(saved.config, choices or {}), saved.tokenizer
    model = build_model(
        config.bounded_model, tokenizer.vocabulary, parameter_dtype(config), recurrence(config)
    )
    load_parameters(saved.folder, model)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return Trained(saved.run_folder, saved.facts.step, config, model.to(device).eval(), tokenizer)


def _with_choices(config: RunConfig, choices: dict[str, Any]) -> RunConfig:
    content = config.model_dump()
    for key in choices:
        if key not in content["model"]:
            raise UserError(f"a model of kind {config.model.kind} has no {key} to choose")
    content["model"] |= choices
    return validate(content, RunConfig, "choices for this use")
