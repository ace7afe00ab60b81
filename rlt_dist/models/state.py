"""What a lane remembers between segments.

A state is a flat mapping from a global name, such as `decoder.3.k`, to a tensor whose first
dimension is the lane. It is keyed by layer and lane, never by rank: cutting the data axis slices
dimension 0, cutting the pipeline splits the names. Every state holds

    position  int64 [b]   index within its document that the lane's next token would have
    tokens    int64 [b]   how many tokens the lane has consumed in all

Cached entries are aligned right, newest last; `position` says how many of them are valid.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

State = dict[str, Tensor]


def counters(lanes: int, device: torch.device) -> State:
    """The two counters of a lane that has seen nothing."""
    zeros = torch.zeros(lanes, dtype=torch.int64, device=device)
    return {"position": zeros, "tokens": zeros.clone()}


def detach(state: State) -> State:
    """The state with every gradient path into it cut: the border of truncated BPTT."""
    return {name: tensor.detach() for name, tensor in state.items()}


def select_lanes(state: State, rows: slice | Tensor) -> State:
    """The state of some lanes."""
    return {name: tensor[rows] for name, tensor in state.items()}


def join_lanes(states: Sequence[State]) -> State:
    """One state of all lanes from those of consecutive groups of lanes."""
    return {name: torch.cat([state[name] for state in states]) for name in states[0]}


def finite_lanes(state: State) -> Tensor:
    """bool [b]: lanes in whose state every number is finite."""
    finite = torch.ones_like(state["position"], dtype=torch.bool)
    for tensor in state.values():
        if tensor.is_floating_point() and tensor.numel():
            finite &= tensor.isfinite().flatten(1).all(dim=1)
    return finite


def restart_lanes(state: State, restart: Tensor) -> State:
    """The state with some lanes (bool [b]) as at a document's start; their token counts stay."""
    return {
        name: tensor if name == "tokens" else _zero_rows(tensor, restart)
        for name, tensor in state.items()
    }


def mean_squares(state: State) -> dict[str, Tensor]:
    """Mean square of every lane's entries of every floating-point tensor, by name: float64 [b]."""
    return {
        name: _mean_square(tensor.detach().flatten(1))
        for name, tensor in state.items()
        if tensor.is_floating_point() and tensor.numel()
    }


def _mean_square(rows: Tensor) -> Tensor:
    norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    return norms.square() / rows.shape[1]


def _zero_rows(tensor: Tensor, rows: Tensor) -> Tensor:
    shape = (-1, *[1] * (tensor.dim() - 1))
    return tensor.masked_fill(rows.view(shape), 0)
