"""A checkpoint with the run folder that it lies in."""

from dataclasses import dataclass
from pathlib import Path

from rlt_dist.checkpoint.load import find_checkpoint
from rlt_dist.checkpoint.manifest import Facts, read_manifest
from rlt_dist.checkpoint.run_folder import CONFIG, TOKENIZER
from rlt_dist.config.load import load_typed
from rlt_dist.config.run import RunConfig
from rlt_dist.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from rlt_dist.util.errors import UserError


@dataclass(frozen=True)
class SavedRun:
    """Attributes:
    folder: the checkpoint, which is whole.
    run_folder: where the run lives.
    """

    folder: Path
    run_folder: Path
    facts: Facts
    config: RunConfig
    tokenizer: Tokenizer


def open_saved(path: Path) -> SavedRun:
    """A run folder's newest whole checkpoint, or the checkpoint folder that is named.

    Raises:
        UserError: there is no whole checkpoint, or it does not fit its run folder.
    """
    folder = find_checkpoint(path)
    run_folder = folder.parent.parent
    if not (run_folder / CONFIG).is_file():
        raise UserError(
            f"{run_folder / CONFIG}: no such file; a checkpoint is used from inside its run folder"
        )
    config = load_typed(run_folder / CONFIG, RunConfig)
    facts, tokenizer = read_manifest(folder).facts, load_tokenizer(run_folder / TOKENIZER)
    if tokenizer.hash != facts.tokenizer:
        raise UserError(f"{run_folder / TOKENIZER}: is not the tokenizer that {folder} was made by")
    return SavedRun(folder, run_folder, facts, config, tokenizer)
