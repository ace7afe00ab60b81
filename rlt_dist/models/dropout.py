"""Dropout whose masks are a pure function of (seed, step, site, layer, lane)."""

from dataclasses import dataclass

from torch import Tensor

from rlt_dist.ops.noise import Noise, WeightMask, masked
from rlt_dist.ops.seam import Seam


@dataclass(frozen=True)
class Dropout:
    """The masks of one probability in one step; none where `noise` is None (evaluation)."""

    p: float
    noise: Noise | None

    def mask(self, site: str, layer: int, shape: tuple[int, ...]) -> Tensor | None:
        """Scaled keep-mask [b, *shape] of a lane's activation, or None where nothing drops."""
        if self.p == 0.0 or self.noise is None:
            return None
        return self.noise.lane_mask(self.p, site, layer, shape)

    def shared_mask(self, site: str, shape: tuple[int, ...]) -> Tensor | None:
        """The same for a site without layer and lane."""
        if self.p == 0.0 or self.noise is None:
            return None
        return self.noise.shared_mask(self.p, site, shape)

    def weights(self, site: str, layer: int, heads: range, all_heads: int) -> WeightMask | None:
        """The mask of attention weights of some heads, not drawn yet."""
        if self.p == 0.0 or self.noise is None:
            return None
        return self.noise.weight_mask(self.p, site, layer, heads, all_heads)

    def __call__(self, x: Tensor, site: str, layer: int = 0) -> Tensor:
        """Drop entries of x [b, ...]."""
        return masked(x, self.mask(site, layer, tuple(x.shape[1:])))

    def columns(self, x: Tensor, site: str, layer: int, size: int, seam: Seam) -> Tensor:
        """Drop entries of x [b, ..., n]: those of an activation's `size` columns that are here."""
        mask = self.mask(site, layer, (*x.shape[1:-1], size))
        return masked(x, None if mask is None else own_part(mask, -1, seam))


def own_part(mask: Tensor, dim: int, seam: Seam) -> Tensor:
    """What is here of a mask that was drawn whole: its masks do not depend on the cut."""
    own = seam.own(mask.shape[dim])
    return mask.narrow(dim, own.start, len(own))
