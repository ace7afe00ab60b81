"""One lane's endless stream of tokens, from any cursor on."""

from collections.abc import Sequence

import numpy as np

from rlt_dist.data.stream.damage import Damage
from rlt_dist.data.stream.documents import LaneDocuments
from rlt_dist.data.stream.lanes import Cursor, LanePlan
from rlt_dist.data.stream.mixture import Mixture, furthest_behind
from rlt_dist.util.errors import UserError


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
        self._tokens = [cursor.tokens for cursor in cursors]
        self._corpora = [
            LaneDocuments(
                share.split, plan, lane, damage, epoch=cursor.epoch, ordinal=cursor.document
            )
            for share, plan, cursor in zip(mixture, plans, cursors, strict=True)
        ]
        inside = [corpus for corpus, cursor in enumerate(cursors) if cursor.offset]
        self._open_document(inside[0] if inside else self._behind())
        cursor = cursors[self._corpus]
        # Another document: the cursor's own can no longer be read, and was skipped.
        if (self._document.epoch, self._document.ordinal) == (cursor.epoch, cursor.document):
            self._offset = cursor.offset
        if len(inside) > 1 or self._offset >= len(self._document.tokens):
            raise UserError(
                f"lane {lane} has no place {', '.join(map(str, cursors))}; "
                f"resume with the corpora, seed and number of lanes the run was started with"
            )

    @property
    def cursors(self) -> list[Cursor]:
        """The position of the next input token, as one cursor for each corpus."""
        cursors = [
            Cursor(corpus.epoch, corpus.ordinal, 0, tokens)
            for corpus, tokens in zip(self._corpora, self._tokens, strict=True)
        ]
        here = self._document
        cursors[self._corpus] = Cursor(
            here.epoch, here.ordinal, self._offset, self._tokens[self._corpus]
        )
        return cursors

    def fill(self, tokens: np.ndarray, document_start: np.ndarray, loss_mask: np.ndarray) -> None:
        """Write the next T input tokens, and move the cursors behind them.

        Args:
            tokens: int64 [T + 1]; the last is the next segment's first input.
            document_start: bool [T]: input i begins a document (or a piece of a long one).
            loss_mask: bool [T]: False where input i ends a document, for its target is then the
                next document's first token.

        Raises:
            UserError: a shard is damaged.
        """
        length = len(document_start)
        document_start[:] = False
        loss_mask[:] = True
        filled = 0
        while filled < length:
            document, offset, begin = self._document.tokens, self._offset, filled
            filled += min(length - filled, len(document) - offset)
            self._offset += filled - begin
            self._tokens[self._corpus] += filled - begin
            tokens[begin:filled] = document[offset : self._offset]
            self._mark_starts(document_start[begin:filled], offset)
            if self._offset == len(document):
                loss_mask[filled - 1] = False
                self._open_document(self._behind())
        tokens[length] = self._document.tokens[self._offset]

    def _mark_starts(self, document_start: np.ndarray, offset: int) -> None:
        """Mark where documents begin among the tokens from `offset` on of the current one."""
        if self._max_document is not None:
            document_start[-offset % self._max_document :: self._max_document] = True
        elif offset == 0:
            document_start[0] = True

    def _behind(self) -> int:
        return furthest_behind(self._weights, self._tokens)

    def _open_document(self, corpus: int) -> None:
        self._corpus = corpus
        self._document = self._corpora[corpus].next()
        self._offset = 0
