"""Attention with relative positions (Dai et al., "Transformer-XL", ACL 2019, section 3.3).

The score of query i and key j depends on their contents and on the distance i - j alone, so keys
that were cached long ago need no position of their own. This is the plain version that defines
the result: position scores are formed once per distance, [Q, K], then moved to their keys.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def sinusoids(
    count: int, width: int, clamp: int | None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """R_t = [sin(t f) ; cos(t f)], f_i = 10000^(-2i / width), for distances 0 .. count - 1.

    Angles are formed in float64, then rounded: distances at evaluation run to thousands.

    Args:
        width: d_model, even.
        clamp: distances beyond it share its row; None: none do.

    Returns:
        [count, width] of `dtype`, row t for distance t.
    """
    distance = torch.arange(count, dtype=torch.float64, device=device)
    if clamp is not None:
        distance = distance.clamp(max=clamp)
    index = torch.arange(width // 2, dtype=torch.float64, device=device)
    angle = distance[:, None] * 10000.0 ** (-2.0 * index / width)
    return torch.cat((angle.sin(), angle.cos()), dim=-1).to(dtype)


def attend_relative(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    relative: Tensor,
    biases: tuple[Tensor, Tensor],
    allowed: Tensor,
    keep: Tensor | None = None,
) -> Tensor:
    """softmax(((q_i + u) k_j + (q_i + v) r_{i-j}) / sqrt(d_head)) V over the allowed keys.

    The queries are the newest Q of the K tokens, so distances run from 0 to K - 1. The softmax is
    taken in float32 or wider.

    Args:
        query: [b, Q, H, d_head].
        key, value: [b, K, H, d_head].
        relative: [K, H, d_head], the projected R of distances K - 1 .. 0, as keys are ordered.
        biases: u and v, each [H, d_head].
        allowed: bool [b, Q, K]; every query is allowed at least one key, none is newer than it.
        keep: scaled keep-mask of the weights, [b, H, Q, K] with the distance last; None: all kept.

    Returns:
        [b, Q, H * d_head].
    """
    u, v = biases
    content = torch.einsum("bqhd,bkhd->bhqk", query + u, key)
    position = torch.einsum("bqhd,khd->bhqk", query + v, relative)
    scores = (content + by_key(position)) * query.shape[-1] ** -0.5
    scores = scores.masked_fill(~allowed[:, None], -torch.inf)
    weights = scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    if keep is not None:
        weights = weights * by_key(keep.flip(-1)).to(weights.dtype)
    return torch.einsum("bhqk,bkhd->bqhd", weights.to(value.dtype), value).flatten(2)


def by_key(by_distance: Tensor) -> Tensor:
    """Move a value that each query has for every distance to the key at that distance.

    Row i must move Q - 1 - i places to the left. One column of padding makes every row one longer,
    so reading the same numbers in rows of the old length moves each row one place less than the
    row above: no index tensor, and a backward pass that is the same on every device.

    Args:
        by_distance: [..., Q, K], columns for distances K - 1 .. 0, as keys are ordered.

    Returns:
        [..., Q, K], columns for keys, oldest first; entries of keys newer than the query are
        meaningless.
    """
    *leading, queries, keys = by_distance.shape
    padded = F.pad(by_distance, (1, 0)).flatten(-2)
    return padded[..., queries:].reshape(*leading, queries, keys)
