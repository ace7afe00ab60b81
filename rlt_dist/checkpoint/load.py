"""Reading a checkpoint on any number of processes."""

import warnings
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from rlt_dist.checkpoint.contents import Contents, empty_like_stored
from rlt_dist.checkpoint.manifest import checkpoints, latest, verify
from rlt_dist.checkpoint.pieces import PiecesLoader
from rlt_dist.checkpoint.run_folder import CHECKPOINTS
from rlt_dist.data.stream.lanes import Cursor
from rlt_dist.mesh.mesh import Mesh
from rlt_dist.models.build import Model
from rlt_dist.parallel.local import LocalModel
from rlt_dist.util.errors import UserError

_TOKENS = Cursor.FIELDS.index("tokens")


def load_contents(folder: Path, start: Contents, local: LocalModel, mesh: Mesh) -> Contents:
    """A checkpoint's numbers of what this process has.

    Args:
        start: the same of a run that has done no step, which stays as it is; the state that the
            checkpoint left out is taken from it.

    Raises:
        UserError: a lane's state and its cursor have not seen the same number of tokens.
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
            if f"state.{name}" in stored
        },
        torch.empty_like(start.cursors),
    )
    dcp.load(
        found.pieces(local, mesh),
        storage_reader=dcp.FileSystemReader(folder),
        planner=PiecesLoader(),
        process_group=mesh.world.group,
    )
    if not torch.equal(found.state["tokens"], found.cursors[..., _TOKENS].sum(-1)):
        raise UserError(f"{folder}: carried state and data cursors do not agree; it cannot be used")
    return replace(found, state=start.state | found.state)


def load_parameters(folder: Path, model: Model) -> None:
    """Only the parameters, in one process without a process group, into a model.

    Raises:
        UserError: the checkpoint holds another model's parameters.
    """
    stored = {
        name.removeprefix("model."): shape
        for name, (shape, _) in stored_tensors(folder).items()
        if name.startswith("model.")
    }
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    _check_same(folder, stored, parameters)
    target = {f"model.{name}": parameter.detach() for name, parameter in parameters.items()}
    load_tensors(folder, target)


def load_cursors(folder: Path) -> Tensor:
    """Only the cursors of all lanes, in one process: int64 [G, corpora, 4]."""
    shape, dtype = stored_tensors(folder)["cursors"]
    target = {"cursors": torch.empty(shape, dtype=dtype)}
    load_tensors(folder, target)
    return target["cursors"]


def stored_tensors(folder: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Whole shape and type of every tensor in a checkpoint, by global name."""
    entries = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    return {
        name: (entry.size, entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }


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


def _check_same(folder: Path, stored: dict[str, torch.Size], parameters: dict[str, Tensor]) -> None:
    for name in sorted(stored.keys() ^ parameters.keys()):
        where = "the checkpoint" if name in stored else "the model"
        raise UserError(f"{folder}: holds another model: only {where} has {name}")
    for name, size in stored.items():
        if size != parameters[name].shape:
            raise UserError(
                f"{folder}: holds another model: {name} is {list(size)} there and "
                f"{list(parameters[name].shape)} in the configuration"
            )
