"""Reading a checkpoint on any number of processes."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from rlt_dist.checkpoint.contents import Contents, empty_like_stored
from rlt_dist.checkpoint.exchange.names import other_model
from rlt_dist.checkpoint.manifest import checkpoints, latest, verify
from rlt_dist.checkpoint.pieces import PiecesLoader
from rlt_dist.checkpoint.run_folder import CHECKPOINTS
from rlt_dist.mesh.mesh import Mesh
from rlt_dist.models.build import Model
from rlt_dist.parallel.engine.engine import Engine
from rlt_dist.parallel.local import LocalModel
from rlt_dist.util.errors import UserError

Part = Literal["model", "optimizer", "state", "cursors"]

ALL: tuple[Part, ...] = ("model", "optimizer", "state", "cursors")


def load_contents(
    folder: Path,
    start: Contents,
    local: LocalModel,
    mesh: Mesh,
    parts: Sequence[Part] = ALL,
) -> Contents:
    """A checkpoint's numbers of what this process has.

    Args:
        folder: of which `explain.decide` has said that it can be gone on from.
        start: the same of a run that has done no step, which stays as it is; the state that the
            checkpoint left out is taken from it.
        parts: which are taken over; the others are those of `start`.
    """
    stored = stored_tensors(folder)
    found = Contents(
        {name: torch.empty_like(tensor) for name, tensor in start.model.items()},
        {name: torch.empty_like(tensor) for name, tensor in start.optimizer.items()},
        {
            name: empty_like_stored(
                stored[f"state.{name}"][0], tensor, local.plan.state_cut(name), mesh
            )
            for name, tensor in start.state.items()
            if f"state.{name}" in stored and "state" in parts
        },
        torch.empty_like(start.cursors),
    )
    wanted = {
        name: of
        for name, of in found.pieces(local, mesh).items()
        if name.partition(".")[0] in parts
    }
    dcp.load(
        wanted,
        storage_reader=dcp.FileSystemReader(folder),
        planner=PiecesLoader(),
        process_group=mesh.world.group,
    )
    taken = {part: getattr(found, part) for part in parts}
    return replace(start, **taken | {"state": start.state | found.state})


@torch.no_grad()
def put(contents: Contents, local: LocalModel, engine: Engine) -> None:
    """Give the numbers to the model and its optimizer."""
    for name, parameter in local.parameters.items():
        parameter.copy_(contents.model[name])
    engine.load(contents.optimizer)


def load_parameters(folder: Path, model: Model) -> None:
    """Only the parameters, in one process without a process group, into a model.

    Raises:
        UserError: the checkpoint holds another model's parameters.
    """
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    shapes = {name: parameter.shape for name, parameter in parameters.items()}
    trouble = other_model(model_shapes(stored_tensors(folder)), shapes)
    if trouble is not None:
        raise UserError(f"{folder}: {trouble}")
    target = {f"model.{name}": parameter.detach() for name, parameter in parameters.items()}
    load_tensors(folder, target)


def load_whole(folder: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """Some of a checkpoint's tensors, whole, in one process without a process group."""
    stored = stored_tensors(folder)
    target = {name: torch.empty(stored[name][0], dtype=stored[name][1]) for name in names}
    load_tensors(folder, target)
    return target


Stored = Mapping[str, tuple[torch.Size, torch.dtype]]
"""Whole shapes and types by global name."""


def stored_tensors(folder: Path) -> Stored:
    """Whole shape and type of every tensor in a checkpoint, by global name."""
    entries = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    return {
        name: (entry.size, entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def model_shapes(stored: Stored) -> dict[str, torch.Size]:
    """Whole shapes of the parameters among them, by their names in the model."""
    prefix = "model."
    return {n.removeprefix(prefix): s for n, (s, _) in stored.items() if n.startswith(prefix)}


def load_tensors(folder: Path, target: dict[str, Tensor]) -> None:
    """Fill tensors by their names in a checkpoint, in one process without a process group.

    They may be of another type: each is converted as it is read.
    """
    with warnings.catch_warnings():
        # It warns that there is no process group, which is what is meant here.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(target, storage_reader=dcp.FileSystemReader(folder), no_dist=True)


def find_checkpoint(path: Path) -> Path:
    """The checkpoint a person means: a checkpoint folder, or a run folder's newest whole one.

    Raises:
        UserError: there is none, or the named one is damaged.
    """
    path = path.absolute()
    if not path.is_dir():
        raise UserError(f"{path}: no such folder; give a run folder or a checkpoint folder")
    if path in checkpoints(path.parent):
        verify(path)
        return path
    newest = latest(path if path.name == CHECKPOINTS else path / CHECKPOINTS)
    if newest is None:
        raise UserError(f"{path}: holds no whole checkpoint; is it a run folder?")
    return newest
