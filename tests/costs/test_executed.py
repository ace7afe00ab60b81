"""FLOPs of each kind of work, as the executor carries it out; and what a checkpoint holds."""

from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from rlt_dist.checkpoint.manifest import read_manifest
from rlt_dist.config.run import RunConfig
from rlt_dist.costs.checkpoint import checkpoint_bytes
from rlt_dist.costs.run import run_of
from rlt_dist.mesh.axes import Axes
from rlt_dist.mesh.world import open_world
from rlt_dist.parallel.execute.stage import BaseStage
from rlt_dist.parallel.mesh import mesh_of
from rlt_dist.parallel.schedule.instructions import Work
from rlt_dist.train.rehearsal import Rehearsal

VOCABULARY, ALONE, ENDLESS = 41, Axes(1, 1, 1), 1 << 60
RLT = {
    **{"kind": "rlt", "d_model": 8, "heads": 4, "kv_heads": 2, "ffn": 13},
    **{"encoder_layers": 2, "decoder_layers": 3, "window": 3, "memory_len": 7},
}
XL = {"kind": "transformer_xl", "d_model": 8, "heads": 4, "d_inner": 13, "layers": 3}
XL |= {"memory_len": 7}
CASES: dict[str, dict[str, Any]] = {
    "rlt0": {"model": RLT | {"feedback": 0}},
    "rlt0 in parts": {"model": RLT | {"feedback": 0}, "recompute": {"decoder_chunk": 2}},
    "rlt1": {"model": RLT | {"memory_groups": 2, "dropout": 0.1}},
    "rlt1, recomputed": {
        "model": RLT,
        "recompute": {"decoder_chunk": 4, "layers": True},
    },
    "rlt2": {"model": RLT | {"feedback": 4}},
    "rlt2, recomputed, tied": {
        "model": RLT | {"feedback": 2, "decoder_layers": 2, "tied": True, "tie_output": True},
        "recompute": {"decoder_chunk": 3},
    },
    "xl": {"model": XL},
    "xl, recomputed": {"model": XL | {"pre_norm": True}, "recompute": {"layers": True}},
    "xl, dropout": {
        "model": XL | {"pre_norm": True, "dropout": 0.1},
        "recompute": {"layers": True},
    },
}

WHOLE: dict[str, dict[str, Any]] = {
    "fed with tokens": {"model": RLT | {"feedback_from": "token"}},
    "transformer": {"model": RLT | {"decoder_layers": 0, "feedback": 0}},
    "gru": {"model": {"kind": "gru", "d_model": 8, "layers": 2}},
}
"""What the executor does not run."""


def configuration(case: str, folder: Path) -> RunConfig:
    base = {
        "run_folder": str(folder),
        "data": {"path": "runs/none", "lanes": 4, "segment": 6},
        "optimizer": {"learning_rate": 1e-3},
        "train": {"steps": 1, "micro_batch": 2},
        "ops": {"recurrence": "python"},
    }
    return RunConfig.model_validate(base | (CASES | WHOLE)[case])


@pytest.mark.parametrize("segments", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_every_work_takes_the_flops_that_are_predicted(
    counted: Any, case: str, segments: int, tmp_path: Path
) -> None:
    config, found = configuration(case, tmp_path), Counter[Work]()
    do = BaseStage.do

    def watched(stage: Any, work: Work) -> None:
        with counted() as mode:
            do(stage, work)
        found[work] += mode.get_total_flops()

    with open_world({"OMP_NUM_THREADS": "1"}) as world, mesh_of(config, world) as mesh:
        rehearsal = Rehearsal(config, VOCABULARY, mesh, document=ENDLESS)
        for _ in range(segments - 1):
            rehearsal.pass_through()
        with mock.patch.object(BaseStage, "do", watched):
            rehearsal.pass_through()
    run = run_of(config, VOCABULARY, ALONE, seen=(segments - 1) * config.data.segment)
    rank = run.rank(0)
    predicted = {work: rank.effort(work).flops for work in rank.works()}
    assert {work: flops for work, flops in found.items() if work.micro == 0} == predicted
    assert run.micro_batches == len({work.micro for work in found})


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("case", CASES | WHOLE)
def test_a_checkpoint_has_the_size_that_is_predicted(case: str, steps: int, tmp_path: Path) -> None:
    config = configuration(case, tmp_path)
    with open_world({"OMP_NUM_THREADS": "1"}) as world, mesh_of(config, world) as mesh:
        rehearsal = Rehearsal(config, VOCABULARY, mesh, document=ENDLESS)
        for _ in range(steps):
            rehearsal.step()
        folder = rehearsal.save(tmp_path)
    run = run_of(config, VOCABULARY, ALONE)
    expected = read_manifest(folder).tensor_bytes
    assert checkpoint_bytes(run, seen=steps * config.data.segment) == expected
