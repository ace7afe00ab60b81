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
    if ids.numel() and (ids.min() < 0 or ids.max() >= size):
        raise IndexError(f"an id is none of 0 .. {size - 1}")
    here = (ids >= own.start) & (ids < own.stop)
    local = (ids - own.start).masked_fill(~here, 0)
    found = F.embedding(local, table) if len(own) else table.new_zeros(*ids.shape, table.shape[1])
    return seam.leave(found.masked_fill(~here[..., None], 0))
