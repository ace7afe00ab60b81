"""Writing a checkpoint: beside the run, flushed, hashed, then renamed into place."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from rlt_dist.checkpoint.manifest import (
    Facts,
    FileFacts,
    Manifest,
    checkpoints,
    describe_files,
    folder_name,
    step_of,
    write_manifest,
)
from rlt_dist.checkpoint.pieces import Pieces, PiecesSaver
from rlt_dist.config.run import CheckpointConfig
from rlt_dist.mesh.collectives import everyones, on_leader
from rlt_dist.mesh.world import World
from rlt_dist.util.errors import Trouble, UserError, disk_trouble
from rlt_dist.util.files import commit_folder, remove_folder

T = TypeVar("T")


@dataclass(frozen=True)
class Keep:
    """Which checkpoints stay.

    Attributes:
        newest: how many of the last.
        every: those of steps that this divides, for ever; None: no others.
    """

    newest: int
    every: int | None = None

    @classmethod
    def of(cls, config: CheckpointConfig) -> "Keep":
        """What a run's configuration says."""
        return cls(config.keep, config.keep_every)

    def passes_over(self, step: int) -> bool:
        """Whether a checkpoint that is not among the newest may go."""
        return self.every is None or step % self.every != 0


def save_checkpoint(
    folder: Path, contents: Mapping[str, Pieces], facts: Facts, world: World, keep: Keep
) -> Manifest:
    """Write one checkpoint, each process its own file, and remove those that need not be kept.

    Until the rename the checkpoint does not exist, so a process killed at any moment leaves
    whole checkpoints and at most one `.partial` folder, which the next write removes. What several
    processes have is written by the one of them that has least to write.

    Raises:
        UserError: on every process alike, where the disk is full or cannot be written to; nothing
            of it is left, and earlier checkpoints are untouched.
    """
    final = folder / folder_name(facts.step)
    partial = _beside(final)
    try:
        on_leader(world, lambda: _disk(lambda: _clear(partial, facts.step)))
        tensor_bytes = _write(partial, contents, world)
        own = everyones(world, lambda: _disk(lambda: _describe_own(partial, world)))
        files = {name: of for part in own for name, of in sorted(part.items())}
        manifest = Manifest(facts=facts, tensor_bytes=tensor_bytes, files=files)
        on_leader(world, lambda: _disk(lambda: _commit(partial, final, manifest, keep)))
    except UserError:
        on_leader(world, lambda: _give_up(partial))
        raise
    return manifest


def clear_leftovers(folder: Path) -> None:
    """Remove what writes or removals that were interrupted left in the checkpoints' folder."""
    for leftover in folder.glob(".*.partial"):
        remove_folder(leftover)


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


def _write(partial: Path, contents: Mapping[str, Pieces], world: World) -> int:
    """Write this process's file; bytes of all tensors of the checkpoint."""
    writer = dcp.FileSystemWriter(partial, sync_files=True)
    try:
        metadata: Metadata = dcp.save(
            dict(contents),
            storage_writer=writer,
            planner=PiecesSaver(),
            process_group=world.group,
        )
    except CheckpointException as error:
        for rank, (failure, _) in sorted(error.failures.items()):
            reason = _why_unwritten(failure)
            if reason is not None:
                raise Trouble(f"rank {rank} cannot write {partial}: {reason}") from None
        raise
    return sum(
        entry.size.numel() * entry.properties.dtype.itemsize
        for entry in metadata.state_dict_metadata.values()
        if isinstance(entry, TensorStorageMetadata)
    )


def _why_unwritten(failure: BaseException) -> str | None:
    if isinstance(failure, OSError):
        return failure.strerror
    # torch's zip writer hides the operating system's error behind its own.
    if "PytorchStreamWriter" in str(failure) or "unexpected pos" in str(failure):
        return "a file was cut short; the disk is probably full"
    return None


def _describe_own(partial: Path, world: World) -> dict[str, FileFacts]:
    """What this process wrote, as it lies there."""
    names = [f"__{world.rank}_*", *[".metadata"] * world.leads]
    return describe_files(path for name in names for path in partial.glob(name))


def _commit(partial: Path, final: Path, manifest: Manifest, keep: Keep) -> None:
    for name, of in manifest.files.items():
        path = partial / name
        if not path.is_file() or path.stat().st_size != of.bytes:
            raise UserError(
                f"{path}: the leading process does not see what another wrote; give a run_folder "
                "that lies on a file system which all of them share"
            )
    write_manifest(partial, manifest)
    commit_folder(partial, final)
    remove_old(final, keep)


def remove_old(newest: Path, keep: Keep) -> None:
    """Remove what need not be kept beside the newest whole checkpoint."""
    so_far = [path for path in checkpoints(newest.parent) if step_of(path) <= step_of(newest)]
    for old in so_far[: -keep.newest]:
        if keep.passes_over(step_of(old)):
            _discard(old)


def _discard(folder: Path) -> None:
    """Remove a checkpoint; killed on the way, it leaves none that looks whole."""
    doomed = _beside(folder)
    folder.rename(doomed)
    remove_folder(doomed)


def _give_up(partial: Path) -> None:
    """Make room again. Where even that is not allowed, the next write tries it."""
    with suppress(OSError):
        remove_folder(partial)


def _beside(final: Path) -> Path:
    return final.with_name(f".{final.name}.partial")


def _disk(action: Callable[[], T]) -> T:
    """Whatever the operating system refuses is a reason that a person can act on."""
    try:
        return action()
    except OSError as error:
        raise Trouble(disk_trouble(error) or f"{error.filename}: {error.strerror}") from error
