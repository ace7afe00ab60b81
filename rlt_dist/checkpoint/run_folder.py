"""The folder of one run.

config.yaml       the resolved configuration
tokenizer.json    the tokenizer, so that the folder can be used without the corpus
metrics.jsonl     one object a step
tensorboard/      the same for TensorBoard
checkpoints/      step-00000100, ...
evaluations.jsonl what `rlt-dist eval` measured
scores.jsonl      what `rlt-dist experiment state-tracking` measured
ended.json        how the last start ended (util/ending.py); absent while one is at work
logs/             rank-00000.log, ...: what each rank said
guard-step-*.txt  what was wrong with the steps after which the guard stopped the run
jobs/             its submissions: 0001, ... (`jobs.job`)
stacks/           every rank's Python stacks, where a step was stuck
"""

from pathlib import Path

from rlt_dist.config.load import load_typed
from rlt_dist.config.run import RunConfig
from rlt_dist.data.tokenizers.tokenizer import Tokenizer
from rlt_dist.util.ending import ASKED, ENDED
from rlt_dist.util.errors import UserError
from rlt_dist.util.files import write_atomic
from rlt_dist.util.lock import LOCK
from rlt_dist.util.log import LOGS

CONFIG, TOKENIZER, METRICS = "config.yaml", "tokenizer.json", "metrics.jsonl"
CHECKPOINTS, TENSORBOARD, EVALUATIONS = "checkpoints", "tensorboard", "evaluations.jsonl"
STACKS, JOBS = "stacks", "jobs"

_BEFORE = {LOCK, LOGS, ENDED, ASKED, JOBS}
"""What may be there before the run is."""

_PLACES = ("run_folder", "train.cluster")
"""Keys that say where something lies; a run that is moved is the same."""

ANEW = "remove it to train it anew, or give another --output"
"""What to do with a run that was begun otherwise."""

_MARK = "# Written by `rlt-dist train`: the configuration of the run in this folder, resolved.\n"


def is_run_folder(folder: Path) -> bool:
    """Whether `claim` made it; a person's own files never look so."""
    path = folder / CONFIG
    return path.is_file() and path.read_bytes().startswith(_MARK.encode())


def check_free(folder: Path) -> None:
    """Check that a run may be kept in a folder: it is one already, or there is nothing in it.

    Raises:
        UserError: it holds something else, which a run would overwrite.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: is a file; give another run_folder")
    if not folder.is_dir() or is_run_folder(folder) or (folder / CHECKPOINTS).is_dir():
        return
    others = sorted({path.name for path in folder.iterdir()} - _BEFORE)
    if others:
        raise UserError(
            f"{folder}: holds {others[0]}, which no run made; give an empty or new run_folder"
        )


def check_moved(file: Path, config: RunConfig) -> None:
    """A run's own configuration must lead to the folder that it lies in.

    Raises:
        UserError: the folder was moved or copied.
    """
    folder = file.absolute().parent
    own = file.name == CONFIG and is_run_folder(folder)
    if own and folder.resolve() != config.run_folder.resolve():
        raise UserError(
            f"{file}: is of a run in {config.run_folder}; add run_folder={folder} to go on here"
        )


def claim(config: RunConfig, tokenizer: Tokenizer) -> list[str]:
    """Record a run's configuration and tokenizer in its folder.

    Returns:
        what differs from the configuration that the run was last started with.
    """
    folder, changes = config.run_folder, []
    if is_run_folder(folder):
        before, after = load_typed(folder / CONFIG, RunConfig).leaves(), config.leaves()
        changes = describe_changes(before, after)
    record(folder, config, tokenizer)
    return changes


def record(folder: Path, config: RunConfig, tokenizer: Tokenizer) -> None:
    """Make a folder look as that of a run with this configuration and tokenizer."""
    write_atomic(folder / CONFIG, _MARK + config.to_yaml())
    tokenizer.save(folder / TOKENIZER)


def check_unchanged(config: RunConfig) -> None:
    """Check that a run that is there was begun with this configuration, wherever that lay.

    Raises:
        UserError: it was begun with another one.
    """
    folder = config.run_folder
    if not is_run_folder(folder):
        return
    before, now = (
        {key: value for key, value in each.leaves().items() if key not in _PLACES}
        for each in (load_typed(folder / CONFIG, RunConfig), config)
    )
    if changes := describe_changes(before, now):
        raise UserError(
            f"{folder}: was begun with another configuration ({'; '.join(changes)}); {ANEW}"
        )


def describe_changes(before: dict[str, object], after: dict[str, object]) -> list[str]:
    """One text per key whose value differs: `train.seed: 0 -> 1`."""
    return [
        f"{key}: {before.get(key)} -> {after.get(key)}"
        for key in dict.fromkeys([*before, *after])
        if before.get(key) != after.get(key)
    ]
