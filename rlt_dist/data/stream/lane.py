"""One lane's endless stream of tokens, from any cursor on."""

from collections.abc import Sequence

import numpy as np

from rlt_dist.data.corpus.shard import unscored
from rlt_dist.data.stream.damage import Damage
from rlt_dist.data.stream.documents import LaneDocuments
from rlt_dist.data.stream.lanes import Cursor, LanePlan
from rlt_dist.data.stream.mixture import Mixture, furthest_behind
from rlt_dist.util.errors import UserError

_OFFSET, _TOKENS = Cursor.FIELDS.index("offset"), Cursor.FIELDS.index("tokens")


class LaneStream:
    """The tokens of one lane, segment by segment."""

    def __init__(
        self,
        mixture: Mixture,
        plans: Sequence[LanePlan],
        lane: int,
        *,
        cursors: Sequence[Cursor] | None = None,
        max_document: int | None = None,
        damage: Damage | None = None,
    ) -> None:
        """Open the stream.

        Args:
            plans: all lanes' plan over each corpus (see `documents.plan_lanes`).
            cursors: where it goes on, one for each corpus; None: at the lane's very start. Only
                the corpus that is being read may stand inside a document.
            max_document: a longer document is read as several of this many tokens.
            damage: what to do about shards that cannot be read; None: give up.

        Raises:
            UserError: the cursors do not exist in these corpora, or a shard is damaged.
        """
        cursors = [Cursor()] * len(mixture) if cursors is None else cursors
        damage = Damage() if damage is None else damage
        self._weights = [share.weight for share in mixture]
        self._max_document = max_document
        self._corpora = [
            LaneDocuments(
                share.split, plan, lane, damage, epoch=cursor.epoch, ordinal=cursor.document
            )
            for share, plan, cursor in zip(mixture, plans, cursors, strict=True)
        ]
        self.places = [list(cursor.to_tuple()) for cursor in cursors]
        """The position of the next input token, as one cursor's numbers for each corpus."""
        inside = [corpus for corpus, cursor in enumerate(cursors) if cursor.offset]
        self._open_document(inside[0] if inside else self._behind())
        cursor = cursors[self._corpus]
        # Another document: the cursor's own can no longer be read, and was skipped.
        if self._place[:_OFFSET] == [cursor.epoch, cursor.document]:
            self._place[_OFFSET] = cursor.offset
        if len(inside) > 1 or self._place[_OFFSET] >= len(self._document):
            raise UserError(
                f"lane {lane} has no place {', '.join(map(str, cursors))}; "
                f"resume with the corpora, seed and number of lanes the run was started with"
            )

    @property
    def cursors(self) -> list[Cursor]:
        """The position of the next input token, as one cursor for each corpus."""
        return [Cursor.from_numbers(place) for place in self.places]

    def fill(
        self,
        tokens: np.ndarray,
        document_start: np.ndarray,
        loss_mask: np.ndarray,
        labels: np.ndarray | None = None,
    ) -> None:
        """Write the next T input tokens, and move the cursors behind them.

        Args:
            tokens: int64 [T + 1]; the last is the next segment's first input.
            document_start: bool [T], all False: becomes True where input i begins a document (or a
                piece of a long one).
            loss_mask: bool [T], all True: becomes False where input i ends a document, for its
                target is then the next document's first token; in a labelled document, where
                there is nothing to be predicted.
            labels: int64 [T], all -1: becomes what is to be predicted where a label says it. None:
                no document has labels.

        Raises:
            UserError: a shard is damaged.
        """
        length, filled = len(loss_mask), 0
        while True:
            document, place, offset = self._document, self._place, self._place[_OFFSET]
            end = offset + length - filled
            if end < len(document):
                tokens[filled:] = document[offset : end + 1]
                self._mark_starts(document_start[filled:], offset)
                if labels is not None:
                    self._write_labels(labels[filled:], loss_mask[filled:], offset)
                place[_OFFSET] = end
                place[_TOKENS] += end - offset
                return
            here = slice(filled, filled + len(document) - offset)
            tokens[here] = document[offset:]
            self._mark_starts(document_start[here], offset)
            filled = here.stop
            loss_mask[filled - 1] = False
            if labels is not None:
                self._write_labels(labels[here], loss_mask[here], offset)
            place[_TOKENS] += len(document) - offset
            self._open_document(self._behind())

    def _mark_starts(self, document_start: np.ndarray, offset: int) -> None:
        """Mark where documents begin among the tokens from `offset` on of the current one."""
        if self._max_document is not None:
            document_start[-offset % self._max_document :: self._max_document] = True
        elif offset == 0:
            document_start[:1] = True

    def _write_labels(self, labels: np.ndarray, loss_mask: np.ndarray, offset: int) -> None:
        """Write what the current document says of its tokens from `offset` on, if it has labels."""
        if self._labels is None:
            return
        own = self._labels[offset : offset + len(labels)]
        loss_mask[:] = own != unscored(own.dtype)
        labels[loss_mask] = own[loss_mask]

    def _behind(self) -> int:
        return furthest_behind(self._weights, [place[_TOKENS] for place in self.places])

    def _open_document(self, corpus: int) -> None:
        """Go on with a corpus's next document; the others stand before theirs."""
        for one, reader in enumerate(self._corpora):
            self.places[one][:_TOKENS] = [reader.epoch, reader.ordinal, 0]
        found = self._corpora[corpus].next()
        self._corpus, self._document, self._labels = corpus, found.tokens, found.labels
        self._place = self.places[corpus]
        self._place[:_OFFSET] = [found.epoch, found.ordinal]
