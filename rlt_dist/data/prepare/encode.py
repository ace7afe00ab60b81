"""Documents as tokens, on their way into a shard."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rlt_dist.data.tokenizers.tokenizer import Tokenizer

UNSCORED = -1
"""The label of a token after which nothing is to be predicted."""


@dataclass(frozen=True, eq=False)
class Encoded:
    """Some documents as tokens, without end-of-text.

    Attributes:
        ids: of all documents one after another, int32 [n].
        lengths: of each document, int64 [documents].
        bytes: of each one's text, int64 [documents].
        labels: what is to be predicted after each token, int64 [n], or UNSCORED. None: the next
            token.
    """

    ids: np.ndarray
    lengths: np.ndarray
    bytes: np.ndarray
    labels: np.ndarray | None = None


Encode = Callable[[Sequence[bytes], Tokenizer], Encoded]
"""From some documents' texts, their tokens."""


def encode_texts(texts: Sequence[bytes], tokenizer: Tokenizer) -> Encoded:
    """Texts whose every token is to be predicted."""
    ids, lengths = tokenizer.encode_many(texts)
    return Encoded(ids, lengths, np.array([len(text) for text in texts], np.int64))
