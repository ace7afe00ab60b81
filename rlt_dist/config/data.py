"""What a run reads, and how."""

from pathlib import Path
from typing import Any

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from rlt_dist.config.load import Strict

Location = str
"""A folder's path, or its address: anything with a scheme, such as https:// or s3://."""


class CorpusConfig(Strict):
    """One corpus of a mixture."""

    path: Location
    weight: PositiveFloat = 1.0
    """Its share of the tokens, in proportion to the others'."""


class RemoteConfig(Strict):
    """How a corpus is read that lies at an address; a folder needs none of it."""

    cache: Path | None = None
    """Folder on this machine that keeps shards; null: rlt_dist/shards in the user's cache."""
    cache_gib: PositiveFloat | None = 64.0
    """Shards used least recently are removed beyond it; null: never."""
    attempts: PositiveInt = 6
    """How often a file is tried, with waits of 1, 2, 4, ... seconds between."""
    timeout: PositiveFloat = 30.0
    """Seconds without a byte after which an attempt has failed."""


class DataConfig(Strict):
    """Which corpora are read, and in what pieces."""

    path: Location | None = None
    """The corpus: a folder made by `rlt-dist data prepare`, or its address."""
    mixture: tuple[CorpusConfig, ...] | None = None
    """Several corpora instead: at a document's end a lane takes the one furthest behind."""
    lanes: PositiveInt
    """G: streams read side by side; the global batch."""
    segment: PositiveInt
    """T: tokens of every lane per optimizer step; the truncation length of BPTT."""
    max_document: PositiveInt | None = None
    """A longer document is read as several of at most this many tokens; null: never cut."""
    workers: NonNegativeInt | None = None
    """Processes of each rank that read ahead; null: one where a corpus is remote, else none."""
    ahead: PositiveInt = 4
    """Segments that such a process holds ready."""
    skip_bad_shards: bool = False
    """Go on where a shard cannot be read; what is left out is told and counted."""
    remote: RemoteConfig = RemoteConfig()

    @property
    def corpora(self) -> tuple[CorpusConfig, ...]:
        """The corpora with their weights, be there one or several."""
        if self.mixture is not None:
            return self.mixture
        assert self.path is not None
        return (CorpusConfig(path=self.path),)

    @property
    def reading_processes(self) -> int:
        """Worker processes of each rank."""
        if self.workers is not None:
            return self.workers
        return int(any(is_remote(corpus.path) for corpus in self.corpora))

    @property
    def tokens_per_step(self) -> int:
        """Of the global batch: G T."""
        return self.lanes * self.segment

    def resolved(self) -> "DataConfig":
        """The same with absolute paths."""
        update: dict[str, Any] = {}
        if self.path is not None:
            update["path"] = _absolute(self.path)
        if self.mixture is not None:
            update["mixture"] = tuple(
                corpus.model_copy(update={"path": _absolute(corpus.path)})
                for corpus in self.mixture
            )
        return self.model_copy(update=update)

    @model_validator(mode="after")
    def _one_or_several(self) -> "DataConfig":
        if (self.path is None) == (not self.mixture):
            raise ValueError(
                "give one corpus as path, or several as mixture: "
                "[{path: corpora/a, weight: 3}, {path: corpora/b, weight: 1}]"
            )
        return self


def is_remote(location: Location) -> bool:
    """Whether a location is an address elsewhere."""
    return "://" in location and not location.startswith("file://")


def _absolute(location: Location) -> Location:
    return location if "://" in location else str(Path(location).absolute())
