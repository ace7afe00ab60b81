"""Tokens of held-out documents, each with every length of context before it."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rlt_dist.data.corpus.index import SplitIndex
from rlt_dist.data.corpus.shard import tokens_and_labels
from rlt_dist.util.errors import UserError

_A_DOCUMENT = 128
"""Tokens of a document that are scored at most, so that no long one decides."""


@dataclass(frozen=True)
class Scope:
    """What is scored, and with how much context.

    Attributes:
        step: D, tokens from one context length to the next; the first is D itself.
        longest: the last context length, a multiple of D.
        tokens: how many tokens are scored.
    """

    step: int
    longest: int
    tokens: int

    @property
    def contexts(self) -> range:
        """The context lengths."""
        return range(self.step, self.longest + 1, self.step)


@dataclass(frozen=True, eq=False)
class Passages:
    """Windows of text in which each scored token is found once with every length of context.

    A window's token at place c has the c tokens from the window's start as its context. The scored
    tokens of a document are D apart, and so are the starts of its windows: token t is at place c of
    the window that starts at t - c. So a model reads D tokens for each of its losses, while windows
    of their own for all contexts would take longest / 2.

    Attributes:
        windows: int64 [w, longest], what is read; zeros beyond a document's end.
        targets: int64 [w, contexts], the tokens at places D, 2 D, ...
        numbers: int64 [w, contexts], which of the scored tokens they are; -1: none.
        scored: int64 [tokens], the scored tokens.
    """

    windows: np.ndarray
    targets: np.ndarray
    numbers: np.ndarray
    scored: np.ndarray


def read_passages(split: SplitIndex, scope: Scope) -> Passages:
    """Take scored tokens from a split's documents, in order, until there are enough.

    Raises:
        UserError: no document is longer than the longest context, or there are not enough tokens
            that have it.
    """
    parts: list[Passages] = []
    left = scope.tokens
    for document in _documents(split):
        if left <= 0:
            break
        if len(document) > scope.longest:
            parts.append(_of_document(document, scope, min(left, _A_DOCUMENT)))
            left -= len(parts[-1].scored)
    if not parts:
        raise UserError(
            f"{split.address}: no document of {split.name} is longer than {scope.longest} tokens; "
            "take a shorter --longest, or another corpus"
        )
    if left > 0:
        raise UserError(
            f"{split.address}: only {scope.tokens - left} tokens can be scored with "
            f"{scope.longest} tokens of context, at most {_A_DOCUMENT} of a document; take fewer "
            f"--tokens than {scope.tokens}, a shorter --longest, or more text"
        )
    first = np.cumsum([0, *(len(part.scored) for part in parts)])
    numbers = [
        np.where(part.numbers < 0, -1, part.numbers + base)
        for part, base in zip(parts, first, strict=False)
    ]
    return Passages(
        windows=np.concatenate([part.windows for part in parts]),
        targets=np.concatenate([part.targets for part in parts]),
        numbers=np.concatenate(numbers),
        scored=np.concatenate([part.scored for part in parts]),
    )


def _documents(split: SplitIndex) -> Iterator[np.ndarray]:
    for shard in split.shards:
        for document in shard.read(0, shard.entry.documents):
            yield tokens_and_labels(document)[0]


def _of_document(document: np.ndarray, scope: Scope, most: int) -> Passages:
    """The passages of one document: its scored tokens are those at longest, longest + D, ..."""
    step, contexts = scope.step, len(scope.contexts)
    last = min((len(document) - 1) // step, contexts + most - 1)  # the last scored one, in steps
    padded = np.zeros((last + contexts - 1) * step + 1, np.int64)
    known = document[: len(padded)]
    padded[: len(known)] = known
    starts = np.arange(last)[:, None]
    places = starts + np.arange(1, contexts + 1)
    is_scored = (places >= contexts) & (places <= last)
    return Passages(
        windows=padded[starts * step + np.arange(scope.longest)],
        targets=padded[places * step],
        numbers=np.where(is_scored, places - contexts, -1),
        scored=padded[np.arange(contexts, last + 1) * step],
    )
