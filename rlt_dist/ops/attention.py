"""Attention with grouped key/value heads under an explicit mask."""

import torch.nn.functional as F
from torch import Tensor


def attend(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
    """softmax(q k / sqrt(d_head)) v over the allowed keys.

    Query head h uses key/value head floor(h * KV / H).

    Args:
        query: [b, Q, H, d_head].
        key, value: [b, K, KV, d_head].
        allowed: bool [b, Q, K]; every query is allowed at least one key.

    Returns:
        [b, Q, H * d_head].
    """
    attended = F.scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2).to(query.dtype),
        value.transpose(1, 2).to(query.dtype),
        attn_mask=allowed[:, None],
        enable_gqa=query.shape[2] != key.shape[2],
    )
    return attended.transpose(1, 2).flatten(2)
