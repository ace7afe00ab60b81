"""Dropout whose masks are a pure function of (seed, step, site, layer, lane)."""

from dataclasses import dataclass

from torch import Tensor

from rlt_dist.ops.noise import Noise, masked


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

    def __call__(self, x: Tensor, site: str, layer: int = 0) -> Tensor:
        """Drop entries of x [b, ...]."""
        return masked(x, self.mask(site, layer, tuple(x.shape[1:])))
