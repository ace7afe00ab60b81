"""Cross entropy of a linear softmax, -log softmax(x W^T + b)[target], over blocks of tokens.

`linear_nll` is the plain version that defines the result. `linear_cross_entropy` is its sum, for
training: while a block's logits are there it forms the gradients too, so that no array of
[tokens, vocabulary] outlives its block and the logits are never formed twice. What it keeps for
backward has the sizes of the operands.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlt_dist.ops.precision import add_product_, product_dtype, wide

# Every block reads and writes a gradient of W's size once, which fewer tokens would not be worth;
# the logits of many more have left the cache when the softmax comes to them.
_LEAST_TOKENS, _LEAST_LOGITS = 512, 1 << 20


def linear_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b, [..., V] in float32 or wider, for hidden [..., d], weight [V, d], bias [V]."""
    logits = F.linear(hidden, weight, bias)
    return logits.to(wide(logits.dtype))


def linear_nll(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
    """-log p(target), [n], for hidden [n, d], weight [V, d], bias [V] and targets int64 [n].

    Products have the type that autocast asks for; the softmax is taken in float32 or wider.

    Raises:
        IndexError: a target is no row of `weight`; no number means "ignore".
    """
    _check(targets, len(weight))
    size = _block(len(weight))
    blocks = zip(hidden.split(size), targets.split(size), strict=True)
    nll = [
        F.cross_entropy(linear_logits(rows, weight, bias), wanted, reduction="none")
        for rows, wanted in blocks
    ]
    return torch.cat(nll)


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor
) -> Tensor:
    """The sum of `linear_nll` over all tokens, a scalar, in the memory of one block.

    Only the gradients that autograd asks for are formed. Backward scales them in place, so it can
    run only once, be it for one operand or for all; a second one raises RuntimeError.

    Raises:
        IndexError: as `linear_nll`.
    """
    operands = (hidden, weight) if bias is None else (hidden, weight, bias)
    if not torch.is_grad_enabled() or not any(x.requires_grad for x in operands):
        return linear_nll(hidden, weight, bias, targets).sum()
    _check(targets, len(weight))
    return _LinearCrossEntropy.apply(hidden, weight, bias, targets)


class _LinearCrossEntropy(torch.autograd.Function):
    """Gradients for an upstream gradient of 1 are formed in forward, and scaled in backward."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor
    ) -> Tensor:
        dtype = product_dtype(hidden)
        sums = wide(dtype)
        x, w, b = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        to_x, to_w, to_b, _ = ctx.needs_input_grad
        dx = torch.empty(x.shape, dtype=dtype, device=x.device) if to_x else None
        dw = torch.zeros(w.shape, dtype=sums, device=x.device) if to_w else None
        db = torch.zeros(len(w), dtype=sums, device=x.device) if to_b else None
        loss = torch.zeros((), dtype=sums, device=x.device)
        size = _block(len(w))
        buffer = torch.empty(min(size, len(x)), len(w), dtype=dtype, device=x.device)
        with torch.autocast(x.device.type, enabled=False):
            for block in (slice(i, i + size) for i in range(0, len(x), size)):
                rows = x[block]
                logits = _linear(rows, w, b, out=buffer[: len(rows)])
                dlogits = logits.to(sums)  # the same tensor unless products are narrower
                loss += _loss_and_gradient_(dlogits, targets[block])
                if db is not None:
                    db += dlogits.sum(dim=0)
                narrow = logits.copy_(dlogits)
                if dx is not None:
                    torch.mm(narrow, w, out=dx[block])
                if dw is not None:
                    add_product_(dw, narrow.T, rows)
        ctx.save_for_backward(None if dx is None else dx.to(hidden.dtype), dw, db)
        ctx.spent = False
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.spent:
            raise RuntimeError(
                "the backward of linear_cross_entropy can run only once, since it scales its "
                "gradients in place; ask for all gradients at once, or form the loss again"
            )
        ctx.spent = True
        gradients = (None if g is None else g.mul_(dloss) for g in ctx.saved_tensors)
        return (*gradients, None)


def _check(targets: Tensor, vocabulary: int) -> None:
    """Indexing would take a negative target from the end, F.cross_entropy would skip -100."""
    if not targets.numel():
        return
    least, most = (int(bound) for bound in targets.aminmax())
    if least < 0 or most >= vocabulary:
        wrong = least if least < 0 else most
        raise IndexError(f"target {wrong} is none of the ids 0 .. {vocabulary - 1}")


def _block(vocabulary: int) -> int:
    """How many tokens make a block."""
    return max(_LEAST_TOKENS, _LEAST_LOGITS // vocabulary)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """x W^T + b into `out`."""
    if bias is None:
        return torch.mm(x, weight.T, out=out)
    return torch.addmm(bias, x, weight.T, out=out)


def _loss_and_gradient_(logits: Tensor, targets: Tensor) -> Tensor:
    """The summed -log p(target) of logits [r, V], which become its gradient: softmax - one-hot.

    The softmax is one pass over each row. It does not tell its normaliser, but the largest
    probability does, which is never so small as to lose it: log sum exp(l) = max l - log max p.
    """
    at = torch.arange(len(targets), device=targets.device), targets
    largest, wanted = logits.amax(dim=-1), logits[at]
    torch.softmax(logits, dim=-1, out=logits)
    nll = largest - wanted - logits.amax(dim=-1).log()
    logits[at] -= 1
    return nll.sum()
