"""Cross entropy of a linear softmax, -log softmax(x W^T + b)[target], over blocks of tokens.

`linear_nll` is the plain version that defines the result. `linear_cross_entropy` is its sum, for
training: while a block's logits are there it forms the gradients too, so that no array of
[tokens, vocabulary] outlives its block and the logits are never formed twice. What it keeps for
backward has the sizes of the operands.

The vocabulary may be cut over processes (Shoeybi et al., "Megatron-LM", arXiv 1909.08053): each
forms the logits of its own rows, and of every token the processes exchange a maximum, then a sum
of exponentials and the target's logit.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlt_dist.ops.choice import takes_triton
from rlt_dist.ops.precision import add_product_, product_dtype, wide
from rlt_dist.ops.seam import WHOLE, Seam

# Every block reads and writes a gradient of W's size once, which fewer tokens would not be worth;
# the logits of many more have left the cache when the softmax comes to them.
_LEAST_TOKENS, _LEAST_LOGITS = 512, 1 << 20
_OF_KERNELS = 1 << 28
"""Logits of a block where triton's kernels form it: half a gigabyte in bfloat16."""


def linear_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b, [..., V] in float32 or wider, for hidden [..., d], weight [V, d], bias [V]."""
    logits = F.linear(hidden, weight, bias)
    return logits.to(wide(logits.dtype))


def linear_nll(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, seam: Seam = WHOLE
) -> Tensor:
    """-log p(target), [n], for hidden [n, d], weight [V, d], bias [V] and targets int64 [n].

    Products have the type that autocast asks for; the softmax is taken in float32 or wider.

    Args:
        seam: where it is cut, `weight` and `bias` are this process's rows of the vocabulary, maybe
            none, and targets are numbered from the first of them: a number that is none of them
            is another process's row. `hidden` is alike everywhere and its gradient partial: it
            is to come through `seam.enter`.

    Raises:
        IndexError: a target is no row of `weight`, or not of exactly one process's; no number
            means "ignore".
    """
    if seam is WHOLE:
        _check(targets, len(weight))
    here = hidden.device.type, product_dtype(hidden)
    if not torch.is_grad_enabled() and takes_triton(*here):
        return _nll_in_kernels(hidden, weight, bias, targets, seam)
    size = _block(weight, seam, _LEAST_LOGITS)
    blocks = zip(hidden.split(size), targets.split(size), strict=True)
    nll = [_nll(linear_logits(rows, weight, bias), wanted, seam) for rows, wanted in blocks]
    return torch.cat(nll)


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, seam: Seam = WHOLE
) -> Tensor:
    """The sum of `linear_nll` over all tokens, a scalar, in the memory of one block.

    Only the gradients that autograd asks for are formed. Backward scales them in place, so it can
    run only once, be it for one operand or for all; a second one raises RuntimeError.

    Raises:
        IndexError: as `linear_nll`.
    """
    operands = (hidden, weight) if bias is None else (hidden, weight, bias)
    if not torch.is_grad_enabled() or not any(x.requires_grad for x in operands):
        return linear_nll(hidden, weight, bias, targets, seam).sum()
    if seam is WHOLE:
        _check(targets, len(weight))
    return _LinearCrossEntropy.apply(hidden, weight, bias, targets, seam)


class _LinearCrossEntropy(torch.autograd.Function):
    """Gradients for an upstream gradient of 1 are formed in forward, and scaled in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        seam: Seam,
    ) -> Tensor:
        dtype = product_dtype(hidden)
        sums = wide(dtype)
        x, w, b = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        to_x, to_w, to_b, *_ = ctx.needs_input_grad
        dx = torch.empty(x.shape, dtype=dtype, device=x.device) if to_x else None
        dw = torch.zeros(w.shape, dtype=sums, device=x.device) if to_w else None
        db = torch.zeros(len(w), dtype=sums, device=x.device) if to_b else None
        loss = torch.zeros((), dtype=sums, device=x.device)
        if takes_triton(x.device.type, dtype):  # Rows of 16 numbers are read in whole vectors.
            form, size, columns = _in_kernels, _block(w, seam, _OF_KERNELS), -(-len(w) // 16) * 16
        else:  # torch would copy rows that do not lie one behind the other.
            form, size, columns = _in_torch, _block(w, seam, _LEAST_LOGITS), len(w)
        room = torch.empty(min(size, len(x)), columns, dtype=dtype, device=x.device)
        buffer = room[:, : len(w)]
        with torch.autocast(x.device.type, enabled=False):
            for block in (slice(i, i + size) for i in range(0, len(x), size)):
                rows = x[block]
                narrow = buffer[: len(rows)]
                loss += form(rows, w, b, targets[block], seam, narrow, db)
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
        return (*gradients, None, None)


def _in_torch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    seam: Seam,
    out: Tensor,
    db: Tensor | None,
) -> Tensor:
    """The loss of some tokens; its gradient for their logits goes into `out`, [r, V].

    The gradient's sum over the tokens is added to `db`, before it is rounded to out's type.
    """
    logits = _linear(x, weight, bias, out=out)
    dlogits = logits.to(wide(logits.dtype))  # the same tensor unless products are narrower
    loss = _loss_and_gradient_(dlogits, targets, seam)
    if db is not None:
        db += dlogits.sum(dim=0)
    logits.copy_(dlogits)
    return loss


