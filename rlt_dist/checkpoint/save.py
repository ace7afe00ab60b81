"""Writing a checkpoint: beside the run, flushed, hashed, then renamed into place."""

from pathlib import Path

from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from rlt_dist.checkpoint.contents import Contents
from rlt_dist.checkpoint.manifest import (
    Facts,
    checkpoints,
    describe_files,
    folder_name,
    write_manifest,
)
from rlt_dist.mesh.collectives import on_leader
from rlt_dist.mesh.world import World
from rlt_dist.util.errors import UserError
from rlt_dist.util.files import commit_folder, remove_folder


def save_checkpoint(
    folder: Path, contents: Contents, facts: Facts, world: World, keep: int
) -> Path:
    """Write one checkpoint and remove all but the newest `keep`.

    Until the rename the checkpoint does not exist, so a process killed at any moment leaves
    whole checkpoints and at most one `.partial` folder, which the next write removes.

    Returns:
        the committed folder.

    Raises:
        UserError: the disk is full or not writable; earlier checkpoints are untouched.
    """
    final = folder / folder_name(facts.step)
    partial = folder / f".{final.name}.partial"
    on_leader(world, lambda: _clear(partial, final))
    _write(partial, contents, world)
    on_leader(world, lambda: _commit(partial, final, facts, keep))
    return final


def _clear(partial: Path, final: Path) -> None:
    """Make the folder to write to; remove what an interrupted or damaged write left."""
    for leftover in partial.parent.glob(".*.partial"):
        remove_folder(leftover)
    remove_folder(final)
    partial.mkdir(parents=True)


def _commit(partial: Path, final: Path, facts: Facts, keep: int) -> None:
    write_manifest(partial, facts, describe_files(partial))
    commit_folder(partial, final)
    for old in checkpoints(final.parent)[:-keep]:
        remove_folder(old)


def _write(partial: Path, contents: Contents, world: World) -> None:
    writer = dcp.FileSystemWriter(partial, sync_files=True)
    try:
        dcp.save(contents.to_global(world), storage_writer=writer, process_group=world.group)
    except CheckpointException as error:
        for rank, (failure, _) in sorted(error.failures.items()):
            if isinstance(failure, OSError):
                raise UserError(
                    f"rank {rank} cannot write the checkpoint {partial}: {failure.strerror}; "
                    "make room and run the same command again to go on from the one before"
                ) from None
        raise
