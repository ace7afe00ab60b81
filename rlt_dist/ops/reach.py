"""Which earlier tokens a token may attend to: one rule for every attention in the project.

A token's `position` is its index within its document. The token `distance` places before it in
its lane belongs to the same document exactly when distance <= position, so documents that start
inside a row, state that is still filling, and a limited reach are all the same comparison.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Reach:
    """The rule for the queries of a segment, as whatever computes attention wants to have it.

    Attributes:
        position: int64 [b, Q], positions of the queries, consecutive tokens of a lane.
        past: number of cached keys in front of the queries' own, newest last.
        limit: farthest distance seen; None: the whole document.
        dtype: the type that scores are formed in.
    """

    position: Tensor
    past: int
    limit: int | None
    dtype: torch.dtype

    @cached_property
    def mask(self) -> Tensor:
        """[b, Q, past + Q], 0 at the keys that a query sees, else -inf; formed when asked for."""
        return additive(reach_mask(self.position, self.past, self.limit), self.dtype)

    @cached_property
    def first(self) -> Tensor:
        """int32 [b, Q], the first key that each query sees; the last is its own, past + i.

        It never falls from one query to the next.
        """
        farthest = self.position if self.limit is None else self.position.clamp(max=self.limit)
        own = torch.arange(self.past, self.keys, device=self.position.device)
        return (own - farthest).clamp_(min=0).to(torch.int32)

    @cached_property
    def ends(self) -> Tensor:
        """int32 [b, K]: key k is seen by queries max(0, k - past) .. ends - 1, maybe by none."""
        key = torch.arange(self.keys, device=self.position.device, dtype=torch.int32)
        key = key.expand(len(self.first), -1).contiguous()
        return torch.searchsorted(self.first, key, right=True, out_int32=True)

    @property
    def keys(self) -> int:
        """K, past and own."""
        return self.past + self.position.shape[1]


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
