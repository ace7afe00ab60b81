"""What was asked of a preparation, remembered in its folder, so that it can only go on as it began.

The same request on an unfinished folder goes on where it stopped; another one is refused. The
number of workers is no part of it: it decides nothing about the result.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlt_dist.config.load import load_typed
from rlt_dist.data.corpus.index import INDEX_NAME, SPLITS, TOKENIZER_NAME
from rlt_dist.data.corpus.sources import SOURCES_NAME
from rlt_dist.data.prepare.inputs import InputOptions, Listing
from rlt_dist.data.prepare.writer import PROGRESS_NAME
from rlt_dist.data.tokenizers.recipe import Recipe
from rlt_dist.data.tokenizers.tokenizer import load_tokenizer
from rlt_dist.util.errors import UserError
from rlt_dist.util.files import remove_folder, write_atomic

REQUEST_NAME = "prepare.json"
_AGAIN = (
    "choose another output folder (`rlt-dist data prepare` can also start one afresh: --overwrite)"
)

Request = dict[str, Any]


def describe_request(
    listing: Listing,
    tokenizer: Path,
    options: InputOptions,
    shares: Mapping[str, float],
    shard_bytes: int,
) -> Request:
    """All that decides the result, as plain values.

    Raises:
        UserError: there is no such tokenizer, or it or its recipe is wrong.
    """
    if not tokenizer.is_file():
        raise UserError(f"{tokenizer}: no such file; give a tokenizer recipe or a saved tokenizer")
    decisive = {
        **asdict(options),
        "exclude": list(options.exclude),
        "tokenizer": _tokenizer_request(tokenizer),
        "shares": dict(shares),
        "shard_bytes": shard_bytes,
    }
    files = [[file.name, file.size, file.modified_ns] for file in listing.files]
    left_out = {"hidden": listing.hidden, "linked": listing.linked}
    return {"options": decisive, **left_out, "inputs": files}


def is_recipe(tokenizer: Path) -> bool:
    """Whether a tokenizer's file is a recipe, and not a saved tokenizer."""
    return tokenizer.suffix in (".yaml", ".yml")


def check_folder(output: Path) -> None:
    """Refuse a folder that is not a preparation's, before anything is written into it."""
    if not output.exists():
        return
    if not output.is_dir():
        raise UserError(f"{output}: is a file; choose another output folder")
    names = [path.name for path in output.iterdir()]
    # Hidden files are the lock, and what a kill before the first commit may leave.
    if REQUEST_NAME not in names and any(not name.startswith(".") for name in names):
        raise UserError(f"{output}: holds something else; choose another output folder")


def is_finished(output: Path) -> bool:
    """Whether nothing is left to write, so that the folder need not even be locked."""
    whole = all((output / name).exists() for name in (REQUEST_NAME, INDEX_NAME, TOKENIZER_NAME))
    return whole and not (output / PROGRESS_NAME).exists()


def claim(output: Path, request: Request, overwrite: bool) -> None:
    """Make a locked folder this request's own, or refuse it.

    A folder is bound to its request once it has a tokenizer: before, there is nothing to lose.
    """
    remove_partial_files(output)
    ours = output / REQUEST_NAME
    if ours.exists():
        if overwrite or not (output / TOKENIZER_NAME).exists():
            clear(output)
        else:
            refuse_changes(output, request)
    if not ours.exists():
        write_atomic(ours, json.dumps(request))


def refuse_changes(output: Path, request: Request) -> None:
    """Hold a folder to the request that it was begun for.

    Raises:
        UserError: it was another one; the message says what differs.
    """
    if change := _first_change(_read_request(output / REQUEST_NAME), request):
        raise UserError(f"{output}: was begun from something else: {change}; {_AGAIN}")


def clear(output: Path) -> None:
    """Remove what a preparation writes, and nothing else. The request goes last."""
    remove_folder(output / PROGRESS_NAME)
    for name in (INDEX_NAME, SOURCES_NAME, TOKENIZER_NAME):
        (output / name).unlink(missing_ok=True)
    for split in SPLITS:
        for path in [*output.glob(f"{split}-*.tar"), *output.glob(f"{split}-*.npy")]:
            path.unlink()
    (output / REQUEST_NAME).unlink(missing_ok=True)


def remove_partial_files(output: Path) -> None:
    """Remove what a killed preparation was writing; its progress folder goes as a whole."""
    for path in output.glob(".*.partial"):
        path.unlink(missing_ok=True)


def _tokenizer_request(path: Path) -> dict[str, Any] | str:
    """What a recipe says, whatever its comments; the hash of a saved tokenizer, if it is whole."""
    if is_recipe(path):
        return load_typed(path, Recipe).model_dump()
    return load_tokenizer(path).hash


def _read_request(path: Path) -> Request:
    try:
        return json.loads(path.read_bytes())
    except ValueError:
        raise UserError(f"{path}: is damaged; {_AGAIN}") from None


def _first_change(old: Request, new: Request) -> str | None:
    """What differs between two requests, in words."""
    was = {"format": "text", **old["options"]}  # there was no other once
    for key, value in new["options"].items():
        if was.get(key) != value:
            return f"{key} was {was.get(key)!r}, now {value!r}"
    before = {name: rest for name, *rest in old["inputs"]}
    after = {name: rest for name, *rest in new["inputs"]}
    for name in [*before, *after]:
        if name not in after:
            return f"input {name} is gone"
        if name not in before:
            return f"input {name} is new"
        if before[name] != after[name]:
            return f"input {name} has changed"
    if old["inputs"] != new["inputs"]:
        return "the inputs or their order have changed"
    for key, what in (("hidden", "hidden files"), ("linked", "linked folders")):
        if old[key] != new[key]:
            return f"there were {old[key]} {what}, now {new[key]}"
    return None
