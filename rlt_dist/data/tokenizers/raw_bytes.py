"""The tokenizer that learns nothing: id b is byte b, and 256 ends a document."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlt_dist.data.tokenizers.base import Tokenizer

BYTES_VOCABULARY = 257


class BytesTokenizer(Tokenizer):
    """One id per byte."""

    kind = "bytes"

    def __init__(self) -> None:
        pieces = [bytes([value]) for value in range(256)]
        super().__init__({}, [*pieces, b""], end_of_text=256)

    @classmethod
    def restore(cls, content: dict[str, Any]) -> "BytesTokenizer":  # noqa: ARG003
        """Rebuild it; there is nothing to read."""
        return cls()

    def encode(self, text: bytes) -> np.ndarray:
        """Return the bytes' values, int32 [len(text)]."""
        return np.frombuffer(text, dtype=np.uint8).astype(np.int32)

    def encode_many(self, texts: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
        """Return all texts' bytes, int32 [n], and the texts' lengths, int64 [texts]."""
        return self.encode(b"".join(texts)), np.array([len(text) for text in texts], np.int64)
