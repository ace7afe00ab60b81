"""Embedding lookup in a table whose rows may be cut over processes."""

import torch.nn.functional as F
from torch import Tensor

from rlt_dist.ops.seam import Seam


def lookup(ids: Tensor, table: Tensor, size: int, seam: Seam) -> Tensor:
    """Rows of a table of `size` rows.

    Args:
        ids: int64 [...], each in 0 .. size - 1.
        table: [rows, d], the rows `seam.own(size)` of it.

    Returns:
        [..., d]

    Raises:
        IndexError: an id is not in the table.
    """
    own = seam.own(size)
    if len(own) == size:
        return F.embedding(ids, table)
    check_ids(ids, size)
    here = inside(ids, own)
    found = rows_of(table, (ids - own.start).masked_fill(~here, 0))
    return seam.leave(found.masked_fill(~here[..., None], 0))


def check_ids(ids: Tensor, size: int) -> None:
    """Raises IndexError where an id is none of 0 .. size - 1, which no process would look up."""
    wrong = ids[(ids < 0) | (ids >= size)]
    if len(wrong):
        raise IndexError(f"id {int(wrong[0])} is none of 0 .. {size - 1}")


def inside(ids: Tensor, own: range) -> Tensor:
    """Which ids are in a range, bool [...]."""
    return (ids >= own.start) & (ids < own.stop)


def rows_of(table: Tensor, row: Tensor) -> Tensor:
    """Rows [..., d] of a table; 0, and a gradient of its own, where it has none at all."""
    return F.embedding(row, table) if len(table) else table.sum(dim=0).expand(*row.shape, -1)
