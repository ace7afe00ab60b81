"""Raw text to a corpus folder: survey the inputs, train or load a tokenizer, write the shards.

The folder remembers in prepare.json what was asked for. The same request on an unfinished folder
goes on where it stopped and ends with the same bytes as an uninterrupted run; on a finished folder
it does nothing; another request is refused.

Two passes over the text are shared out among workers: the survey finds where every document lies
(survey.py), placement says from the documents' sizes which shard each goes to (placement.py), and
every task of the second pass makes one whole shard (writer.py). So the result is the same, byte
for byte, whatever the number of workers.
"""

import errno
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rlt_dist.config.load import load_typed
from rlt_dist.data.corpus.index import (
    INDEX_NAME,
    TOKENIZER_NAME,
    CorpusIndex,
    load_corpus,
    write_index,
)
from rlt_dist.data.corpus.shard import ShardEntry
from rlt_dist.data.corpus.sources import write_sources
from rlt_dist.data.prepare.chat import encode_conversations
from rlt_dist.data.prepare.encode import encode_texts
from rlt_dist.data.prepare.formats import is_json_lines, is_text
from rlt_dist.data.prepare.inputs import InputOptions, Listing, list_inputs
from rlt_dist.data.prepare.members import KEY_DIGITS
from rlt_dist.data.prepare.placement import Plan, Turns, documents_by_split, place
from rlt_dist.data.prepare.request import (
    Request,
    check_folder,
    claim,
    clear,
    describe_request,
    is_finished,
    is_recipe,
    refuse_changes,
    remove_partial_files,
)
from rlt_dist.data.prepare.survey import Survey, survey_unit, units_of
from rlt_dist.data.prepare.workers import Workers, local_workers
from rlt_dist.data.prepare.writer import PROGRESS_NAME, Writing, committed, write_shard
from rlt_dist.data.standing import Standing, Watch
from rlt_dist.data.tokenizers.recipe import Recipe
from rlt_dist.data.tokenizers.sample import draw, read_passages
from rlt_dist.data.tokenizers.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from rlt_dist.util.errors import UserError
from rlt_dist.util.files import remove_folder
from rlt_dist.util.lock import locked

DEFAULT_SHARES = {"train": 0.9, "validation": 0.05, "test": 0.05}
DEFAULT_SHARD_BYTES = 8 << 20
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_PLACE = (
    *(errno.EACCES, errno.EPERM, errno.EROFS),
    *(errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP),
)


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
    options: InputOptions | None = None,
    shares: Mapping[str, float] = DEFAULT_SHARES,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    overwrite: bool = False,
    workers: AbstractContextManager[Workers] | None = None,
    watch: Watch = lambda _: None,
) -> Prepared:
    """Make, or go on making, the corpus folder `output`.

    Args:
        inputs: files and folders, read in this order.
        tokenizer: a YAML recipe (the tokenizer is trained on the train split first) or a saved
            tokenizer.
        options: how documents are found and read.
        shares: each split's share of the documents; they add up to 1.
        shard_bytes: a shard is closed once it holds this much raw text.
        overwrite: start afresh in a folder that an earlier preparation made.
        workers: who does the work, this process if None; entered once there is some to do.
        watch: called as the work gets on.

    Raises:
        UserError: anything about the inputs, the options, the folder or the disk; a worker was
            killed; another process prepares a corpus in this folder.
    """
    options = options or InputOptions()
    _check_places(inputs, output, tokenizer)
    if shard_bytes < 1:
        raise UserError(f"the shard size is {shard_bytes} bytes; it must be at least 1")
    turns = Turns(shares)
    listing = list_inputs(inputs, options)
    if options.format == "chat":
        _check_chat(listing, tokenizer)
    _refuse_unused(listing, options)
    request = describe_request(listing, tokenizer, options, shares, shard_bytes)
    job = _Job(output, listing, options, turns, shard_bytes, watch)
    try:
        check_folder(output)
        finished = not overwrite and is_finished(output)
        if finished:
            refuse_changes(output, request)
        else:
            with locked(output, "prepares a corpus"):
                finished = _make(job, tokenizer, request, overwrite, workers or local_workers(1))
    except OSError as error:
        if problem := _explain(output, error):
            raise problem from error
        raise
    return Prepared(load_corpus(output), already_finished=finished)


