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
_NEVER_SHOWN = "\u2581\u2585\0"
_INVALID = "\udc80-\udcff"
_WORD_START = re.compile(b"(?<! ) ")

# Bytes. sentencepiece's BPE slows down and its memory grows with the length of one input.
_CHUNK = 4096


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
        never_shown = _NEVER_SHOWN + ("" if knows_space else " ")
        self._carried = _carried_runs(never_shown)
        self._foreign = sorted(character.encode() for character in never_shown)
        self._foreign_ascii = sum(map(bytes.isascii, self._foreign))
        byte_ids = [processor.piece_to_id(f"<0x{value:02X}>") for value in range(256)]
        self._byte_ids = np.array(byte_ids, np.int32)

    @classmethod
    def restore(cls, content: dict[str, Any]) -> "SubwordTokenizer":
        """Rebuild it from its sentencepiece model."""
        return cls(base64.b64decode(content["model"]))

    def encode(self, text: bytes) -> np.ndarray:
        """Return the ids of `text`, int32 [n], in time linear in its length."""
        return self.encode_many([text])[0]

    def encode_many(self, texts: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
        """Return all texts' ids, int32 [n], and how many each has, int64 [texts].

        One call of sentencepiece for all of them: every call starts threads of its own.
        """
        plain = self._is_plain(b"\n".join(texts))
        if plain and max(map(len, texts), default=0) <= _CHUNK:
            encoded = self._encode_plain(texts)
            lengths = np.array([len(ids) for ids in encoded], np.int64)
        else:
            encoded, lengths = self._encode_parts(texts, plain)
        return np.concatenate([np.empty(0, np.int32), *encoded]), lengths

    def _encode_plain(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """What sentencepiece makes of text that it does not change."""
        return self._processor.encode(list(texts), num_threads=1, return_type="numpy")

    def _encode_parts(
        self, texts: Sequence[bytes], plain: bool
    ) -> tuple[list[np.ndarray], np.ndarray]:
        """The ids of the parts of any texts, in order, and the number of each text's ids."""
        shown: list[bytes] = []
        parts: list[np.ndarray | None] = []  # None: the next one shown to sentencepiece
        ends = [0]
        for text in texts:
            separate = [text] if plain or self._is_plain(text) else self._separate(text)
            for number, part in enumerate(separate):
                if number % 2:
                    parts.append(self._byte_ids[np.frombuffer(part, np.uint8)])
                else:
                    chunks = _cut(part)
                    shown += chunks
                    parts += [None] * len(chunks)
            ends.append(len(parts))
        encoded = iter(self._encode_plain(shown))
        whole = [next(encoded) if part is None else part for part in parts]
        before = np.cumsum([0, *map(len, whole)])
        return whole, np.diff(before[ends])

    def _separate(self, text: bytes) -> list[bytes]:
        """Cut a text into what sentencepiece is shown, what goes round it, shown, and so on."""
        parts = self._carried.split(text.decode("utf-8", "surrogateescape"))
        return [part.encode("utf-8", "surrogateescape") for part in parts]

    def _is_plain(self, text: bytes) -> bool:
        searched = self._foreign[: self._foreign_ascii] if text.isascii() else self._foreign
        if any(character in text for character in searched):
            return False
        try:
            text.decode()
        except UnicodeDecodeError:
            return False
        return True


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
    return re.compile(f"([{_INVALID}{characters}]+)")


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


def _cut(text: bytes) -> list[bytes]:
    """Cut valid UTF-8 into pieces of `_CHUNK` bytes or a little more.

    A cut falls where a space follows something else. No learned piece spans such a place, so the
    ids are those of the whole text. Text without spaces is cut after 16 * _CHUNK bytes.
    """
    pieces = []
    start = 0
    while len(text) - start > _CHUNK:
        longest = start + 16 * _CHUNK
        found = _WORD_START.search(text, start + _CHUNK, longest)
        end = found.start() if found else _before_character(text, longest)
        pieces.append(text[start:end])
        start = end
    if start < len(text):
        pieces.append(text[start:] if start else text)
    return pieces


def _before_character(text: bytes, place: int) -> int:
    """`place`, or where the character begins that it would cut."""
    while place < len(text) and text[place] & 0xC0 == 0x80:
        place -= 1
    return place
