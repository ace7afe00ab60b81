"""The corpora of a run: opened, and seen to fit each other."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from rlt_dist.config.data import DataConfig, RemoteConfig
from rlt_dist.data.corpus.index import CorpusIndex, load_corpus
from rlt_dist.data.corpus.storage import RemoteOptions
from rlt_dist.data.stream.documents import plan_lanes
from rlt_dist.data.stream.mixture import Mixture, Share
from rlt_dist.data.stream.reading import Reading
from rlt_dist.data.tokenizers.tokenizer import Tokenizer
from rlt_dist.util.errors import UserError
from rlt_dist.util.weights import whole_weights


@dataclass(frozen=True, eq=False)
class Corpora:
    """One corpus, or several with weights; one tokenizer made them all."""

    corpora: tuple[CorpusIndex, ...]
    weights: tuple[int, ...]

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of all."""
        return self.corpora[0].tokenizer

    @property
    def location(self) -> str:
        """Where they lie, for messages."""
        return ", ".join(corpus.location for corpus in self.corpora)

    @property
    def fingerprint(self) -> str:
        """What decides their tokens and in which order they come."""
        if len(self.corpora) == 1:
            return self.corpora[0].fingerprint
        parts = [corpus.fingerprint for corpus in self.corpora]
        content = json.dumps([parts, self.weights], separators=(",", ":"))
        return hashlib.sha256(content.encode()).hexdigest()

    def split(self, name: str) -> Mixture:
        """A split of each.

        Raises:
            UserError: a corpus has no such split.
        """
        pairs = zip(self.corpora, self.weights, strict=True)
        return tuple(Share(corpus.split(name), weight) for corpus, weight in pairs)

    def reading(self, split: str, config: DataConfig, seed: int) -> Reading:
        """How a run reads a split.

        Raises:
            UserError: a corpus has no such split.
        """
        return Reading(
            self.split(split),
            lanes=config.lanes,
            segment=config.segment,
            seed=seed,
            max_document=config.max_document,
            skip_bad_shards=config.skip_bad_shards,
        )


def open_corpora(config: DataConfig, *, check: bool = True) -> Corpora:
    """Open a run's corpora.

    Args:
        check: look for every shard's files, unless bad ones are to be skipped. One of a run's
            processes is enough.

    Raises:
        UserError: one is missing or damaged, or given twice, or they were made by different
            tokenizers.
    """
    remote, check = remote_options(config.remote), check and not config.skip_bad_shards
    corpora = tuple(load_corpus(corpus.path, remote, check=check) for corpus in config.corpora)
    for place, other in enumerate(corpora):
        _check_with(other, corpora[:place])
    return Corpora(corpora, whole_weights([corpus.weight for corpus in config.corpora]))


def _check_with(other: CorpusIndex, before: Sequence[CorpusIndex]) -> None:
    for corpus in before:
        if other.tokenizer.hash != corpus.tokenizer.hash:
            raise UserError(
                f"{other.location}: was made by another tokenizer than {corpus.location}; prepare "
                f"it again with the tokenizer.json of that corpus"
            )
        if other.fingerprint == corpus.fingerprint:
            raise UserError(
                f"{other.location}: is the same corpus as {corpus.location}; give it once, with a "
                f"larger weight"
            )


def remote_options(config: RemoteConfig) -> RemoteOptions:
    """The configuration's choices in the storage's terms."""
    limit = None if config.cache_gib is None else round(config.cache_gib * 2**30)
    return RemoteOptions(config.cache, limit, config.attempts, config.timeout)


def check_lanes(mixture: Mixture, lanes: int, seed: int) -> None:
    """See that every lane finds something to read.

    Raises:
        UserError: a corpus has fewer documents than there are lanes.
    """
    for share in mixture:
        plan_lanes(share.split, lanes, seed)
