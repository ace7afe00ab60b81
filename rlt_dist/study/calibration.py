"""The runs that a machine is calibrated on."""

from typing import Any, NamedTuple

from rlt_dist.config.load import validate
from rlt_dist.config.run import RunConfig
from rlt_dist.costs.run import Run, run_of
from rlt_dist.mesh.axes import Axes

VOCABULARY = 2048


class Given(NamedTuple):
    """A model and what else is configured, lanes of a data-parallel rank, tokens of a segment."""

    content: dict[str, Any]
    lanes: int
    segment: int

    def config(self, axes: Axes) -> RunConfig:
        """On a mesh."""
        content = self.content | {
            "run_folder": "none",
            "data": {"path": "none", "lanes": axes.data * self.lanes, "segment": self.segment},
            "optimizer": {"learning_rate": 1e-4},
            "train": {"steps": 1},
            "mesh": {"data": axes.data, "pipeline": axes.pipeline, "tensor": axes.tensor},
        }
        return validate(content, RunConfig, "calibration")

    def run(self, axes: Axes) -> Run:
        """The same, as costs see it."""
        return run_of(self.config(axes), VOCABULARY, axes)


def _rlt(d: int, heads: int, encoder: int, decoder: int, **more: Any) -> dict[str, Any]:
    stacks = {"encoder_layers": encoder, "decoder_layers": decoder}
    base = {"kind": "rlt", "d_model": d, "heads": heads, "ffn": 8 * d // 3, "memory_len": 64}
    return {"model": base | stacks | more}


def _xl(d: int, heads: int, layers: int, **more: Any) -> dict[str, Any]:
    base = {"kind": "transformer_xl", "d_model": d, "heads": heads, "d_inner": 4 * d}
    return {"model": base | {"layers": layers, "memory_len": 64} | more}


_PYTHON = {"ops": {"recurrence": "python"}}
_PARTS = {"recompute": {"decoder_chunk": 16, "layers": True}}

AT_ONCE = (
    Given(_rlt(256, 4, 2, 2), 8, 32),
    Given(_rlt(128, 4, 2, 2, memory_len=256), 16, 64),
    Given(_rlt(160, 5, 2, 2, memory_len=128), 32, 48),
    Given(_xl(128, 4, 4, memory_len=128), 8, 64),
)
"""What one rank runs, and two and four do at once, each on its lanes."""
ALONE = (
    Given(_rlt(64, 4, 2, 2), 16, 32),
    Given(_rlt(32, 2, 6, 6), 64, 8),
    Given(_rlt(40, 4, 2, 3, memory_len=160), 16, 32),
    Given(_rlt(64, 4, 5, 5, memory_len=192), 32, 48),
    Given(_rlt(72, 6, 3, 2, feedback=0), 12, 48),
    Given(_rlt(112, 4, 2, 4, feedback=16, memory_len=128), 16, 64),
    Given(_rlt(120, 6, 2, 2, memory_len=192), 12, 64),
    Given(_rlt(128, 4, 3, 3, feedback=8), 8, 64),
    Given(_rlt(192, 4, 2, 3, feedback=0), 8, 64),
    Given(_rlt(224, 4, 2, 2, memory_len=96), 12, 32),
    Given(_rlt(96, 4, 2, 2, feedback=4) | _PARTS, 16, 64),
    Given(_rlt(192, 4, 1, 2) | _PARTS, 8, 32),
    Given(_rlt(64, 4, 2, 2) | _PYTHON, 8, 32),
    Given(_rlt(64, 4, 2, 4, memory_len=192) | _PYTHON, 12, 24),
    Given(_rlt(96, 4, 2, 3, memory_len=128) | _PYTHON, 24, 32),
    Given(_rlt(128, 4, 2, 2) | _PYTHON, 16, 16),
    Given(_rlt(144, 6, 2, 2, feedback=8) | _PYTHON, 12, 48),
    Given(_rlt(256, 8, 1, 2, feedback=4) | _PYTHON, 8, 32),
    Given(_rlt(64, 4, 2, 4, feedback=0) | _PYTHON | _PARTS, 16, 48),
    Given(_xl(64, 4, 2), 16, 32),
    Given(_xl(80, 5, 6), 24, 48),
    Given(_xl(192, 6, 3, memory_len=96), 12, 48),
    Given(_xl(256, 8, 2), 8, 64),
    Given(_xl(128, 4, 6, pre_norm=True) | {"recompute": {"layers": True}}, 32, 32),
    Given(_xl(32, 2, 4), 16, 16),
)
"""What one rank runs besides."""
ONE = (*AT_ONCE, *ALONE)
RING = (
    Given(_rlt(64, 4, 2, 2), 16, 32),
    Given(_rlt(128, 4, 2, 2, feedback=4, memory_len=128), 16, 48),
    Given(_rlt(176, 4, 3, 2, memory_len=96), 16, 48),
)
"""What messages are measured on, by a pipeline of two."""
CUT = (
    Given(_rlt(64, 4, 1, 1), 8, 16),
    Given(_rlt(128, 4, 2, 2, memory_len=128), 12, 16),
    Given(_rlt(192, 4, 1, 2, memory_len=96), 16, 16),
    Given(_xl(128, 4, 2), 16, 32),
)
"""What short collectives are, by tensor ranks."""
COLLECTIVES = {"2 of 2": Axes(1, 1, 2), "4 of 4": Axes(1, 1, 4), "2 of 4": Axes(2, 1, 2)}
"""Meshes whose steps tell what a collective takes, in an order in which each has one unknown."""
