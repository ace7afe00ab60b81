"""Documents as the bytes of a tar: many members at once, exactly as tarfile and NumPy write them.

tarfile and NumPy take some 20 microseconds a member, nearly as long as tokenising a dictionary's
entry. Here a batch's headers are tables of digits, filled in column by column, and its tokens are
put in place by one assignment.
"""

import io
import tarfile
from zlib import crc32

import numpy as np

from rlt_dist.data.corpus.shard import DOCUMENT, NPY_HEADER, TAR_HEADER, unscored

KEY_DIGITS = 10
TAR_END = 2 * tarfile.BLOCKSIZE
"""Bytes of zeros that end a tar, which is then filled up to whole records."""

_BLOCK = tarfile.BLOCKSIZE
# Where a USTAR header keeps its octal numbers (POSIX.1-1988).
_SIZE, _CHECKSUM = slice(124, 135), slice(148, 156)


def tar_members(
    ordinals: np.ndarray,
    ids: np.ndarray,
    lengths: np.ndarray,
    end_of_text: int,
    dtype: np.dtype,
    labels: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Members `ORDINAL.npy` for some documents, one after another.

    Args:
        ordinals: int64 [n].
        ids: all documents' tokens without end-of-text, int32 [sum of lengths].
        lengths: of each document, int64 [n].
        dtype: of the tokens in the tar.
        labels: likewise int64, what is to be predicted after each token; below 0: nothing. None:
            the documents have none.

    Returns:
        The members' bytes, uint8, a multiple of 512; and the documents' `DOCUMENT` [n], with
        offsets from the first member's header and without their bytes of text.
    """
    documents = np.zeros(len(ordinals), DOCUMENT)
    documents["tokens"] = lengths + 1
    rows = 1 if labels is None else 2
    sizes = NPY_HEADER + documents["tokens"] * (rows * dtype.itemsize)
    blocks = 1 + -(-sizes // _BLOCK)
    first = np.cumsum(blocks) - blocks
    documents["offset"] = first * _BLOCK
    content = np.zeros(int(blocks.sum()) * _BLOCK, np.uint8)
    table = content.reshape(-1, _BLOCK)
    table[first] = _tar_headers(ordinals, sizes)
    table[first + 1, :NPY_HEADER] = _npy_headers(documents["tokens"], dtype, rows)
    tokens = content.view(dtype)
    begins = (documents["offset"] + TAR_HEADER + NPY_HEADER) // dtype.itemsize
    places = np.arange(len(ids)) + np.repeat(begins - (np.cumsum(lengths) - lengths), lengths)
    tokens[places] = ids
    tokens[begins + lengths] = end_of_text
    if labels is not None:
        nothing = unscored(dtype)
        tokens[places + np.repeat(lengths + 1, lengths)] = np.where(labels < 0, nothing, labels)
        tokens[begins + 2 * lengths + 1] = nothing
    documents["checksum"] = [
        crc32(tokens.data[begin:end])
        for begin, end in zip(
            begins.tolist(), (begins + rows * (lengths + 1)).tolist(), strict=True
        )
    ]
    return content, documents


def tar_end(size: int) -> bytes:
    """What is written after `size` bytes of members."""
    return bytes(TAR_END + -(size + TAR_END) % tarfile.RECORDSIZE)


def _tar_headers(ordinals: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """USTAR headers with TarInfo's own defaults (no time, no owner): uint8 [n, 512]."""
    name = tarfile.TarInfo("0" * KEY_DIGITS + ".npy")
    blank = np.frombuffer(name.tobuf(tarfile.USTAR_FORMAT), np.uint8).copy()
    blank[_CHECKSUM] = ord(" ")
    headers = np.empty((len(ordinals), TAR_HEADER), np.uint8)
    headers[:] = blank
    key, size = _digits(ordinals, KEY_DIGITS, 10), _digits(sizes, 11, 8)
    headers[:, :KEY_DIGITS] = key
    headers[:, _SIZE] = size
    # The sum of all bytes, with spaces for the sum itself; `blank` has a zero for every digit.
    zeros = (key.shape[1] + size.shape[1]) * ord("0")
    sums = int(blank.sum()) - zeros + key.sum(axis=1) + size.sum(axis=1)
    headers[:, 148:154] = _digits(sums, 6, 8)
    headers[:, 154] = 0
    return headers


def _npy_headers(tokens: np.ndarray, dtype: np.dtype, rows: int) -> np.ndarray:
    """Headers of arrays of one row, which have one dimension, or of two: uint8 [n, 128]."""
    headers = np.empty((len(tokens), NPY_HEADER), np.uint8)
    digits = np.char.str_len(tokens.astype(str))
    for count in np.unique(digits).tolist():
        stream = io.BytesIO()
        length = 10 ** (count - 1)
        shape = (length,) if rows == 1 else (rows, length)
        about = {"descr": dtype.str, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(stream, about)
        place = stream.getvalue().rindex(str(length).encode())
        mine = np.flatnonzero(digits == count)
        headers[mine] = np.frombuffer(stream.getvalue(), np.uint8)
        headers[mine, place : place + count] = _digits(tokens[mine], count, 10)
    return headers


def _digits(values: np.ndarray, count: int, base: int) -> np.ndarray:
    """Numbers as ASCII digits with leading zeros: uint8 [n, count]."""
    powers = base ** np.arange(count - 1, -1, -1)
    return (values[:, None] // powers % base + ord("0")).astype(np.uint8)
