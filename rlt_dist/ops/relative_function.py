"""Attention with relative positions as one autograd Function: what the model runs.

`ops.relative.attend_relative` defines the result. Here everything is ordered heads first, so that
content products are one batch of H * b matrices and position products, whose R all lanes share,
one tall matrix per head. Nothing is moved from distances to keys: rows of length K read as rows of
length K - 1 are each one place further left than the row above, which is what moves a distance to
its key, so the two are views of one memory. For backward the weights are kept, never the scores.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlt_dist.ops.choice import takes_triton
from rlt_dist.ops.noise import WeightMask
from rlt_dist.ops.reach import Reach
from rlt_dist.ops.relative import by_key

_SCRATCH = 1 << 19
"""Scores formed at a time where none are kept: as many as a processor's own cache holds."""
_FEWEST_QUERIES = 64
"""Queries taken together however many keys there are: products of fewer rows are slow."""


def attend_relative_within(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    relative: Tensor,
    biases: tuple[Tensor, Tensor],
    reach: Reach,
    dropped: WeightMask | None = None,
) -> Tensor:
    """`relative_attention` to the keys of `reach`, in triton's kernels on a GPU.

    They form neither masks nor weights in memory; `dropped` names the weights that are dropped.
    """
    if takes_triton(query.device.type, query.dtype, query.shape[-1]):
        from rlt_dist.ops.triton.relative import attend_relative

        return attend_relative(query, key, value, relative, biases, reach, dropped)
    keep = None if dropped is None else dropped.drawn(query.shape[1], key.shape[1])
    return relative_attention(query, key, value, relative, biases, reach.mask, keep)


def relative_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    relative: Tensor,
    biases: tuple[Tensor, Tensor],
    mask: Tensor,
    keep: Tensor | None = None,
) -> Tensor:
    """`attend_relative` at speed.

    Args:
        query: [b, Q, H, d_head].
        key, value: [b, K, H, d_head]; views of [H, b, K, d_head] are not copied.
        relative: [K, H, d_head], the projected R of distances K - 1 .. 0, as keys are ordered.
        biases: u and v, each [H, d_head].
        mask: [b, Q, K], 0 where a query may see a key, else -inf; float32 or wider. It has the
            type that the softmax is taken in.
        keep: scaled keep-mask of the weights, [b, H, Q, K] with the distance last; None: all kept.

    Returns:
        [b, Q, H * d_head].
    """
    operands = (
        heads_first(query),
        heads_first(key).contiguous(),
        heads_first(value).contiguous(),
        relative.transpose(0, 1),
        *biases,
        mask,
        None if keep is None else by_key(keep.flip(-1)).transpose(0, 1),
    )
    if torch.is_grad_enabled():
        output: Tensor = _RelativeAttention.apply(*operands)
    else:
        output = _without_gradient(*operands)
    return output.flatten(2)


def heads_first(x: Tensor) -> Tensor:
    """[b, n, H, d_head] to a view [H, b, n, d_head]."""
    return x.permute(2, 0, 1, 3)


