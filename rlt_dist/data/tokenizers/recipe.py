"""A tokenizer's recipe: what `tokenizer/*.yaml` may say."""

from typing import Literal

from pydantic import Field, model_validator

from rlt_dist.config.load import Strict
from rlt_dist.data.tokenizers.raw_bytes import BYTES_VOCABULARY
from rlt_dist.data.tokenizers.sample import PASSAGE_BYTES
from rlt_dist.data.tokenizers.subwords import FIXED_PIECES
from rlt_dist.data.tokenizers.words import SPECIAL_WORDS

Kind = Literal["bpe", "unigram", "bytes", "words"]

MOST_IDS = 1 << 24

# The smallest vocabulary of each learned kind that leaves room for something learned.
_LEAST = {"bpe": FIXED_PIECES + 1, "unigram": FIXED_PIECES + 1, "words": SPECIAL_WORDS + 1}


class Recipe(Strict):
    """How a tokenizer is made from a corpus.

    Attributes:
        kind: `bpe` and `unigram` learn subwords, `words` lists the commonest words, `bytes`
            learns nothing.
        vocabulary: number of ids, every special one counted, at most 2^24. `bytes` has 257 and
            may leave it out.
        training_bytes: text that training reads at most; a larger corpus is sampled.
        lossless: whether decoding returns every text byte for byte. `words` cannot.
    """

    kind: Kind
    vocabulary: int | None = Field(default=None, le=MOST_IDS)
    training_bytes: int = Field(default=32 << 20, ge=PASSAGE_BYTES)
    lossless: bool = True

    @model_validator(mode="after")
    def _agrees(self) -> "Recipe":
        if self.kind == "bytes":
            self._learns_nothing()
        elif self.vocabulary is None:
            raise ValueError(f"kind {self.kind!r} needs the key 'vocabulary'")
        elif self.vocabulary < _LEAST[self.kind]:
            raise ValueError(
                f"vocabulary {self.vocabulary} is too small: kind {self.kind!r} needs at least "
                f"{_LEAST[self.kind]}, its fixed ids and one learned"
            )
        if self.kind == "words" and self.lossless:
            raise ValueError(
                "kind 'words' loses spacing and rare words; write 'lossless: false' to accept that"
            )
        if self.kind != "words" and not self.lossless:
            raise ValueError(f"kind {self.kind!r} is lossless; take 'lossless: false' out")
        return self

    def _learns_nothing(self) -> None:
        if self.vocabulary not in (None, BYTES_VOCABULARY):
            raise ValueError(
                f"kind 'bytes' has {BYTES_VOCABULARY} ids (256 bytes and end-of-text), "
                f"not {self.vocabulary}"
            )
        if "training_bytes" in self.model_fields_set:
            raise ValueError("kind 'bytes' learns nothing; take 'training_bytes' out")

    @property
    def size(self) -> int:
        """Number of ids of the tokenizer this recipe makes."""
        return BYTES_VOCABULARY if self.vocabulary is None else self.vocabulary
