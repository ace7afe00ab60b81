"""What every tokenizer is: a table of the bytes each id stands for, and a file that is checked."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from rlt_dist.util.files import write_atomic

FORMAT = "rlt_dist tokenizer"
VERSION = 1


class Tokenizer(ABC):
    """Text, as bytes, to ids and back.

    Attributes:
        vocabulary: number of ids.
        end_of_text: the id that ends a document; `encode` never produces it.
        lossless: `decode(encode(x)) == x` for every bytes x.
        ranked: ids follow the words' frequency in the training corpus, commonest first.
        hash: hexadecimal SHA-256 of everything that defines this tokenizer.
    """

    kind: ClassVar[str]
    lossless: ClassVar[bool] = True
    ranked: ClassVar[bool] = False

    def __init__(self, learned: dict[str, Any], pieces: list[bytes], end_of_text: int) -> None:
        """`learned` is JSON-able and rebuilds this tokenizer; `pieces[i]` is id i's text."""
        self._content = {"format": FORMAT, "version": VERSION, "kind": self.kind, **learned}
        self._pieces = pieces
        self.vocabulary = len(pieces)
        self.end_of_text = end_of_text
        self.hash = content_hash(self._content)

    @classmethod
    @abstractmethod
    def restore(cls, content: dict[str, Any]) -> "Tokenizer":
        """Rebuild a tokenizer from the content of its file."""

    @abstractmethod
    def encode(self, text: bytes) -> np.ndarray:
        """Return the ids of `text`, int32 [n], without end-of-text."""

    def encode_many(self, texts: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
        """Encode several texts at once, each as `encode` does.

        Returns:
            Their ids one after another, int32 [n], and the number of each text's, int64 [texts].
        """
        encoded = [self.encode(text) for text in texts]
        ids = np.concatenate([np.empty(0, np.int32), *encoded])
        return ids, np.array([len(each) for each in encoded], np.int64)

    def decode(self, ids: Sequence[int] | np.ndarray) -> bytes:
        """Return the text that `ids` stand for; end-of-text stands for none.

        Raises:
            ValueError: an id is not in the vocabulary.
        """
        return b"".join([self._pieces[index] for index in self._checked(ids)])

    def byte_lengths(self) -> np.ndarray:
        """Return how many bytes of text each id stands for, int64 [vocabulary]; 0 for specials."""
        return np.array([len(piece) for piece in self._pieces], dtype=np.int64)

    def save(self, path: Path) -> None:
        """Write one JSON file, whole or not at all."""
        content = {**self._content, "hash": self.hash}
        write_atomic(path, json.dumps(content, indent=1) + "\n")

    def _checked(self, ids: Sequence[int] | np.ndarray) -> list[int]:
        # A negative id would silently count from the table's end.
        array = np.asarray(ids)
        if array.size and not (array.min() >= 0 and array.max() < self.vocabulary):
            raise ValueError(f"ids must lie in [0, {self.vocabulary})")
        return array.tolist()


def content_hash(content: dict[str, Any]) -> str:
    """Hexadecimal SHA-256 of what a JSON file holds, its own hash left out."""
    defining = {key: value for key, value in content.items() if key != "hash"}
    canonical = json.dumps(defining, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
