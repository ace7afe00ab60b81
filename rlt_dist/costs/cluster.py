"""Hardware that a run may be on: `configs/clusters/*.yaml`."""

from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    StringConstraints,
    field_validator,
    model_validator,
)

from rlt_dist.config.load import Strict, load_typed
from rlt_dist.parallel.schedule.instructions import Kind

Precision = Literal["float32", "bfloat16", "float64"]
Members = Annotated[str, StringConstraints(pattern=r"^[1-9]\d* of [1-9]\d*$")]
Slower = Annotated[float, Field(ge=1.0)]

UPDATE = "update"
"""The optimizer's step, with clipping and the norm, as a kind of work with rates of its own."""
STEP = "step"
"""What surrounds a step's passes and update: the batch, the state's check, records."""

_ANEW = "`rlt-dist scale calibrate` measures a machine anew"


def compiled_name(kind: Kind) -> str:
    """How the rates of a kind of work are named where the compiled loop does it."""
    return f"{kind}, compiled"


_RATED = {
    *(*map(str, Kind), UPDATE, STEP),
    *map(compiled_name, (Kind.DECODE, Kind.DECODE_BACKWARD)),
}


class LinkConfig(Strict):
    """What joins two devices."""

    latency: NonNegativeFloat
    """Seconds from a message's sending to its arrival, however short it is."""
    bandwidth: PositiveFloat
    """Bytes per second that a device sends, and as many that it receives meanwhile."""
    overhead: NonNegativeFloat = 0.0
    """Seconds for which a message keeps its sender, and its receiver, from computing."""


class RateConfig(Strict):
    """Seconds that one kind of work takes, by what it is made of; fitted to measured work."""

    flop: NonNegativeFloat
    """A FLOP of a product with a weight."""
    attention: NonNegativeFloat
    """A FLOP of any other product."""
    score: NonNegativeFloat
    """A use of a query and a key, whatever their width."""
    number: NonNegativeFloat
    """A number that is read or written."""
    operation: NonNegativeFloat
    """An operator that is started; in the compiled loop, a layer's visit to a token of a lane."""
    call: NonNegativeFloat
    """A piece of work, however small."""


class ClusterConfig(Strict):
    """A cluster of equal nodes of equal devices; figures are those of one device."""

    name: str
    devices_per_node: PositiveInt
    cores: PositiveInt | None = None
    """Processor cores that all ranks share, whatever nodes they stand for; null: each rank's device
    is its own."""
    contention: Slower = 1.0
    """Times as long that work takes while every core is busy, waiting for the slowest rank at a
    step's end included; matters with `cores` alone."""
    crowding: Slower = 1.0
    """Times as long, its smaller share of a core apart, while ranks outnumber the cores: they take
    turns, and find others' data in the caches."""
    memory: PositiveInt
    """Bytes."""
    reserved: PositiveInt
    """Bytes of it that a run cannot have: driver, libraries, buffers of communication."""
    flops: dict[Precision, PositiveFloat]
    """Peak FLOP/s of dense products, by `train.precision`."""
    efficiency: PositiveFloat = 1.0
    """Share of the peak that large products reach."""
    tile: PositiveInt = 1
    """Rows and columns that products are cut into: a smaller one takes as long as a whole one."""
    memory_bandwidth: PositiveFloat
    """Bytes per second."""
    launch: NonNegativeFloat
    """Seconds that starting an operation takes, however small it is."""
    within_node: LinkConfig
    between_nodes: LinkConfig
    collectives: dict[Members, PositiveFloat] = Field(default_factory=dict)
    """Seconds of a collective of short messages, among `2 of 4` ranks of a run for example, where
    it was measured; empty: what latencies make."""
    bandwidths: dict[Members, PositiveFloat] = Field(default_factory=dict)
    """Bytes per second that a rank sends in a long all-reduce, likewise: ranks that share cores
    share what copies messages; empty: the link's."""
    exchanges: dict[Members, PositiveFloat] = Field(default_factory=dict)
    """The same of gradients and parameters over the data axis, their buffers' making included."""
    rates: dict[str, RateConfig] = Field(default_factory=dict)
    """By kind of work, what was measured of it in place of peaks and bandwidth; in float32, which
    other precisions are taken to be like."""
    sources: dict[str, str]
    """Where each figure is from, by its key."""

    @property
    def usable(self) -> int:
        """Bytes that a rank may take."""
        return self.memory - self.reserved

    def peak(self, precision: Precision, ranks: int) -> float:
        """FLOP/s of so many ranks; those beyond the cores that they share have none."""
        return self.flops[precision] * min(ranks, self.cores or ranks)

    @field_validator("rates", mode="before")
    @classmethod
    def _check_rates(cls, rates: Any) -> Any:
        """Tell a file of another version in one line."""
        if not isinstance(rates, dict):
            return rates
        if unknown := sorted(map(str, rates.keys() - _RATED)):
            raise ValueError(f"{unknown[0]} is no kind of work; {_ANEW}")
        figures = RateConfig.model_fields.keys()
        for name, rate in rates.items():
            if isinstance(rate, dict) and (missing := sorted(figures - rate.keys())):
                raise ValueError(f"{name} lacks {', '.join(missing)}; {_ANEW}")
        return rates

    @model_validator(mode="after")
    def _check(self) -> "ClusterConfig":
        if missing := sorted(set(get_args(Precision)) - self.flops.keys()):
            raise ValueError(f"flops lack {', '.join(missing)}")
        needed = {name for name, field in type(self).model_fields.items() if field.is_required()}
        figures = (needed | self.model_fields_set) - {"name", "sources"}
        if unnamed := sorted(figures - self.sources.keys()):
            raise ValueError(f"sources do not say where these are from: {', '.join(unnamed)}")
        if unknown := sorted(self.sources.keys() - figures):
            raise ValueError(f"sources name what is no figure here: {', '.join(unknown)}")
        if self.reserved >= self.memory:
            raise ValueError(f"reserved {self.reserved} leaves nothing of memory {self.memory}")
        return self


def load_cluster(path: Path) -> ClusterConfig:
    """Raises UserError where the file is missing or not right."""
    return load_typed(path, ClusterConfig)
