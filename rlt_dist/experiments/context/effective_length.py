"""Relative effective context length.

Dai et al., "Transformer-XL", ACL 2019, appendix C. M_1 .. M_N are models of as many parameters, a
group. l_i(c, t) = -log P_i(x_t | x_{t-1} .. x_{t-c}) is the loss of M_i on token t with c tokens of
context. For a short context c, a longer c' and a share r of the tokens:

    b(c, t)     = min_i l_i(c, t)                                     the best of the group
    f_i(c, c')  = 1/|T| sum over t in T of min(b(c, t), l_i(c', t))
    g_i(c, c')  = (exp f_i(c, c) - exp f_i(c, c')) / exp f_i(c, c)    the relative gain

T are the r of all tokens that have the largest b(c, t). Only what is better than the group's best
with the short context counts, so that no model gains by being bad at it; r says how hard the tokens
are that count. With a step D, the length is the first of c = c_0, c_0 + D, ... at which
g_i(c, c + D) < 0.01.

So it is relative to the group, to D and to c_0. What the paper leaves open is this project's
choice: c_0 is D, and no length is shorter; r of the tokens are rounded to whole ones; a model reads
the c tokens of context from an empty state, and one with a window those at their end that it can
see; where each step up to the longest context gains enough, the length is that context, or more.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

THRESHOLD = 0.01
"""The relative gain below which more context is of no use."""

RATIOS = (0.1, 0.5, 1.0)
"""The paper's r."""


@dataclass(frozen=True)
class EffectiveLength:
    """Of one model in its group, at one r.

    Attributes:
        length: in tokens.
        open_ended: every step gained enough, up to the longest context, which `length` is.
        gains: float64 [contexts - 1], the relative gain of each step.
    """

    length: int
    open_ended: bool
    gains: np.ndarray


def effective_lengths(
    losses: Mapping[str, np.ndarray], contexts: Sequence[int], ratio: float
) -> dict[str, EffectiveLength]:
    """The relative effective context length of every model of a group.

    Args:
        losses: by model, l_i: float64 [contexts, tokens], nats; the same tokens for all.
        contexts: ascending, evenly spaced.
        ratio: r, above 0 and at most 1; at least one token counts.
    """
    gains = relative_gains(losses, ratio)
    return {name: _first_useless(gains[name], contexts) for name in losses}


def relative_gains(losses: Mapping[str, np.ndarray], ratio: float) -> dict[str, np.ndarray]:
    """By model, g_i(c, c') for each context c and the next, c': float64 [contexts - 1].

    Args:
        losses, ratio: as for `effective_lengths`.
    """
    baseline = np.min(list(losses.values()), axis=0)[:-1]
    count = max(1, round(ratio * baseline.shape[1]))
    hardest = np.argsort(-baseline, axis=1, kind="stable")[:, :count]
    short = np.take_along_axis(baseline, hardest, axis=1)
    found = {}
    for name, own in losses.items():
        longer = np.take_along_axis(own[1:], hardest, axis=1)
        # f_i(c, c) is the baseline's mean itself: no model is below the best of the group.
        difference = np.minimum(short, longer).mean(axis=1) - short.mean(axis=1)
        found[name] = -np.expm1(difference)
    return found


def _first_useless(gains: np.ndarray, contexts: Sequence[int]) -> EffectiveLength:
    useless = np.flatnonzero(gains < THRESHOLD)
    place = int(useless[0]) if len(useless) else len(gains)
    return EffectiveLength(contexts[place], not len(useless), gains)
