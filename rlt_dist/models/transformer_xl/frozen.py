"""What Transformer-XL derives from its weights alone, kept while they stand still."""

from collections.abc import Callable, Hashable, Iterable

import torch
from torch import Tensor, nn


class Derived:
    """W_R R of every layer; made for a reach, it serves all shorter ones.

    Nothing made of other weights is ever given out: a weight that was changed in place, moved or
    replaced, and another precision, are noticed.
    """

    def __init__(self) -> None:
        self._made: list[Tensor] = []
        self._source: Hashable = None

    def projected(
        self,
        count: int,
        project: Callable[[int], list[Tensor]],
        layers: Iterable[nn.Module],
        dtype: torch.dtype,
    ) -> list[Tensor]:
        """Of each layer, [count, H * d_head], for distances count - 1 .. 0.

        Args:
            project: makes them anew for a count.
            dtype: type of R.
        """
        source = _source(layers, dtype)
        longest = len(self._made[0]) if source == self._source else 0
        if longest < count:
            # A memory that fills token by token would ask for a little more each time.
            longest = max(count, 2 * longest)
            self._made, self._source = project(longest), source
        return [made[longest - count :] for made in self._made]


def _source(layers: Iterable[nn.Module], dtype: torch.dtype) -> Hashable:
    weights = [layer.get_parameter("dec_attn.r_net.weight") for layer in layers]
    device = weights[0].device.type
    autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
    return dtype, autocast, tuple((weight.data_ptr(), weight._version) for weight in weights)
