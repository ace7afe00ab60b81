"""Raw text to a corpus folder: list the inputs, train or load a tokenizer, write the shards.

The folder remembers in prepare.json what was asked for. The same request on an unfinished folder
goes on where it stopped and ends with the same bytes as an uninterrupted run; on a finished folder
it does nothing; another request is refused.
"""

import errno
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlt_dist.config.load import load_typed
from rlt_dist.data.corpus.index import (
    INDEX_NAME,
    SPLITS,
    TOKENIZER_NAME,
    CorpusIndex,
    load_corpus,
    write_index,
)
from rlt_dist.data.prepare.shards import PROGRESS_NAME, CorpusWriter, Placement, forget_progress
from rlt_dist.data.prepare.sources import (
    Listing,
    SourceOptions,
    Tally,
    list_inputs,
    read_documents,
)
from rlt_dist.data.tokenizers.recipe import Recipe
from rlt_dist.data.tokenizers.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from rlt_dist.util.errors import UserError
from rlt_dist.util.files import sha256_file, write_atomic
from rlt_dist.util.lock import locked

REQUEST_NAME = "prepare.json"
DEFAULT_SHARES = {"train": 0.9, "validation": 0.05, "test": 0.05}
DEFAULT_SHARD_BYTES = 8 << 20
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_PLACE = (
    *(errno.EACCES, errno.EPERM, errno.EROFS),
    *(errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP),
)
_AGAIN = "choose another output folder, or start this one afresh with --overwrite"


@dataclass(frozen=True)
class Standing:
    """How far a preparation has come; `tokens` counts those written by this process."""

    stage: str
    bytes_read: int
    bytes_total: int
    documents: int
    tokens: int


Watch = Callable[[Standing], None]


@dataclass(frozen=True)
class Prepared:
    """The corpus, and whether it had been finished before this call."""

    corpus: CorpusIndex
    already_finished: bool


def prepare_corpus(
    inputs: Sequence[Path],
    output: Path,
    tokenizer: Path,
    *,
    source: SourceOptions | None = None,
    shares: Mapping[str, float] = DEFAULT_SHARES,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    overwrite: bool = False,
    watch: Watch = lambda _: None,
) -> Prepared:
    """Make, or go on making, the corpus folder `output`.

    Args:
        inputs: files and folders, read in this order.
        tokenizer: a YAML recipe (the tokenizer is trained on the train split first) or a saved
            tokenizer.
        source: how documents are found and read.
        shares: each split's share of the documents; they add up to 1.
        shard_bytes: a shard is closed once it holds this much raw text.
        overwrite: start afresh in a folder that an earlier preparation made.
        watch: called after every document.

    Raises:
        UserError: anything about the inputs, the options, the folder or the disk; another process
            prepares a corpus in this folder.
    """
    source = source or SourceOptions()
    _check_options(inputs, output, tokenizer, source, shard_bytes)
    Placement(shares, shard_bytes)
    listing = list_inputs(inputs, source)
    request = _request(listing, tokenizer, source, shares, shard_bytes)
    job = _Job(output, listing, source, shares, shard_bytes, watch)
    try:
        _check_folder(output)
        finished = not overwrite and _is_finished(output)
        if finished:
            _refuse_changes(output, _read_request(output / REQUEST_NAME), request)
        else:
            with locked(output, "prepares a corpus"):
                finished = _make(job, tokenizer, request, overwrite)
    except OSError as error:
        if problem := _explain(output, error):
            raise problem from error
        raise
    return Prepared(load_corpus(output), already_finished=finished)


@dataclass(frozen=True)
class _Job:
    """One preparation under way."""

    output: Path
    listing: Listing
    source: SourceOptions
    shares: Mapping[str, float]
    shard_bytes: int
    watch: Watch

    def placement(self) -> Placement:
        return Placement(self.shares, self.shard_bytes)

    def standing(self, stage: str, tally: Tally, documents: int, tokens: int = 0) -> Standing:
        return Standing(stage, tally.bytes_read, self.listing.bytes, documents, tokens)

    def train_texts(self) -> Iterator[bytes]:
        """The train split's documents."""
        tally, placement = Tally(), self.placement()
        for number, document in enumerate(read_documents(self.listing, self.source, tally), 1):
            if placement.place(len(document.text)).split == "train":
                yield document.text
            self.watch(self.standing("training the tokenizer", tally, number))

    def write(self, tokenizer: Tokenizer) -> None:
        """Write the shards that are not committed yet, then the index."""
        tally, placement, tokens = Tally(), self.placement(), 0
        with CorpusWriter(self.output, tokenizer, placement) as writer:
            for document in read_documents(self.listing, self.source, tally):
                tokens += writer.add(document)
                self.watch(self.standing("writing shards", tally, writer.documents, tokens))
            self._refuse_empty_splits(placement, tally)
            splits = writer.finish()
        about = {
            "hash": tokenizer.hash,
            "vocabulary": tokenizer.vocabulary,
            "end_of_text": tokenizer.end_of_text,
        }
        dropped = {
            "hidden_files": self.listing.hidden,
            "empty_documents": tally.empty_documents,
            "linked_folders": self.listing.linked,
        }
        write_index(self.output, about, splits, dropped)

    def _refuse_empty_splits(self, placement: Placement, tally: Tally) -> None:
        empty = [name for name, count in placement.counts.items() if not count]
        if not empty:
            return
        # Nothing here is of use under the other shares or inputs that the person must choose now.
        _clear(self.output)
        documents = sum(placement.counts.values())
        raise UserError(
            f"split {', '.join(map(repr, empty))} would be empty: the inputs hold {documents} "
            f"documents ({tally.empty_documents} more are empty); give more documents, cut the "
            f"files with --separator, or change the splits' shares"
        )


