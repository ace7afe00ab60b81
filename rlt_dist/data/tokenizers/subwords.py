"""Subwords by sentencepiece (BPE or unigram), made lossless for every byte string.

sentencepiece reads Unicode and writes a space as U+2581, so it loses invalid UTF-8 and U+2581
itself; training also drops any sentence with NUL or U+2585. Those bytes go round it, each as its
own byte piece. Decoding is a table from id to bytes and never asks sentencepiece.
"""

import base64
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import sentencepiece

from rlt_dist.data.tokenizers.base import Tokenizer
from rlt_dist.util.errors import UserError

_END_OF_TEXT, _UNKNOWN = range(2)
FIXED_PIECES = 2 + 256  # end-of-text, unknown, one per byte

# What sentencepiece is never shown; invalid bytes decode to the lone surrogates.
_NEVER_SHOWN = "\udc80-\udcff\u2581\u2585\0"
_WORD_START = re.compile("(?<! ) ")

# sentencepiece's BPE slows down and its memory grows with the length of one input.
_CHUNK = 4096
_BLOCK = 1 << 20


class SubwordTokenizer(Tokenizer):
    """What BPE and unigram share: everything but the training algorithm."""

    def __init__(self, model: bytes) -> None:
        """`model` is a serialised sentencepiece model."""
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        pieces = [_text_of(processor, index) for index in range(processor.get_piece_size())]
        stored = {"model": base64.b64encode(model).decode()}
        super().__init__(stored, pieces, end_of_text=_END_OF_TEXT)
        self._processor = processor
        # A space that was never learned would come out as the three bytes of U+2581.
        knows_space = processor.piece_to_id("\u2581") != _UNKNOWN
        self._carried = _carried_runs(_NEVER_SHOWN + ("" if knows_space else " "))
        self._byte_ids = [processor.piece_to_id(f"<0x{value:02X}>") for value in range(256)]

    @classmethod
    def restore(cls, content: dict[str, Any]) -> "SubwordTokenizer":
        """Rebuild it from its sentencepiece model."""
        return cls(base64.b64decode(content["model"]))

    def encode(self, text: bytes) -> np.ndarray:
        """Return the ids of `text`, int32 [n], in time linear in its length."""
        blocks = _cut(text.decode("utf-8", "surrogateescape"), _BLOCK)
        ids = [np.array(self._encode_block(block), dtype=np.int32) for block in blocks]
        return np.concatenate(ids) if ids else np.empty(0, dtype=np.int32)

    def _encode_block(self, block: str) -> list[int]:
        parts = self._carried.split(block)  # shown to sentencepiece, carried, shown, carried, ...
        chunks = [list(_cut(part, _CHUNK)) for part in parts[::2]]
        flat = [chunk for group in chunks for chunk in group]
        encoded = iter(self._processor.encode(flat, num_threads=1))
        ids: list[int] = []
        for index, group in enumerate(chunks):
            for _ in group:
                ids.extend(next(encoded))
            for carried in parts[2 * index + 1 : 2 * index + 2]:
                ids.extend(self._byte_ids[byte] for byte in _to_bytes(carried))
        return ids


class BPETokenizer(SubwordTokenizer):
    """Byte-pair encoding."""

    kind = "bpe"


class UnigramTokenizer(SubwordTokenizer):
    """The unigram language model."""

    kind = "unigram"


def train_subwords(
    kind: type[SubwordTokenizer], passages: Sequence[bytes], vocabulary: int
) -> SubwordTokenizer:
    """Train sentencepiece on `passages`; one thread, so that equal text gives an equal model.

    Raises:
        UserError: the text does not suit the vocabulary; the nearest possible one is named.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_sentences(passages),
            model_writer=model,
            model_type=kind.kind,
            vocab_size=vocabulary,
            # Text stays as it is: nothing normalised, collapsed or put in front.
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            byte_fallback=True,
            eos_id=_END_OF_TEXT,
            eos_piece="<|endoftext|>",
            unk_id=_UNKNOWN,
            bos_id=-1,
            pad_id=-1,
            max_sentence_length=1 << 30,  # longer ones would be dropped without an error
            num_threads=1,
            minloglevel=2,
        )
        return kind(model.getvalue())
    except RuntimeError as error:
        raise _explain(error, vocabulary) from None


def _carried_runs(characters: str) -> re.Pattern[str]:
    """Splitting by this gives text for sentencepiece and runs that go round it, in turn."""
    return re.compile(f"([{characters}]+)")


def _sentences(passages: Iterable[bytes]) -> Iterator[str]:
    carried = _carried_runs(_NEVER_SHOWN)
    for passage in passages:
        parts = carried.split(passage.decode("utf-8", "surrogateescape"))
        yield from filter(None, parts[::2])


def _explain(error: RuntimeError, vocabulary: int) -> Exception:
    """Turn sentencepiece's complaints about the text into ours; return others as they are."""
    if "!sentences_.empty()" in str(error) or "no pieces are loaded" in str(error):
        return UserError("the corpus holds no text to learn subwords from; use kind 'bytes'")
    if found := re.search(r"set it to a value <= (\d+)", str(error)):
        return UserError(
            f"vocabulary {vocabulary} is too large for this text: the largest possible is "
            f"{found[1]}; lower it or give more text"
        )
    if found := re.search(r"smaller than required_chars\. \d+ vs (\d+)", str(error)):
        return UserError(
            f"vocabulary {vocabulary} is too small for this text: its characters and the fixed "
            f"pieces need at least {found[1]}"
        )
    return error


def _text_of(processor: sentencepiece.SentencePieceProcessor, index: int) -> bytes:
    """The bytes of text that an id stands for."""
    if processor.is_control(index) or processor.is_unknown(index):
        return b""
    piece: str = processor.id_to_piece(index)
    if processor.is_byte(index):
        return bytes([int(piece[1:-1], 16)])
    return piece.replace("\u2581", " ").encode()


def _to_bytes(carried: str) -> bytes:
    return carried.encode("utf-8", "surrogateescape")


def _cut(text: str, size: int) -> Iterator[str]:
    """Cut `text` into pieces of `size` characters or a little more.

    A cut falls where a space follows something else. No learned piece spans such a place, so the
    ids are those of the whole text. Text without spaces is cut after 16 * size characters.
    """
    start = 0
    while start < len(text):
        longest = start + 16 * size
        found = _WORD_START.search(text, start + size, longest)
        end = found.start() if found else longest
        yield text[start:end]
        start = end