class _RelativeAttention(torch.autograd.Function):
    """Query [H, b, Q, w], key and value [H, b, K, w], relative [H, K, w] to [b, Q, H, w]."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        relative: Tensor,
        u: Tensor,
        v: Tensor,
        mask: Tensor,
        keep: Tensor | None,
    ) -> Tensor:
        content = _biased(query, u)
        weights = _weights(content, _biased(query, v), key, relative, mask)
        attended = _product(_kept(weights, keep).to(value.dtype), value)
        output = attended.permute(1, 2, 0, 3).contiguous()
        ctx.save_for_backward(content, key, value, relative, u, v, weights, keep, output)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_output: Tensor) -> tuple[Tensor | None, ...]:
        content, key, value, relative, u, v, weights, keep, output = ctx.saved_tensors
        scale = content.shape[-1] ** -0.5
        d_attended = heads_first(d_output).contiguous()
        d_value = _product(_kept(weights, keep).to(value.dtype).mT, d_attended)
        d_weights = _kept(_product(d_attended, value.mT).to(weights.dtype), keep)
        # Over the keys, the weights' mean of their gradients: what the output gives as well.
        mean = (d_output.to(weights.dtype) * output).sum(-1, keepdim=True)
        by_distance, scores = _gradient_buffer(weights.shape, value)
        torch.mul(d_weights.sub_(heads_first(mean)), weights, out=scores)
        d_content = _product(scores, key)
        d_key = _product(scores.mT, content)
        d_position = torch.bmm(by_distance, relative).view_as(content)
        position = content + ((v - u) * scale)[:, None, None].to(content.dtype)
        d_relative = torch.bmm(by_distance.mT, position.flatten(1, 2))
        d_u, d_v = (d.sum((1, 2)).mul_(scale) for d in (d_content, d_position))
        d_query = d_content.add_(d_position).mul_(scale)
        return d_query, d_key, d_value, d_relative, d_u, d_v, None, None


def _without_gradient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    relative: Tensor,
    u: Tensor,
    v: Tensor,
    mask: Tensor,
    keep: Tensor | None,
) -> Tensor:
    """The forward alone: nothing asks for weights again, so few of them are formed at a time.

    Some queries, then some heads of them: the queries up to one are a smaller problem of the same
    kind, for they see neither later keys nor farther distances.
    """
    heads, lanes, queries, width = query.shape
    output = query.new_empty(lanes, queries, heads, width)
    keys = key.shape[2]
    rows = min(queries, max(_FEWEST_QUERIES, _SCRATCH // (lanes * keys)))
    group = max(1, _SCRATCH // (lanes * rows * keys))
    for end in range(queries, 0, -rows):
        own, seen = slice(max(0, end - rows), end), keys - queries + end
        for first in range(0, heads, group):
            part = slice(first, first + group)
            content, position = (_biased(query[part, :, own], bias[part]) for bias in (u, v))
            nearest = relative[part, keys - seen :]
            weights = _weights(content, position, key[part, :, :seen], nearest, mask[:, own, :seen])
            weights = _kept(weights, None if keep is None else keep[part, :, own, :seen])
            attended = _product(weights.to(value.dtype), value[part, :, :seen])
            heads_first(output)[part, :, own] = attended
    return output


def _biased(query: Tensor, bias: Tensor) -> Tensor:
    """(q + bias) / sqrt(w), [H, b, Q, w] contiguous, in the query's type."""
    biased = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    return torch.add(query, bias[:, None, None], out=biased).mul_(query.shape[-1] ** -0.5)


def _weights(
    content: Tensor, position: Tensor, key: Tensor, relative: Tensor, mask: Tensor
) -> Tensor:
    """The softmax over the keys, [H, b, Q, K] in the mask's type.

    Scores of distances become scores of keys and meet the mask in one pass; the content's are
    added by their product and the softmax is taken in place.
    """
    heads, lanes, queries, _ = content.shape
    by_distance = torch.bmm(position.flatten(1, 2), relative.mT)
    keys = relative.shape[1]
    by_distance = by_distance.view(heads, lanes, queries, keys)
    # Entries of keys that are newer than the query belong to other rows; the mask hides them.
    strides = (lanes * queries * keys, queries * keys, keys - 1, 1)
    scores = by_distance.as_strided(by_distance.shape, strides, queries - 1) + mask
    if scores.dtype == content.dtype:
        scores.flatten(0, 1).baddbmm_(content.flatten(0, 1), key.flatten(0, 1).mT)
    else:
        scores += _product(content, key.mT)
    return torch.softmax(scores, dim=-1, out=scores)


def _gradient_buffer(shape: torch.Size, like: Tensor) -> tuple[Tensor, Tensor]:
    """One memory for gradients of scores: by distance [H, b * Q, K], and by key [H, b, Q, K].

    Rows by distance are K + 1 apart here, so that rows by key are whole. Writing all keys fills
    all distances but a few: a key that is newer than the query, whose gradient is 0, stands where
    the row below has a distance that reaches beyond the oldest key.
    """
    heads, lanes, queries, keys = shape
    buffer = like.new_empty(heads, lanes, queries * (keys + 1))
    buffer[..., : queries - 1] = 0
    scores = buffer[..., queries - 1 : -1].unflatten(-1, (queries, keys))
    return buffer.view(heads, lanes * queries, keys + 1)[..., :keys], scores


def _kept(weights: Tensor, keep: Tensor | None) -> Tensor:
    return weights if keep is None else weights * keep


def _product(x: Tensor, y: Tensor) -> Tensor:
    """x y for each head and lane, [H, b, m, n]."""
    product = torch.bmm(x.flatten(0, 1), y.flatten(0, 1))
    return product.unflatten(0, x.shape[:2])
