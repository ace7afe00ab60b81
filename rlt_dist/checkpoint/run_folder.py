"""The folder of one run, and what may change between its starts.

config.yaml       the resolved configuration
tokenizer.json    the tokenizer, so that the folder can be used without the corpus
metrics.jsonl     one object a step
tensorboard/      the same for TensorBoard
checkpoints/      step-00000100, ...
evaluations.jsonl what `rlt-dist eval` measured
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlt_dist.config.load import load_typed
from rlt_dist.config.run import RunConfig
from rlt_dist.util.errors import UserError
from rlt_dist.util.files import write_atomic

CONFIG, TOKENIZER, METRICS = "config.yaml", "tokenizer.json", "metrics.jsonl"
CHECKPOINTS, TENSORBOARD, EVALUATIONS = "checkpoints", "tensorboard", "evaluations.jsonl"

_FIXED = (
    "model",
    "data.lanes",
    "data.segment",
    "data.max_document",
    "state",
    "train.seed",
    "train.precision",
)
"""Changing one of these makes another run of it: same data order, state or parameters no more."""


def claim(config: RunConfig, tokenizer: Path) -> list[str]:
    """Make the run folder and record the configuration in it.

    Returns:
        what differs from the configuration that the folder was last started with.

    Raises:
        UserError: the folder holds the checkpoints of another run.
    """
    folder = config.run_folder
    changes = []
    if (folder / CONFIG).is_file() and has_checkpoints(folder):
        changes = _changes(load_typed(folder / CONFIG, RunConfig), config)
        refused = [change for key, change in changes if key.startswith(_FIXED)]
        if refused:
            raise UserError(
                f"{folder}: its checkpoints belong to another run ({'; '.join(refused)}); "
                "give another run_folder, or undo the change"
            )
    elif folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: is a file; give another run_folder")
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / CONFIG, config.to_yaml())
    write_atomic(folder / TOKENIZER, tokenizer.read_bytes())
    return [change for _, change in changes]


def has_checkpoints(folder: Path) -> bool:
    """Whether anything that looks like a checkpoint is there."""
    return any((folder / CHECKPOINTS).glob("step-*"))


def read_records(path: Path) -> list[dict[str, Any]]:
    """The objects of a `.jsonl` file; a last line cut short by a kill is left out."""
    if not path.is_file():
        return []
    *whole, _ = path.read_text().split("\n")
    return [json.loads(line) for line in whole]


def _changes(old: RunConfig, new: RunConfig) -> list[tuple[str, str]]:
    before, after = dict(_leaves(old.model_dump())), dict(_leaves(new.model_dump()))
    keys = dict.fromkeys([*before, *after])
    return [
        (key, f"{key}: {before.get(key)} -> {after.get(key)}")
        for key in keys
        if before.get(key) != after.get(key)
    ]


def _leaves(content: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