def _in_kernels(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    seam: Seam,
    out: Tensor,
    db: Tensor | None,
) -> Tensor:
    """`_in_torch` by triton's kernels: no logits are in memory, only their gradient."""
    from rlt_dist.ops.triton.cross_entropy import gradient, token_logs

    known = token_logs(x, weight, bias, targets, seam)
    _check_owners(known.owners)
    gradient(x, weight, bias, targets, known.log, out, db)
    return (known.log - known.wanted).sum()


def _nll_in_kernels(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, seam: Seam
) -> Tensor:
    """`linear_nll` by triton's kernels, which have no gradient of it."""
    from rlt_dist.ops.triton.cross_entropy import token_logs

    dtype = product_dtype(hidden)
    narrow_bias = None if bias is None else bias.to(dtype)
    known = token_logs(hidden.to(dtype), weight.to(dtype), narrow_bias, targets, seam)
    _check_owners(known.owners)
    return known.log - known.wanted


def _check(targets: Tensor, vocabulary: int) -> None:
    """Indexing would take a negative target from the end, F.cross_entropy would skip -100."""
    if not targets.numel():
        return
    least, most = (int(bound) for bound in targets.aminmax())
    if least < 0 or most >= vocabulary:
        wrong = least if least < 0 else most
        raise IndexError(f"target {wrong} is none of the ids 0 .. {vocabulary - 1}")


def _block(weight: Tensor, seam: Seam, logits: int) -> int:
    """How many tokens make a block: alike on all processes, as the most rows of one want it."""
    rows = int(seam.largest(torch.tensor(len(weight), device=weight.device)))
    return block_tokens(rows, logits)


def block_tokens(rows: int, logits: int = _LEAST_LOGITS) -> int:
    """Tokens whose logits are there at a time, of a softmax over so many rows.

    Args:
        logits: that a block is worth forming.
    """
    return max(_LEAST_TOKENS, logits // rows)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """x W^T + b into `out`."""
    if bias is None:
        return torch.mm(x, weight.T, out=out)
    return torch.addmm(bias, x, weight.T, out=out)


def _nll(logits: Tensor, targets: Tensor, seam: Seam) -> Tensor:
    """-log p(target), [r], of logits [r, V]."""
    if seam is WHOLE:
        return F.cross_entropy(logits, targets, reduction="none")
    largest = seam.largest(_largest(logits.detach()))
    sums = (logits - largest[:, None]).exp().sum(dim=-1)
    wanted, owners = _of_targets(logits, targets)
    # Subtracting the largest changes no result, so no gradient runs through it.
    total, wanted, owners = seam.leave(torch.stack((sums, wanted, owners)))
    _check_owners(owners)
    return largest - wanted + total.log()


def _loss_and_gradient_(logits: Tensor, targets: Tensor, seam: Seam) -> Tensor:
    """The summed -log p(target) of logits [r, V], which become its gradient: softmax - one-hot.

    The softmax is one pass over each row. It does not tell its normaliser, but the largest
    probability does, which is never so small as to lose it: log sum exp(l) = max l - log max p.
    """
    if seam is not WHOLE:
        return _shared_loss_and_gradient_(logits, targets, seam)
    at = torch.arange(len(targets), device=targets.device), targets
    largest, wanted = logits.amax(dim=-1), logits[at]
    torch.softmax(logits, dim=-1, out=logits)
    nll = largest - wanted - logits.amax(dim=-1).log()
    logits[at] -= 1
    return nll.sum()


def _shared_loss_and_gradient_(logits: Tensor, targets: Tensor, seam: Seam) -> Tensor:
    """The same where each process has some columns: its softmax becomes its share of the whole."""
    wanted, owners = _of_targets(logits, targets)
    own_largest = _largest(logits)
    largest = seam.largest(own_largest)
    torch.softmax(logits, dim=-1, out=logits)
    # The own columns' sum of exp(l - largest); without columns 0 / -inf, which is 0 too.
    sums = (own_largest - largest).exp() / _largest(logits)
    total, wanted, owners = seam.total(torch.stack((sums, wanted, owners)))
    _check_owners(owners)
    logits *= (sums / total)[:, None]
    logits[_here(targets, logits)] -= 1
    return (largest - wanted + total.log()).sum()


def _largest(logits: Tensor) -> Tensor:
    """The maximum of each row, [r]; -inf where there are no columns."""
    if logits.shape[1]:
        return logits.amax(dim=-1)
    return logits.new_full((len(logits),), -torch.inf)


def _of_targets(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The target's logit, 0 where another process has it, and 1 where it is here, [r] each."""
    here, nothing = _here(targets, logits), logits.new_zeros(len(logits))
    return nothing.index_add(0, here[0], logits[here]), nothing.index_fill(0, here[0], 1)


def _here(targets: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and columns of the targets that are columns of the logits."""
    rows = ((targets >= 0) & (targets < logits.shape[1])).nonzero()[:, 0]
    return rows, targets[rows]


def _check_owners(owners: Tensor) -> None:
    """All processes see the same counts, so all raise or none."""
    wrong = owners[owners != 1]
    if len(wrong):
        raise IndexError(
            f"a target is a row of {int(wrong[0])} processes, not of one: it is no id of the "
            "vocabulary, or the vocabulary is not cut alike everywhere"
        )
