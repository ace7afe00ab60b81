"""Meshes that a model cannot be cut to, and how a rank's lanes become micro-batches."""

from typing import Any

import pytest

from rlt_dist.util.errors import UserError

IMPOSSIBLE = [
    (
        "rlt",
        "mesh.pipeline=3 model.encoder_layers=3",
        "mesh.pipeline 3 exceeds model.decoder_layers 2: every stage needs a layer of it",
    ),
    (
        "rlt",
        "mesh.pipeline=3 model.decoder_layers=3",
        "mesh.pipeline 3 exceeds model.encoder_layers 2: every stage needs a layer of it",
    ),
    (
        "transformer_xl",
        "mesh.pipeline=4",
        "mesh.pipeline 4 exceeds model.layers 2: every stage needs a layer of it",
    ),
    ("rlt", "mesh.tensor=4", "mesh.tensor 4 does not divide model.heads 2"),
    ("transformer_xl", "mesh.tensor=3", "mesh.tensor 3 does not divide model.heads 2"),
    (
        "rlt",
        "mesh.tensor=4 model.heads=12 model.d_head=2 model.kv_heads=6",
        "mesh.tensor 4 neither divides model.kv_heads 6 nor is a multiple of them",
    ),
    (
        "rlt",
        "mesh.tensor=4 model.heads=4 model.ffn=3",
        "model.ffn 3 cannot be cut over mesh.tensor 4: in parts of 1 the last process gets none",
    ),
    (
        "transformer_xl",
        "mesh.tensor=4 model.heads=4 model.d_inner=6",
        "model.d_inner 6 cannot be cut over mesh.tensor 4: "
        "in parts of 2 the last process gets none",
    ),
    (
        "rlt",
        "mesh.tensor=2 ops.recurrence=native",
        "ops.recurrence: native computes whole layers, and mesh.tensor is 2; take auto or python",
    ),
    (
        "rlt",
        "mesh.pipeline=2 ops.recurrence=reference",
        "ops.recurrence: reference is one autograd graph, and mesh.pipeline is 2; take another",
    ),
    (
        "rlt",
        "mesh.pipeline=2 optimizer.engine=deepspeed optimizer.zero_stage=2",
        "optimizer.zero_stage 2 needs mesh.pipeline 1, which is 2; take stage 1",
    ),
    (
        "rlt",
        "pipeline.schedule=gpipe",
        "pipeline.schedule gpipe is for Transformer-XL; "
        "RLT's order follows from pipeline.group and pipeline.in_flight",
    ),
    ("gru", "mesh.pipeline=2", "model.kind gru has no pipeline stages, and mesh.pipeline is 2"),
    ("gru", "mesh.tensor=2", "model.kind gru has no heads to cut, and mesh.tensor is 2"),
    ("gru", "pipeline.group=2", "pipeline is for models with stages, and model.kind gru has none"),
    (
        "rlt",
        "mesh.pipeline=2 model.feedback_from=token",
        "model.feedback_from token has no pipeline stages, and mesh.pipeline is 2",
    ),
    (
        "rlt",
        "mesh.pipeline=2 model.feedback=0 model.decoder_layers=0",
        "model.decoder_layers 0 has no pipeline stages, and mesh.pipeline is 2",
    ),
    *[
        (
            "transformer_xl",
            override,
            "pipeline.group and pipeline.in_flight are for RLT's ring; "
            "Transformer-XL's order is pipeline.schedule",
        )
        for override in ("pipeline.group=2", "pipeline.in_flight=1")
    ],
]


@pytest.mark.parametrize(("model", "overrides", "line"), IMPOSSIBLE)
def test_an_impossible_mesh_is_one_line_with_the_numbers(
    runs: Any, model: str, overrides: str, line: str
) -> None:
    message = runs.refuse(None, *overrides.split(), model=model)
    assert message == f"{runs.path}: {line}"


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ("optimizer.zero_stage=2", "optimizer.zero_stage 2 is for optimizer.engine: deepspeed"),
        *[
            (
                f"optimizer.engine=deepspeed train.precision={precision}",
                "optimizer.engine: deepspeed computes in float32, and train.precision is "
                f"{precision}; take engine torch, or float32",
            )
            for precision in ("float64", "bfloat16")
        ],
    ],
)
def test_what_an_engine_cannot_do_is_one_line(runs: Any, overrides: str, line: str) -> None:
    assert runs.refuse(None, *overrides.split()) == f"{runs.path}: {line}"


@pytest.mark.parametrize(
    ("model", "overrides"),
    [
        ("rlt", "mesh.pipeline=2 mesh.tensor=2 pipeline.group=1 pipeline.in_flight=1"),
        ("rlt", "mesh.tensor=4 model.heads=4 model.kv_heads=2"),
        ("rlt", "mesh.tensor=2 model.heads=4 model.kv_heads=2 model.ffn=13"),
        ("transformer_xl", "mesh.data=3 mesh.pipeline=2 pipeline.schedule=gpipe"),
    ],
)
def test_a_mesh_is_no_part_of_what_makes_it_this_run(runs: Any, model: str, overrides: str) -> None:
    config = runs.load(None, *overrides.split(), model=model)
    assert not any("mesh" in key or "pipeline" in key for key in config.identity())


@pytest.mark.parametrize(
    ("stages", "micro_batch", "local", "lanes"),
    [
        (1, None, 6, 6),
        (1, None, 1, 1),
        (1, 2, 6, 2),
        (2, None, 6, 3),
        (4, None, 6, 1),
        (3, None, 8, 2),
        (4, None, 4, 1),
        (4, None, 3, 1),
        (4, 3, 6, 3),
    ],
)
def test_lanes_of_a_micro_batch(
    runs: Any, stages: int, micro_batch: int | None, local: int, lanes: int
) -> None:
    config = runs.load(
        None,
        "data.lanes=12",
        f"mesh.pipeline={stages}",
        "model.encoder_layers=4",
        "model.decoder_layers=4",
        f"train.micro_batch={micro_batch or 'null'}",
    )
    assert config.micro_batch_lanes(local) == lanes


def test_a_micro_batch_that_does_not_divide_a_ranks_lanes_is_refused(runs: Any) -> None:
    config = runs.load(None, "train.micro_batch=4")
    with pytest.raises(UserError) as refused:
        config.micro_batch_lanes(2)
    assert str(refused.value) == (
        "train.micro_batch 4 does not divide the 2 lanes of a data-parallel rank: "
        "micro-batches are equal groups of whole lanes"
    )
