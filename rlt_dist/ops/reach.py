"""Which earlier tokens a token may attend to: one rule for every attention in the project.

A token's `position` is its index within its document. The token `distance` places before it in
its lane belongs to the same document exactly when distance <= position, so documents that start
inside a row, state that is still filling, and a limited reach are all the same comparison.
"""

import torch
from torch import Tensor


def segment_positions(document_start: Tensor, carried: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of a segment's tokens within their documents.

    Args:
        document_start: bool [b, T].
        carried: int64 [b], the position that the first token has if no document starts there.

    Returns:
        int64 [b, T], and int64 [b]: the position after the last token (the next `carried`).
    """
    index = torch.arange(document_start.shape[1], device=document_start.device)
    started = torch.where(document_start, index, -1).cummax(dim=1).values
    position = torch.where(started >= 0, index - started, carried[:, None] + index)
    return position, position[:, -1] + 1


def reach_mask(position: Tensor, past: int, limit: int | None) -> Tensor:
    """Which keys each query may see, where the keys are `past` earlier tokens and the queries'.

    Args:
        position: int64 [b, Q], positions of the queries, consecutive tokens of a lane.
        past: number of cached keys in front of the queries' own, newest last.
        limit: farthest distance seen; None: the whole document.

    Returns:
        bool [b, Q, past + Q], True where 0 <= distance <= min(position, limit).
    """
    queries = position.shape[1]
    query = torch.arange(queries, device=position.device)[:, None] + past
    key = torch.arange(past + queries, device=position.device)[None, :]
    distance = query - key
    farthest = position if limit is None else position.clamp(max=limit)
    return (distance >= 0) & (distance <= farthest[:, :, None])


def additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a key is seen, else -inf: what is added to scores before their softmax."""
    mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return mask.masked_fill_(~allowed, -torch.inf)


def newest(keys: Tensor, limit: int | None) -> Tensor:
    """The last `limit` entries along dimension 1 (all for None): what a later token may see."""
    if limit is None:
        return keys
    return keys[:, max(0, keys.shape[1] - limit) :]