def _check_places(inputs: Sequence[Path], output: Path, tokenizer: Path) -> None:
    if tokenizer.resolve().is_relative_to(output.resolve()):
        # Starting afresh would remove it.
        raise UserError(f"{tokenizer}: lies inside the output folder; copy it to another place")
    for path in inputs:
        if path.is_dir() and output.resolve().is_relative_to(path.resolve()):
            raise UserError(f"{output}: lies inside the input {path}; choose another output folder")


def _check_chat(listing: Listing, tokenizer: Path) -> None:
    others = [file.path for file in listing.files if not is_json_lines(file)]
    if others:
        raise UserError(
            f"{others[0]}: is no file of JSON lines (.jsonl, .ndjson), as conversations come in; "
            f"leave it out with --exclude"
        )
    if is_recipe(tokenizer):
        raise UserError(
            f"{tokenizer}: is a recipe, and conversations are for a model that is already there; "
            f"give the tokenizer.json of its run folder"
        )
    if not load_tokenizer(tokenizer).lossless:
        raise UserError(
            f"{tokenizer}: does not keep every text, so a message's role would be lost; "
            f"conversations need a tokenizer that is lossless"
        )


def _refuse_unused(listing: Listing, options: InputOptions) -> None:
    """Refuse an option that none of the files is read by."""
    texts = [is_text(file) for file in listing.files]
    if options.separator is not None and not any(texts):
        raise UserError(
            "--separator: stands between the documents of text files, and no input is one; leave "
            "it out"
        )
    if options.text_field != InputOptions.text_field:
        if options.format == "chat":
            raise UserError('--text-field: a conversation is always in "messages"; leave it out')
        if all(texts):
            raise UserError(
                "--text-field: is of JSON lines and Parquet, and no input is either; leave it out"
            )


def _make(
    job: "_Job",
    tokenizer: Path,
    request: Request,
    overwrite: bool,
    workers: AbstractContextManager[Workers],
) -> bool:
    """Write what is missing into a locked folder; gives whether that was nothing."""
    claim(job.output, request, overwrite)
    finished = (job.output / INDEX_NAME).exists()
    if not finished:
        try:
            with workers as crew:
                job.run(crew, tokenizer)
        finally:
            # Once no worker is left: what they were writing when an error ended them.
            remove_partial_files(job.output)
    remove_folder(job.output / PROGRESS_NAME)
    return finished


