"""What makes a checkpoint whole: a manifest with every file's size and hash.

A checkpoint is a folder `step-00000100` that holds the tensors, written by
torch.distributed.checkpoint under global names, and `manifest.json`. A folder without a manifest
that fits its files is not a checkpoint, whatever its name.
"""

import json
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from rlt_dist.checkpoint.run_folder import CONFIG, describe_changes
from rlt_dist.config.load import load_typed
from rlt_dist.config.run import LANES, RunConfig
from rlt_dist.util.errors import UserError
from rlt_dist.util.files import sha256_file, write_atomic
from rlt_dist.util.log import warn

MANIFEST = "manifest.json"
_NAME = re.compile(r"step-\d{8,}")


class FileFacts(BaseModel):
    """Size in bytes and SHA-256 of one file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    bytes: int
    sha256: str


class GuardFacts(BaseModel):
    """What a run's guard remembers of the steps before (`train.guard`).

    Attributes:
        skips: steps skipped in a row up to this one.
        losses: of the last steps that were not skipped, the newest last.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    skips: int = 0
    losses: tuple[float, ...] = ()


class Facts(BaseModel):
    """What a checkpoint says of itself beside its tensors.

    Attributes:
        step: optimizer steps done.
        tokens: input tokens consumed over all lanes.
        tokenizer: the tokenizer's hash.
        corpus: the shard index's fingerprint.
        identity: what makes it this run, by whole key (`RunConfig.identity`).
        mesh: data x pipeline x tensor of the processes that wrote it.
        engine: the optimizer's that wrote it.
        reset: the step at which `--reset-state` emptied the state, of a run started with it.
        guard: what the decisions on later steps depend on.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[2] = 2
    step: int
    tokens: int
    tokenizer: str
    corpus: str
    identity: dict[str, Any]
    mesh: str
    engine: str
    reset: int | None = None
    guard: GuardFacts = GuardFacts()

    def other_run(self, config: RunConfig) -> list[str]:
        """How the run that it is of differs from the one that is configured, a text each.

        The number of lanes is left out: `--reset-state` changes it within a run.
        """
        before, now = dict(self.identity), config.identity()
        return describe_changes(before | {LANES: now[LANES]}, now)


class Manifest(BaseModel):
    """What is said of a checkpoint, and how it can be seen that it is whole.

    Attributes:
        tensor_bytes: of all its tensors, each counted once.
        files: by name.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    facts: Facts
    tensor_bytes: int
    files: dict[str, FileFacts]

    @property
    def bytes(self) -> int:
        """Of all files."""
        return sum(file.bytes for file in self.files.values())


def folder_name(step: int) -> str:
    """Name of the checkpoint of a step."""
    return f"step-{step:08d}"


def step_of(folder: Path) -> int:
    """The step whose checkpoint a folder is, by its name."""
    return int(folder.name.removeprefix("step-"))


def describe_files(paths: Iterable[Path]) -> dict[str, FileFacts]:
    """Size and hash of files, by name."""
    return {
        path.name: FileFacts(bytes=path.stat().st_size, sha256=sha256_file(path)) for path in paths
    }


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest; it is the last file of a checkpoint."""
    write_atomic(folder / MANIFEST, json.dumps(manifest.model_dump(), indent=1))


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint folder, its files not yet looked at.

    Raises:
        UserError: there is none or it is damaged.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise UserError(f"{folder}: not a whole checkpoint: it has no {MANIFEST}")
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except ValidationError:
        raise UserError(f"{path}: damaged, or written by another version") from None


def verify(folder: Path) -> Manifest:
    """Check every file against the manifest.

    Raises:
        UserError: naming the first file that is missing, of another size, or of another hash.
    """
    manifest = read_manifest(folder)
    try:
        _check_files(folder, manifest)
    except UserError as error:
        raise UserError(f"{error}{_of_other_run(folder, manifest)}") from None
    return manifest


def _check_files(folder: Path, manifest: Manifest) -> None:
    held = {path.name for path in folder.iterdir()} - {MANIFEST}
    for name in sorted(held ^ manifest.files.keys()):
        raise UserError(
            f"{folder}: file {name} is {'not in its manifest' if name in held else 'missing'}"
        )
    if folder.name != folder_name(manifest.facts.step):
        raise UserError(f"{folder}: its manifest is of step {manifest.facts.step}")
    for name, expected in manifest.files.items():
        path = folder / name
        if path.stat().st_size != expected.bytes:
            found = path.stat().st_size
            raise UserError(f"{path}: {found} bytes where the manifest says {expected.bytes}")
        if sha256_file(path) != expected.sha256:
            raise UserError(f"{path}: content does not match the manifest's hash")


def _of_other_run(folder: Path, manifest: Manifest) -> str:
    """What more to say of a manifest that does not fit, if the run folder tells that it cannot."""
    with suppress(UserError):
        config = load_typed(folder.parent.parent / CONFIG, RunConfig)
        differences = manifest.facts.other_run(config)
        if differences:
            return f"; the manifest is that of another run ({'; '.join(differences)})"
    return ""


def checkpoints(folder: Path) -> list[Path]:
    """Committed checkpoint folders, oldest first; whether they are whole is for `verify`."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if path.is_dir() and _NAME.fullmatch(path.name)]
    return sorted(found, key=step_of)


def latest(folder: Path) -> Path | None:
    """The newest whole checkpoint; damaged ones are named on standard error and passed over."""
    for path in reversed(checkpoints(folder)):
        try:
            verify(path)
        except UserError as error:
            warn(f"damaged checkpoint passed over: {error}")
            continue
        return path
    return None
