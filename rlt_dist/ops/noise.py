"""Randomness as a pure function of names and numbers, never a stream.

A dropout mask is a hash of (seed, step, site, layer, lane, element). No generator state exists,
so no mesh, order, micro-batch or recomputation can change a mask, and nothing need be saved.
"""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_MIX1 = 0xBF58476D1CE4E5B9
_MIX2 = 0x94D049BB133111EB


def seed_from(*parts: object) -> int:
    """A 64-bit seed from any named parts: seed_from(7, "embed.weight")."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _signed(value: int) -> int:
    """The int64 that has the bits of an unsigned 64-bit integer."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64 (Steele, Lea, Flood, OOPSLA 2014) on int64 tensors."""
    x = (x ^ _shift(x, 30)) * _signed(_MIX1)
    x = (x ^ _shift(x, 27)) * _signed(_MIX2)
    return x ^ _shift(x, 31)


def uniform_bits(streams: Tensor, shape: tuple[int, ...]) -> Tensor:
    """24 random bits per element: int64 [n, *shape] in 0 .. 2^24 - 1.

    Args:
        streams: int64 [n], one key per row; equal keys give equal rows.
    """
    count = torch.Size(shape).numel()
    element = torch.arange(1, count + 1, device=streams.device) * _signed(_GOLDEN)
    return _shift(_mix(_mix(streams)[:, None] + element), 40).view(-1, *shape)


@dataclass(frozen=True)
class WeightMask:
    """The keep-mask of attention weights, which need not be formed to be known.

    It is drawn with the distance first: a mask's bits are numbered along its shape, so more memory
    adds masks for farther distances and leaves those of nearer ones as they were.

    Attributes:
        streams: int64 [b], as `Noise.lane_streams` gives them.
        p: the probability that a weight is dropped.
        heads: those of this process, consecutive ones.
        all_heads: how many there are on all processes, for which the mask is drawn.
    """

    streams: Tensor
    p: float
    heads: range
    all_heads: int

    def drawn(self, queries: int, keys: int) -> Tensor:
        """The scaled mask, float32 [b, H, Q, K], the distance last."""
        bits = uniform_bits(self.streams, (keys, self.all_heads, queries))
        own = _scaled(bits, self.p).narrow(2, self.heads.start, len(self.heads))
        return own.permute(0, 2, 3, 1)

    @property
    def threshold(self) -> int:
        """The least of the 24 random bits of a weight that is kept."""
        return _threshold(self.p)


@dataclass(frozen=True)
class Noise:
    """Names the masks of one optimizer step.

    Attributes:
        seed: the run's seed.
        step: the optimizer step.
        lanes: int64 [b], global numbers of the lanes in this micro-batch.
    """

    seed: int
    step: int
    lanes: Tensor

    def lane_mask(self, p: float, site: str, layer: int, shape: tuple[int, ...]) -> Tensor:
        """Scaled keep-mask [b, *shape]: 0 with probability p, else 1 / (1 - p); float32.

        `shape` is that of a whole lane's activation; a rank that holds a part of it cuts the mask.
        """
        return _scaled(uniform_bits(self.lane_streams(site, layer), shape), p)

    def weight_mask(
        self, p: float, site: str, layer: int, heads: range, all_heads: int
    ) -> WeightMask:
        """The mask of attention weights of some heads, not drawn yet; as in `WeightMask`."""
        return WeightMask(self.lane_streams(site, layer), p, heads, all_heads)

    def lane_streams(self, site: str, layer: int) -> Tensor:
        """The keys of `uniform_bits` for the lanes here, int64 [b]."""
        return self.lanes * _signed(_GOLDEN) ^ _signed(seed_from(self.seed, self.step, site, layer))

    def shared_mask(self, p: float, site: str, shape: tuple[int, ...]) -> Tensor:
        """Scaled keep-mask of `shape` for a site that has neither layer nor lane."""
        key = torch.tensor([_signed(seed_from(self.seed, self.step, site))])
        return _scaled(uniform_bits(key.to(self.lanes.device), shape), p)[0]


def masked(x: Tensor, mask: Tensor | None) -> Tensor:
    """x under a scaled keep-mask, in x's dtype; its gradient has the same form."""
    return x if mask is None else (x * mask).to(x.dtype)


def _scaled(bits: Tensor, p: float) -> Tensor:
    kept = bits >= _threshold(p)
    return kept.to(torch.float32) / (1.0 - p)


def _threshold(p: float) -> int:
    return round(p * (1 << 24))
