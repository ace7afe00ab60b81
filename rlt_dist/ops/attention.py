"""Attention with grouped key/value heads under an explicit mask."""

import torch.nn.functional as F
from torch import Tensor

from rlt_dist.ops.choice import takes_triton
from rlt_dist.ops.precision import product_dtype
from rlt_dist.ops.reach import Reach


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


def attend_within(query: Tensor, key: Tensor, value: Tensor, reach: Reach) -> Tensor:
    """`attend` to the keys that `reach` lets each query see, in triton's kernels on a GPU.

    They never form the mask, nor read keys that no query of a block sees. Products have the type
    that autocast asks for, in both.
    """
    dtype = product_dtype(query)
    if not takes_triton(query.device.type, dtype, query.shape[-1]):
        return attend(query, key, value, reach.mask)
    from rlt_dist.ops.triton.band import attend_band

    return attend_band(query.to(dtype), key, value, reach)
