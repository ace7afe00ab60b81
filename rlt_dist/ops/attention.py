"""Attention with grouped key/value heads under an explicit mask."""

import torch.nn.functional as F
from torch import Tensor


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """softmax(q k / sqrt(d_head)) v over the keys that are seen.

    Query head h uses key/value head floor(h * KV / H).

    Args:
        query: [b, Q, H, d_head].
        key, value: [b, K, KV, d_head].
        mask: [b, Q, K], 0 where a query may see a key, else -inf, in the type of products; every
            query sees at least one key. (torch would turn booleans into this, and keep it, in
            every layer anew.)

    Returns:
        [b, Q, H * d_head].
    """
    attended = F.scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2).to(query.dtype),
        value.transpose(1, 2).to(query.dtype),
        attn_mask=mask[:, None],
        enable_gqa=query.shape[2] != key.shape[2],
    )
    return attended.transpose(1, 2).flatten(2)
