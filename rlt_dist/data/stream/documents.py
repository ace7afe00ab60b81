"""One lane's documents of one corpus, without end: run after run, epoch after epoch.

A run is read by a webdataset pipeline of two stages: the spans of documents that are left of it,
and their samples. The second stage takes each sample from where the shard's sidecar says it is, so
that nothing before the first is read, and each shard is opened once while the lane reads forward.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypedDict

import numpy as np
import webdataset as wds

from rlt_dist.data.corpus.index import SplitIndex
from rlt_dist.data.corpus.shard import Shard, tokens_and_labels
from rlt_dist.data.corpus.storage import BadShard
from rlt_dist.data.stream.damage import Damage
from rlt_dist.data.stream.lanes import LanePlan, Run
from rlt_dist.util.errors import UserError

_BARREN_EPOCHS = 16
"""Of a lane. A run may lie in one shard alone, so a single bad one can take some epochs whole."""


@dataclass(frozen=True, eq=False)
class Document:
    """A document as a lane meets it.

    Attributes:
        epoch: the lane's own.
        ordinal: of the document in the lane's run of that epoch.
        tokens: unsigned [n], end-of-text included.
        labels: unsigned [n], what is to be predicted after each (see `unscored`); None: the next.
    """

    epoch: int
    ordinal: int
    tokens: np.ndarray
    labels: np.ndarray | None


class LaneDocuments:
    """What a lane reads of a corpus.

    Attributes:
        epoch: of the next document.
        ordinal: of the next document.
    """

    def __init__(
        self,
        split: SplitIndex,
        plan: LanePlan,
        lane: int,
        damage: Damage,
        *,
        epoch: int = 0,
        ordinal: int = 0,
    ) -> None:
        """Begin at the lane's document `ordinal` of its epoch `epoch`; nothing is opened yet.

        Args:
            damage: what to do about shards that cannot be read.

        Raises:
            UserError: the lane's run of that epoch has no such document.
        """
        self._split, self._plan, self._lane, self._damage = split, plan, lane, damage
        self._open(epoch, ordinal)
        if ordinal >= self._run.documents:
            raise UserError(
                f"{split.address}: lane {lane} has no document {ordinal} in its epoch "
                f"{epoch}; resume with the corpus, seed and number of lanes the run was started "
                "with"
            )

    def next(self) -> Document:
        """The next document.

        Raises:
            UserError: a shard is damaged, and damage is not to be skipped; or all that the lane
                was to read is, for many epochs.
        """
        barren = 0
        while (sample := next(self._samples, None)) is None:  # the rest of the run was skipped
            if barren == _BARREN_EPOCHS:
                raise UserError(
                    f"{self._split.address}: lane {self._lane} found no readable document in "
                    f"{barren} whole epochs; repair the corpus"
                )
            self._open(self.epoch + 1, 0)
            barren += 1
        document = Document(self.epoch, sample["ordinal"], *tokens_and_labels(sample["npy"]))
        self.ordinal = document.ordinal + 1
        if self.ordinal == self._run.documents:
            self._open(self.epoch + 1, 0)
        return document

    def _open(self, epoch: int, ordinal: int) -> None:
        """Make a webdataset pipeline over the lane's run of an epoch, from a document on."""
        self.epoch, self.ordinal = epoch, ordinal
        self._run = self._plan.run(epoch, self._lane)
        stretches = partial(_stretches, self._split, self._run, ordinal)
        pipeline = wds.DataPipeline(stretches, partial(_samples, self._damage))
        self._samples: Iterator[_Sample] = iter(pipeline)


class _Stretch(TypedDict):
    """Documents `first` to `last` (exclusive) of a shard; the first is the run's `ordinal`-th."""

    shard: Shard
    first: int
    last: int
    ordinal: int


class _Sample(TypedDict):
    """A document: its ordinal in the lane's run, and its tokens, with their labels if any."""

    ordinal: int
    npy: np.ndarray


def _stretches(split: SplitIndex, run: Run, ordinal: int) -> Iterator[_Stretch]:
    """Stage 1: what is left of a run from its document `ordinal` on.

    While one shard is read, the next is brought here if it is elsewhere.
    """
    spans = run.after(ordinal)
    for span, coming in zip(spans, [*spans[1:], None], strict=True):
        if coming is not None:
            split.shards[coming.shard].prefetch()
        shard = split.shards[span.shard]
        yield _Stretch(shard=shard, first=span.first, last=span.last, ordinal=ordinal)
        ordinal += span.last - span.first


def _samples(damage: Damage, stretches: Iterable[_Stretch]) -> Iterator[_Sample]:
    """Stage 2: the documents. What was left to read of a damaged shard may be skipped."""
    for stretch in stretches:
        first, last, ordinal = stretch["first"], stretch["last"], stretch["ordinal"]
        try:
            for document in stretch["shard"].read(first, last):
                yield _Sample(ordinal=ordinal, npy=document)
                first, ordinal = first + 1, ordinal + 1
        except BadShard as error:
            damage.meet(error, last - first)


def plan_lanes(split: SplitIndex, lanes: int, seed: int) -> LanePlan:
    """The plan of `lanes` lanes over a split.

    Raises:
        UserError: the split has fewer documents than lanes.
    """
    entries = [shard.entry for shard in split.shards]
    try:
        return LanePlan(
            [entry.documents for entry in entries],
            [entry.tokens for entry in entries],
            lambda shard: split.shards[shard].sidecar()["tokens"],
            lanes,
            seed,
        )
    except UserError as error:
        raise UserError(f"{split.address}: {error}") from None
