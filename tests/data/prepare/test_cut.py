"""A stream is cut where `bytes.split` cuts it, and long documents where their text allows it."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rlt_dist.data.prepare.cut import cut_sizes, find_documents

LONG = 1 << 20


def pieces_of(text: bytes, longest: int) -> list[bytes]:
    pieces = []
    for size in cut_sizes(text, longest):
        pieces.append(text[:size])
        text = text[size:]
    return pieces


def found(text: bytes, separator: bytes | None, longest: int, block: int) -> tuple[list, int]:
    """Documents found in blocks of a stream, and how many were cut."""
    blocks = [text[start : start + block] for start in range(0, len(text), block)]
    documents, cut = [], 0
    for spans in find_documents(blocks, separator, longest):
        cut += spans.cut
        for begin, size in zip(spans.begins.tolist(), spans.sizes.tolist(), strict=True):
            documents.append(text[begin : begin + size])
    return documents, cut


TEXTS = st.lists(
    st.sampled_from([b"a", b"b", b"ab", b" ", b"\n", "é€😀".encode(), b"\xff", b"\x80" * 5]),
    max_size=40,
).map(b"".join)


@given(
    text=TEXTS,
    separator=st.sampled_from([b"a", b"ab", b"aa", b"aba", b"bb", b"\n", None]),
    longest=st.sampled_from([4, 5, 7, 16, LONG]),
    block=st.integers(1, 11),
)
@example(text=b" ab b", separator=b"ab", longest=LONG, block=2)  # it straddles two blocks
def test_documents_are_the_same_wherever_blocks_end(
    text: bytes, separator: bytes | None, longest: int, block: int
) -> None:
    whole = [text] if separator is None else text.split(separator)
    documents, cut = found(text, separator, longest, block)
    assert documents == [piece for document in whole for piece in pieces_of(document, longest)]
    assert cut == sum(len(document) > longest for document in whole)


@given(text=TEXTS, longest=st.integers(4, 20))
def test_pieces_are_the_text_and_as_long_as_they_may_be(text: bytes, longest: int) -> None:
    pieces = pieces_of(text, longest)
    assert b"".join(pieces) == text
    assert max(map(len, pieces)) <= longest
    assert all(pieces) or pieces == [b""]
    # Few, too: three that follow each other would not fit into one, but for part of a character.
    threes = zip(pieces, pieces[1:], pieces[2:], strict=False)
    assert all(sum(map(len, three)) > longest - 4 for three in threes)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        (b"one\ntwo\nthree", [b"one\ntwo\n", b"three"]),
        (b"one two three", [b"one two", b" three"]),
        (b"12345678 9", [b"12345678", b" 9"]),
        (b"12 45678 9", [b"12 45678", b" 9"]),
        ("1234567é".encode(), [b"1234567", "é".encode()]),
        ("12345é7😀".encode(), ["12345é7".encode(), "😀".encode()]),
        (b"\x80" * 10, [b"\x80" * 8, b"\x80" * 2]),
        (b"12345678", [b"12345678"]),
    ],
)
def test_a_piece_ends_after_a_newline_else_before_a_space_else_at_a_character(
    text: bytes, pieces: list[bytes]
) -> None:
    assert pieces_of(text, 8) == pieces


@given(text=st.text(max_size=60), longest=st.integers(4, 9))
def test_no_character_is_cut(text: str, longest: int) -> None:
    assert "".join(piece.decode() for piece in pieces_of(text.encode(), longest)) == text
