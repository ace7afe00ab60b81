"""Does a tokenizer that says it is lossless return its text?"""

from collections.abc import Iterable

from rlt_dist.data.tokenizers.base import Tokenizer
from rlt_dist.util.errors import UserError

# What tokenizers are known to change: see google/sentencepiece#650 and #329.
HARD_TEXTS = (
    b"",
    b" ",
    b"  leading and trailing  ",
    b"a  b   c    d" + b" " * 99,
    b"\tif x:\n\t\ty\n",
    b"\n\n\n",
    b"one\r\ntwo\r\n",
    b"a\0b\0",
    "a\u2581b \u2581\u2585\u2047".encode(),
    b"\xff\xfe \x80 cut: \xe2\x96 \xed\xa0\x80",
    "\ufeff\u00a0\u3000\u200b\ufb01\u2460e\u0301".encode(),
    "\U0001f469\u200d\U0001f680 \U0001f1eb\U0001f1f7".encode(),
    b"<unk> <s> </s> <pad> <0x0A> <0xFF> <|endoftext|>",
    bytes(range(256)),
)
_AROUND = 16


def check_round_trip(tokenizer: Tokenizer, texts: Iterable[bytes]) -> None:
    """Check that every text is returned byte for byte, without end-of-text among its ids.

    Raises:
        UserError: one is not; the message shows the bytes around the first difference.
    """
    lengths = tokenizer.byte_lengths()
    for text in texts:
        ids = tokenizer.encode(text)
        if tokenizer.end_of_text in ids:
            raise UserError(
                f"the {tokenizer.kind} tokenizer writes end-of-text for {text[:64]!r}; "
                "it cannot be used"
            )
        returned = tokenizer.decode(ids)
        if returned != text:
            raise UserError(_difference(tokenizer.kind, text, returned))
        if int(lengths[ids].sum()) != len(text):
            raise UserError(
                f"the {tokenizer.kind} tokenizer counts {int(lengths[ids].sum())} bytes in a "
                f"text of {len(text)}, {text[:64]!r}; it cannot be used"
            )


def _difference(kind: str, text: bytes, returned: bytes) -> str:
    same = zip(text, returned, strict=False)
    offset = next((place for place, (a, b) in enumerate(same) if a != b), None)
    if offset is None:  # one is the other's beginning
        offset = min(len(text), len(returned))
    window = slice(max(0, offset - _AROUND), offset + _AROUND)
    return (
        f"the {kind} tokenizer is declared lossless but changes a text at byte {offset}: "
        f"{text[window]!r} became {returned[window]!r}; use another kind"
    )
