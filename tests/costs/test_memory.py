"""The peak of a step, predicted and as the allocator sees it: the same at every run."""

import gc
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from torch.profiler import ProfilerActivity, profile

from rlt_dist.config.run import RunConfig
from rlt_dist.costs.memory import rank_memory
from rlt_dist.costs.run import run_of
from rlt_dist.costs.sizes import steady
from rlt_dist.mesh.axes import Axes
from rlt_dist.mesh.world import open_world
from rlt_dist.parallel.mesh import mesh_of
from rlt_dist.train.rehearsal import Rehearsal

ENDLESS = 1 << 60
RLT = {"kind": "rlt", "d_model": 64, "heads": 4, "ffn": 172, "encoder_layers": 2}
RLT |= {"decoder_layers": 2, "memory_len": 64}
XL = {"kind": "transformer_xl", "d_model": 64, "heads": 4, "d_inner": 256, "layers": 3}
XL |= {"memory_len": 64}
CASES: dict[str, dict[str, Any]] = {
    "rlt1": {"model": RLT},
    "rlt1, recomputed": {"model": RLT, "recompute": {"decoder_chunk": 16, "layers": True}},
    "rlt1 in micro-batches": {"model": RLT, "train": {"steps": 1, "micro_batch": 4}},
    "rlt2 with dropout": {"model": RLT | {"feedback": 8, "kv_heads": 2, "dropout": 0.1}},
    "fed with tokens": {"model": RLT | {"feedback_from": "token"}},
    "transformer": {"model": RLT | {"decoder_layers": 0, "feedback": 0}},
    "transformer, recomputed": {
        "model": RLT | {"decoder_layers": 0, "feedback": 0},
        "recompute": {"layers": True},
    },
    "gru": {"model": {"kind": "gru", "d_model": 64, "layers": 2}},
    "gru of one layer": {"model": {"kind": "gru", "d_model": 128}},
    "xl": {"model": XL | {"pre_norm": True}},
    "xl with dropout": {"model": XL | {"dropout": 0.1, "dropatt": 0.1}},
}


def allocated_peak(rehearsal: Rehearsal) -> int:
    """Bytes at the peak of a step, above what is there before it."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        rehearsal.step()
    events = profiled.profiler.kineto_results.events()
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    return max(accumulate(size for _, size in sorted(changes, key=lambda change: change[0])))


@pytest.mark.parametrize("case", CASES)
def test_the_peak_is_within_a_tenth_of_the_prediction(case: str, tmp_path: Path) -> None:
    base = {
        "run_folder": str(tmp_path),
        "data": {"path": "runs/none", "lanes": 16, "segment": 64},
        "optimizer": {"learning_rate": 1e-3},
        "train": {"steps": 1},
    }
    config, vocabulary = RunConfig.model_validate(base | CASES[case]), 1000
    with open_world({"OMP_NUM_THREADS": "1"}) as world, mesh_of(config, world) as mesh:
        rehearsal = Rehearsal(config, vocabulary, mesh, document=ENDLESS)
        for _ in range(steady(config) // config.data.segment):
            rehearsal.step()
        rehearsal.optimizer.zero_gradients()
        found = allocated_peak(rehearsal)
    memory = rank_memory(run_of(config, vocabulary, Axes(1, 1, 1)), 0)
    assert abs(memory.above / found - 1) <= 0.1, (memory.above, found, memory.moments)
