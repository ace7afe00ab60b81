"""Writing a checkpoint: beside the run, flushed, hashed, then renamed into place."""

from pathlib import Path

from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from rlt_dist.checkpoint.manifest import (
    Facts,
    checkpoints,
    describe_files,
    folder_name,
    step_of,
    write_manifest,
)
from rlt_dist.checkpoint.pieces import Pieces, PiecesSaver
from rlt_dist.mesh.collectives import on_leader
from rlt_dist.mesh.mesh import Mesh
from rlt_dist.util.errors import UserError
from rlt_dist.util.files import commit_folder, remove_folder


def save_checkpoint(
    folder: Path, contents: dict[str, Pieces], facts: Facts, mesh: Mesh, keep: int
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
    on_leader(mesh.world, lambda: _clear(partial, facts.step))
    _write(partial, contents, mesh)
    on_leader(mesh.world, lambda: _commit(partial, final, facts, keep))
    return final


def _clear(partial: Path, step: int) -> None:
    """Make the folder to write to.

    Removes what interrupted writes left, and checkpoints of this step or later ones: the run went
    on from an earlier one, so these are damaged.
    """
    clear_leftovers(partial.parent)
    for passed_over in checkpoints(partial.parent):
        if step_of(passed_over) >= step:
            _discard(passed_over)
    partial.mkdir(parents=True)


def _commit(partial: Path, final: Path, facts: Facts, keep: int) -> None:
    write_manifest(partial, facts, describe_files(partial))
    commit_folder(partial, final)
    for old in checkpoints(final.parent)[:-keep]:
        _discard(old)


def _discard(folder: Path) -> None:
    """Remove a checkpoint; killed on the way, it leaves none that looks whole."""
    doomed = folder.with_name(f".{folder.name}.partial")
    folder.rename(doomed)
    remove_folder(doomed)


def clear_leftovers(folder: Path) -> None:
    """Remove what writes or removals that were interrupted left in the checkpoints' folder."""
    for leftover in folder.glob(".*.partial"):
        remove_folder(leftover)


def _write(partial: Path, contents: dict[str, Pieces], mesh: Mesh) -> None:
    writer = dcp.FileSystemWriter(partial, sync_files=True)
    try:
        dcp.save(
            contents,
            storage_writer=writer,
            planner=PiecesSaver(),
            process_group=mesh.world.group,
        )
    except CheckpointException as error:
        for rank, (failure, _) in sorted(error.failures.items()):
            reason = _why_unwritten(failure)
            if reason is not None:
                raise _not_written(f"rank {rank} cannot write {partial}: {reason}") from None
        raise


def _why_unwritten(failure: BaseException) -> str | None:
    if isinstance(failure, OSError):
        return failure.strerror
    # torch's zip writer hides the operating system's error behind its own.
    if "PytorchStreamWriter" in str(failure) or "unexpected pos" in str(failure):
        return "a file was cut short; the disk is probably full"
    return None


def _not_written(what: str) -> UserError:
    error = UserError(
        f"{what}; make room and run the same command again to go on from the checkpoint before"
    )
    error.shared = True
    return error