def _check_options(
    inputs: Sequence[Path],
    output: Path,
    tokenizer: Path,
    source: SourceOptions,
    shard_bytes: int,
) -> None:
    if shard_bytes < 1:
        raise UserError(f"the shard size is {shard_bytes} bytes; it must be at least 1")
    if source.separator == "":
        raise UserError("the separator is empty; give the text that stands between documents")
    if tokenizer.resolve().is_relative_to(output.resolve()):
        # Starting afresh would remove it.
        raise UserError(f"{tokenizer}: lies inside the output folder; copy it to another place")
    for path in inputs:
        if path.is_dir() and output.resolve().is_relative_to(path.resolve()):
            raise UserError(f"{output}: lies inside the input {path}; choose another output folder")


def _request(
    listing: Listing,
    tokenizer: Path,
    source: SourceOptions,
    shares: Mapping[str, float],
    shard_bytes: int,
) -> dict[str, Any]:
    """All that decides the result, as plain values."""
    if not tokenizer.is_file():
        raise UserError(f"{tokenizer}: no such file; give a tokenizer recipe or a saved tokenizer")
    options = {
        **asdict(source),
        "exclude": list(source.exclude),
        "tokenizer": _tokenizer_request(tokenizer),
        "shares": dict(shares),
        "shard_bytes": shard_bytes,
    }
    files = [[file.name, file.size, file.modified_ns] for file in listing.files]
    left_out = {"hidden": listing.hidden, "linked": listing.linked}
    return {"options": options, **left_out, "inputs": files}


def _tokenizer_request(path: Path) -> dict[str, Any] | str:
    """What a recipe says, whatever its comments; the hash of a saved tokenizer."""
    if _is_recipe(path):
        return load_typed(path, Recipe).model_dump()
    return sha256_file(path)


def _is_recipe(path: Path) -> bool:
    return path.suffix in (".yaml", ".yml")


def _check_folder(output: Path) -> None:
    """Refuse a folder that is not a preparation's, before anything is written into it."""
    if not output.exists():
        return
    if not output.is_dir():
        raise UserError(f"{output}: is a file; choose another output folder")
    names = [path.name for path in output.iterdir()]
    # Hidden files are the lock, and what a kill before the first commit may leave.
    if REQUEST_NAME not in names and any(not name.startswith(".") for name in names):
        raise UserError(f"{output}: holds something else; choose another output folder")


def _is_finished(output: Path) -> bool:
    """Whether nothing is left to write, so that the folder need not even be locked."""
    whole = all((output / name).exists() for name in (REQUEST_NAME, INDEX_NAME, TOKENIZER_NAME))
    return whole and not (output / PROGRESS_NAME).exists()


def _make(job: "_Job", tokenizer: Path, request: dict[str, Any], overwrite: bool) -> bool:
    """Write what is missing into a locked folder; gives whether that was nothing."""
    _claim(job.output, request, overwrite)
    finished = (job.output / INDEX_NAME).exists()
    if not finished:
        job.write(_tokenizer(tokenizer, job))
    forget_progress(job.output)
    return finished


def _claim(output: Path, request: dict[str, Any], overwrite: bool) -> None:
    """Make the folder this request's own, or refuse it.

    A folder is bound to its request once it has a tokenizer: before, there is nothing to lose.
    """
    ours = output / REQUEST_NAME
    if ours.exists():
        if overwrite or not (output / TOKENIZER_NAME).exists():
            _clear(output)
        else:
            _refuse_changes(output, _read_request(ours), request)
    if not ours.exists():
        write_atomic(ours, json.dumps(request))


def _read_request(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_bytes())
    except ValueError:
        raise UserError(f"{path}: is damaged; {_AGAIN}") from None


def _refuse_changes(output: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    change = _first_change(old, new)
    if change:
        raise UserError(f"{output}: was begun from something else: {change}; {_AGAIN}")


def _first_change(old: dict[str, Any], new: dict[str, Any]) -> str | None:
    """What differs between two requests, in words."""
    for key, value in new["options"].items():
        if old["options"].get(key) != value:
            return f"{key} was {old['options'].get(key)!r}, now {value!r}"
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
    if old["hidden"] != new["hidden"]:
        return f"there were {old['hidden']} hidden files, now {new['hidden']}"
    if old.get("linked", 0) != new["linked"]:
        return f"there were {old.get('linked', 0)} linked folders, now {new['linked']}"
    return None


def _clear(output: Path) -> None:
    """Remove what a preparation writes, and nothing else. The request goes last."""
    forget_progress(output)
    (output / INDEX_NAME).unlink(missing_ok=True)
    (output / TOKENIZER_NAME).unlink(missing_ok=True)
    for split in SPLITS:
        for path in [*output.glob(f"{split}-*.tar"), *output.glob(f"{split}-*.npy")]:
            path.unlink()
    (output / REQUEST_NAME).unlink(missing_ok=True)


def _tokenizer(path: Path, job: _Job) -> Tokenizer:
    """The folder's tokenizer: the one saved by an earlier start, else trained or copied."""
    saved = job.output / TOKENIZER_NAME
    if not saved.exists():
        if _is_recipe(path):
            tokenizer = train_tokenizer(load_typed(path, Recipe), job.train_texts())
        else:
            tokenizer = load_tokenizer(path)
        tokenizer.save(saved)
    return load_tokenizer(saved)


def _explain(output: Path, error: OSError) -> UserError | None:
    if error.errno in _DISK_FULL:
        return UserError(
            f"{output}: the disk is full; free some space and run the same command again: "
            f"finished shards are kept"
        )
    if error.errno in _NO_PLACE:
        return UserError(f"{output}: cannot be written ({error.strerror}); choose another folder")
    return None
