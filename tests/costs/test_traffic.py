"""Bytes of every message of a step, predicted and counted: real processes, two launches."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlt_dist.config.run import RunConfig
from rlt_dist.costs.run import run_of
from rlt_dist.costs.traffic import step_traffic
from rlt_dist.mesh.axes import parse_axes
from rlt_dist.mesh.local import run_ranks

PROGRAM = Path(__file__).parent / "ranks.py"
VOCABULARY, STEPS = 41, 2
RLT = {
    **{"kind": "rlt", "d_model": 8, "heads": 4, "kv_heads": 2, "ffn": 13},
    **{"encoder_layers": 3, "decoder_layers": 4, "window": 3, "memory_len": 7},
}
XL = {"kind": "transformer_xl", "d_model": 8, "heads": 4, "d_inner": 13, "layers": 5}
XL |= {"memory_len": 7}
MODELS: dict[str, dict[str, Any]] = {
    "rlt0": {"model": RLT | {"feedback": 0}},
    "rlt1": {"model": RLT | {"memory_groups": 2, "dropout": 0.1}},
    "rlt1, recomputed": {
        "model": RLT | {"kv_heads": 1},
        "recompute": {"decoder_chunk": 2, "layers": True},
        "guard": {"state_norm": 100.0},
    },
    "rlt1, recomputed, dropout": {
        "model": RLT | {"dropout": 0.1, "tie_output": True},
        "recompute": {"decoder_chunk": 4, "layers": True},
    },
    "rlt2": {"model": RLT | {"feedback": 4}, "recompute": {"decoder_chunk": "none"}},
    "rlt2, recomputed, tied": {
        "model": RLT | {"feedback": 2, "decoder_layers": 3, "tied": True},
        "recompute": {"decoder_chunk": 3},
        "train": {"steps": 1, "precision": "bfloat16"},
    },
    "rlt1, small budget": {"model": RLT, "recompute": {"budget_gib": 2e-5}},
    "fed with tokens": {"model": RLT | {"feedback_from": "token"}},
    "transformer": {
        "model": RLT | {"decoder_layers": 0, "feedback": 0},
        "train": {"steps": 1, "precision": "bfloat16"},
    },
    "gru": {"model": {"kind": "gru", "d_model": 8, "layers": 2}},
    "xl": {"model": XL},
    "xl, gpipe": {"model": XL | {"pre_norm": True, "dropout": 0.1}},
    "xl, recomputed": {"model": XL | {"dropout": 0.1}, "recompute": {"layers": True}},
    "xl, recomputed, norms before": {
        "model": XL | {"pre_norm": True},
        "recompute": {"layers": True},
        "train": {"steps": 1, "precision": "bfloat16"},
    },
    "xl, adaptive": {"model": XL | {"cutoffs": [11, 25], "div_val": 2}},
    "xl, adaptive, one width": {"model": XL | {"cutoffs": [11, 25]}},
}
CHOSEN = {
    "2x1x1": ("rlt1", "xl", "gru"),
    "1x2x1": ("rlt0", "rlt1, recomputed", "rlt1, small budget", "rlt2", "xl", "xl, gpipe"),
    "1x1x2": (
        *("rlt1, recomputed, dropout", "rlt2, recomputed, tied", "xl, recomputed"),
        *("fed with tokens", "transformer"),
    ),
    "2x2x1": ("rlt1", "xl, adaptive"),
    "1x2x2": (
        *("rlt0", "rlt1, recomputed", "rlt2, recomputed, tied", "rlt1, small budget"),
        *("xl, gpipe", "xl, adaptive"),
    ),
    "2x1x2": ("rlt1, recomputed, dropout", "rlt2", "xl, adaptive, one width"),
    "1x1x4": ("rlt1, recomputed", "xl, recomputed, norms before"),
    "4x1x1": ("xl",),
}
ALL = [(mesh, model) for mesh, models in CHOSEN.items() for model in models]


def configuration(model: str, mesh: str) -> dict[str, Any]:
    """Micro-batches are all of a rank's lanes where tails must be known, else what is usual."""
    axes = parse_axes(mesh)
    base = {
        "run_folder": "runs/none",
        "data": {"path": "runs/none", "lanes": 8, "segment": 6},
        "optimizer": {"learning_rate": 1e-3},
        "train": {"steps": 1, "precision": "float64"},
        "mesh": {"data": axes.data, "pipeline": axes.pipeline, "tensor": axes.tensor},
        "pipeline": {"schedule": "gpipe"} if "gpipe" in model else {},
    }
    content = base | MODELS[model]
    if "adaptive" in model:
        content["train"] = {"steps": 1, "micro_batch": 8 // axes.data}
    return RunConfig.model_validate(content).model_dump(mode="json")


@pytest.fixture(scope="module")
def counted(once: Any) -> Callable[[str, str], list[dict[str, Any]]]:
    """`counted(mesh, model)`: by rank, what it sent."""

    def make(folder: Path) -> None:
        for size in (2, 4):
            here = folder / str(size)
            here.mkdir()
            cases = [
                {"name": f"{mesh} {model}", "config": configuration(model, mesh)}
                | {"vocabulary": VOCABULARY, "steps": STEPS}
                for mesh, model in ALL
                if parse_axes(mesh).size == size
            ]
            (here / "cases.json").write_text(json.dumps(cases))
            run_ranks(size, [str(PROGRAM), str(here)], here / "output.txt")

    folder = once("traffic", make)

    def of(mesh: str, model: str) -> list[dict[str, Any]]:
        size = parse_axes(mesh).size
        files = (folder / str(size) / f"{rank}.json" for rank in range(size))
        return [json.loads(file.read_text())[f"{mesh} {model}"] for file in files]

    return of


@pytest.mark.parametrize(("mesh", "model"), ALL)
def test_every_message_of_a_step_is_predicted(counted: Any, mesh: str, model: str) -> None:
    axes = parse_axes(mesh)
    config = RunConfig.model_validate(configuration(model, mesh))
    run = run_of(config, VOCABULARY, axes, seen=(STEPS - 1) * config.data.segment)
    for rank, sent in enumerate(counted(mesh, model)):
        place = axes.place(rank)
        own = replace(run, own=replace(run.own, tails=tuple(sent["tails"])))
        predicted: Counter[tuple[tuple[int, ...], str, int]] = Counter()
        of_axis = dict.fromkeys(sent["metered"], 0)
        for transfer in step_traffic(own, place):
            ranks = tuple(axes.members(transfer.group, place))
            key = ranks, transfer.kind, transfer.bytes
            predicted[key] += transfer.calls
            of_axis[transfer.axis] += transfer.bytes * transfer.calls
        found = {(tuple(r), kind, size): calls for r, kind, size, calls in sent["messages"]}
        assert dict(predicted) == found, rank
        assert of_axis == sent["metered"], rank