@dataclass(frozen=True)
class _Job:
    """One preparation under way."""

    output: Path
    listing: Listing
    options: InputOptions
    turns: Turns
    shard_bytes: int
    watch: Watch

    def run(self, workers: Workers, tokenizer: Path) -> None:
        """Do all that has not been done before; the index comes last."""
        survey = self.survey(workers)
        self.refuse_empty_splits(survey)
        made = self.tokenizer(tokenizer, survey)
        splits = self.write(workers, survey, made)
        write_sources(self.output, survey.sources())
        dropped = {
            "hidden_files": self.listing.hidden,
            "empty_documents": survey.empty_documents,
            "linked_folders": self.listing.linked,
            "cut_documents": survey.cut_documents,
        }
        labelled = self.options.format == "chat"
        write_index(self.output, made, splits, dropped, labelled=labelled)

    def survey(self, workers: Workers) -> Survey:
        """Find all documents."""
        progress = self.output / PROGRESS_NAME
        progress.mkdir(exist_ok=True)
        units = units_of(self.listing)
        bar = _Bar(self.watch, "surveying", self.listing.bytes)
        summaries = []
        for summary in workers.run(survey_unit, ((unit, self.options, progress) for unit in units)):
            size = sum(file.size for file in units[summary.number].files)
            bar.advance(size, sum(summary.documents))
            summaries.append(summary)
        survey = Survey(units, summaries, progress)
        if survey.documents > (most := 10**KEY_DIGITS):
            raise UserError(f"the inputs hold {survey.documents} documents; {most} are the most")
        return survey

    def refuse_empty_splits(self, survey: Survey) -> None:
        """A split without a document is of no use.

        Raises:
            UserError: there is one; nothing is left of this preparation, which must be asked for
                with other shares or inputs.
        """
        documents = survey.documents - survey.empty_documents
        if empty := self.turns.empty(documents):
            clear(self.output)
            raise UserError(
                f"split {', '.join(map(repr, empty))} would be empty: the inputs hold {documents} "
                f"documents ({survey.empty_documents} more are empty); give more documents, cut "
                f"the files with --separator, or change the splits' shares"
            )

    def tokenizer(self, path: Path, survey: Survey) -> Tokenizer:
        """The folder's tokenizer: the one saved by an earlier start, else trained or copied."""
        saved = self.output / TOKENIZER_NAME
        if not saved.exists():
            if is_recipe(path):
                recipe = load_typed(path, Recipe)
                tokenizer = train_tokenizer(recipe, self.train_passages(survey, recipe))
            else:
                tokenizer = load_tokenizer(path)
            tokenizer.save(saved)
        return load_tokenizer(saved)

    def train_passages(self, survey: Survey, recipe: Recipe) -> Iterator[bytes]:
        """A sample of the train split's text."""
        splits = documents_by_split(survey.sizes(), self.turns)
        train = ((ordinals, sizes) for split, ordinals, sizes in splits if split == "train")
        passages = draw(train, recipe.training_bytes)
        total = int(passages["bytes"].sum())
        bar = _Bar(self.watch, "training the tokenizer", total)
        texts = survey.read(np.unique(passages["document"]))
        for passage in read_passages(passages, texts):
            bar.advance(len(passage), 1)
            yield passage

    def write(
        self, workers: Workers, survey: Survey, tokenizer: Tokenizer
    ) -> dict[str, list[ShardEntry]]:
        """Write the shards that are not committed yet; gives every split's, in order."""
        bar = _Bar(self.watch, "writing shards", survey.bytes)
        entries: list[ShardEntry] = []
        encode = encode_conversations if self.options.format == "chat" else encode_texts
        writing = Writing(self.output, survey, tokenizer.hash, encode)

        def missing() -> Iterator[tuple[Writing, Plan]]:
            for plan in place(survey.sizes(), self.turns, self.shard_bytes):
                if entry := committed(self.output, plan.name):
                    entries.append(entry)
                    bar.advance(entry.bytes, entry.documents)
                else:
                    yield writing, plan

        for entry in workers.run(write_shard, missing()):
            entries.append(entry)
            bar.advance(entry.bytes, entry.documents, entry.tokens)
        entries.sort(key=lambda entry: int(entry.name.rpartition("-")[2]))
        return {
            split: [entry for entry in entries if entry.name.startswith(f"{split}-")]
            for split in self.turns.splits
        }


class _Bar:
    """Adds up how far a stage has come."""

    def __init__(self, watch: Watch, stage: str, total: int) -> None:
        self._watch = watch
        self._standing = Standing(stage, 0, total, 0, 0)
        watch(self._standing)

    def advance(self, size: int, documents: int, tokens: int = 0) -> None:
        """So much more is done."""
        old = self._standing
        self._standing = Standing(
            old.stage,
            old.bytes_read + size,
            old.bytes_total,
            old.documents + documents,
            old.tokens + tokens,
        )
        self._watch(self._standing)


def _explain(output: Path, error: OSError) -> UserError | None:
    if error.errno in _DISK_FULL:
        return UserError(
            f"{output}: the disk is full; free some space and run the same command again: "
            f"finished shards are kept"
        )
    if error.errno in _NO_PLACE:
        return UserError(f"{output}: cannot be written ({error.strerror}); choose another folder")
    return None
