"""The commonest words of a corpus, ranked: for word-level models and adaptive softmax.

A word is what stands between ASCII whitespace; a newline is a word of its own. Other spacing and
words outside the vocabulary are lost, so this kind is declared lossless: false.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from rlt_dist.data.tokenizers.base import Tokenizer
from rlt_dist.util.errors import UserError

_END_OF_TEXT, _UNKNOWN, _NEWLINE = range(3)
SPECIAL_WORDS = 3
_UNKNOWN_WORD = b"<unk>"
_WORD = re.compile(rb"\n|\S+")
_AROUND_NEWLINE = re.compile(rb" ?\n ?")


class WordsTokenizer(Tokenizer):
    """Whole words; ids 0 to 2 are end-of-text, `<unk>` and newline, then words by frequency.

    The literal word `<unk>`, which published word-level corpora contain, is the unknown word.
    """

    kind = "words"
    lossless = False
    ranked = True

    def __init__(self, words: list[bytes]) -> None:
        """`words` are the learned words, commonest first."""
        # JSON holds text, not bytes: invalid UTF-8 goes through as lone surrogates.
        stored = [word.decode("utf-8", "surrogateescape") for word in words]
        pieces = [b"", _UNKNOWN_WORD, b"\n", *words]
        super().__init__({"words": stored}, pieces, end_of_text=_END_OF_TEXT)
        self._ids = {word: index for index, word in enumerate(pieces) if index != _END_OF_TEXT}

    @classmethod
    def restore(cls, content: dict[str, Any]) -> "WordsTokenizer":
        """Rebuild it from its list of words."""
        return cls([word.encode("utf-8", "surrogateescape") for word in content["words"]])

    def encode(self, text: bytes) -> np.ndarray:
        """Return one id per word and newline, int32 [n]."""
        ids = [self._ids.get(word, _UNKNOWN) for word in _WORD.findall(text)]
        return np.array(ids, dtype=np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> bytes:
        """Return the words with one space between them and none beside a newline."""
        words = [self._pieces[index] for index in self._checked(ids) if index != _END_OF_TEXT]
        return _AROUND_NEWLINE.sub(b"\n", b" ".join(words))

    def byte_lengths(self) -> np.ndarray:
        """Return the words' own lengths, int64 [vocabulary]: spaces are not counted."""
        lengths = super().byte_lengths()
        lengths[_UNKNOWN] = 0
        return lengths


def train_words(passages: Iterable[bytes], vocabulary: int) -> WordsTokenizer:
    """Rank the words of `passages` and keep the commonest; equal counts go by byte order.

    Raises:
        UserError: there are fewer different words than the vocabulary asks for.
    """
    counts: Counter[bytes] = Counter()
    for passage in passages:
        counts.update(_WORD.findall(passage))
    for special in (_UNKNOWN_WORD, b"\n"):
        counts.pop(special, None)
    largest = len(counts) + SPECIAL_WORDS
    if largest < vocabulary:
        raise UserError(
            f"vocabulary {vocabulary} is too large for this text: the largest possible is "
            f"{largest}; lower it or give more text"
        )
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    return WordsTokenizer(ranked[: vocabulary - SPECIAL_WORDS])
