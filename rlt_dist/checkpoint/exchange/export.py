"""Writing a checkpoint's model as safetensors, for others and for `import`."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from rlt_dist.checkpoint.exchange.about import About
from rlt_dist.checkpoint.exchange.card import Written, model_card
from rlt_dist.checkpoint.exchange.names import aliases, other_model
from rlt_dist.checkpoint.exchange.source import ABOUT, CARD, INDEX, WEIGHTS
from rlt_dist.checkpoint.load import load_tensors, model_shapes, stored_tensors
from rlt_dist.checkpoint.run_folder import TOKENIZER
from rlt_dist.checkpoint.saved_run import SavedRun
from rlt_dist.parallel.plan.layout import parameter_shapes
from rlt_dist.util.errors import UserError
from rlt_dist.util.files import atomic_folder

_MODEL = "model."
"""What a parameter's name in a checkpoint begins with."""


@dataclass(frozen=True)
class _Parameter:
    """Shape and type of what is to be written."""

    shape: torch.Size
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


def export_model(
    saved: SavedRun, output: Path, dtype: torch.dtype | None, shard_bytes: int
) -> Written:
    """Write a checkpoint's model into a new folder, which is whole or not there.

    One file's tensors are in memory at a time: at most `shard_bytes`, or one larger tensor.

    Args:
        dtype: of what is written; None: as it is stored.
        shard_bytes: the most that one file may hold, unless a single tensor is larger.

    Raises:
        UserError: the output holds something already, or the checkpoint another model than its
            run folder says.
    """
    about = About(model=saved.config.model, vocabulary=saved.tokenizer.vocabulary)
    parameters = _parameters(saved, dtype)
    shards = _shards({name: each.bytes for name, each in parameters.items()}, shard_bytes)
    files = _file_names(len(shards))
    metadata = {
        "format": "pt",
        "tied": json.dumps(aliases(saved.config.model, parameters)),
    }
    written = Written(
        parameters=sum(each.shape.numel() for each in parameters.values()),
        bytes=sum(each.bytes for each in parameters.values()),
        dtypes=sorted({str(each.dtype).removeprefix("torch.") for each in parameters.values()}),
        files=files,
    )
    with atomic_folder(output) as folder:
        (folder / ABOUT).write_text(about.to_json())
        for file, names in zip(files, shards, strict=True):
            wished = {name: parameters[name] for name in names}
            _write(folder / file, _read(saved.folder, wished), metadata)
            # safetensors lets nobody but the owner read them.
            shutil.copymode(folder / ABOUT, folder / file)
        if len(files) > 1:
            (folder / INDEX).write_text(_index(files, shards, written.bytes))
        (folder / CARD).write_text(model_card(saved, written, output.resolve().name))
        saved.tokenizer.save(folder / TOKENIZER)
    return written


def _parameters(saved: SavedRun, dtype: torch.dtype | None) -> dict[str, _Parameter]:
    """What a checkpoint holds of the model of its run folder, in the model's order."""
    stored = stored_tensors(saved.folder)
    shapes = parameter_shapes(saved.config.model, saved.tokenizer.vocabulary)
    trouble = other_model(model_shapes(stored), shapes)
    if trouble is not None:
        raise UserError(f"{saved.folder}: {trouble}")
    return {
        name: _Parameter(shape, dtype or stored[f"{_MODEL}{name}"][1])
        for name, shape in shapes.items()
    }


def _shards(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Names in their order, cut into as many runs as needed for each to stay within the limit."""
    shards: list[list[str]] = [[]]
    held = 0
    for name, size in sizes.items():
        if shards[-1] and held + size > limit:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += size
    return shards


def _file_names(count: int) -> list[str]:
    if count == 1:
        return [WEIGHTS]
    return [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]


def _index(files: Sequence[str], shards: Sequence[Sequence[str]], total: int) -> str:
    pairs = zip(files, shards, strict=True)
    where = {name: file for file, names in pairs for name in names}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2) + "\n"


def _read(checkpoint: Path, wished: Mapping[str, _Parameter]) -> dict[str, Tensor]:
    tensors = {name: torch.empty(each.shape, dtype=each.dtype) for name, each in wished.items()}
    load_tensors(checkpoint, {f"{_MODEL}{name}": tensor for name, tensor in tensors.items()})
    return tensors


def _write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    try:
        save_file(tensors, path, metadata)
    except SafetensorError as error:  # it has no OSError of its own
        raise UserError(f"{path}: cannot be written: {error}; make room") from None
