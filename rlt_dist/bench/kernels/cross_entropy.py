"""Cross entropy over each softmax of a model, with as many tokens as a micro-batch has.

Transformer-XL's has a bias, and so the gradient of one.
"""

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from rlt_dist.bench.kernels.case import Case, Floor, Made
from rlt_dist.ops.triton.cross_entropy import gradient, token_logs
from rlt_dist.ops.triton.shapes import Shapes


def cases(shapes: Shapes) -> Iterator[Case]:
    """The loss of each token, and then the gradient of its logits."""
    tokens, p = shapes.lanes * shapes.tokens, shapes.products.itemsize
    for rows, width in shapes.softmaxes:
        read, products = p * width * (tokens + rows), 2 * tokens * rows * width
        name, made = f"cross_entropy_{rows}", partial(_made, shapes, tokens, rows, width)
        yield Case(f"{name}_forward", Floor(read, products), partial(made, False))
        both = Floor(2 * read + p * tokens * rows, 2 * products)
        yield Case(f"{name}_forward_backward", both, partial(made, True))


def _made(shapes: Shapes, tokens: int, rows: int, width: int, backward: bool) -> Made:
    dtype, targets = shapes.products, torch.randint(rows, (tokens,))
    x, weight = torch.randn(tokens, width) * width**-0.5, torch.randn(rows, width)
    biases = [torch.randn(rows)] if shapes.model == "transformer_xl" else []
    inputs = [value.to(dtype) for value in (x, weight, *biases)]

    def kernel(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> list[Tensor]:
        logs = token_logs(x, weight, bias, targets)
        if not backward:
            return [logs.log - logs.wanted]
        out = x.new_empty(tokens, rows)
        d_bias = None if bias is None else x.new_zeros(rows, dtype=torch.float32)
        gradient(x, weight, bias, targets, logs.log, out, d_bias)
        return [logs.log - logs.wanted, out, *([] if d_bias is None else [d_bias])]

    def plain(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> list[Tensor]:
        logits = F.linear(x, weight, bias)
        loss = F.cross_entropy(logits, targets, reduction="none")
        if not backward:
            return [loss]
        shares = logits.softmax(-1)
        shares[torch.arange(tokens, device=x.device), targets] -= 1
        return [loss, shares, *([] if bias is None else [shares.sum(0)])]

    return Made(inputs, kernel, plain)
