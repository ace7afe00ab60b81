"""Every model's training loss is the sum of its nll, gradients included."""

from typing import Any

import pytest
import torch

from rlt_dist.config.model import RltConfig, TransformerXLConfig
from rlt_dist.models.build import Model, build_model

VOCABULARY = 11
RLT: dict[str, Any] = {
    "d_model": 8,
    "heads": 2,
    "ffn": 12,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "window": 3,
}
XL: dict[str, Any] = {"d_model": 8, "heads": 2, "d_inner": 12, "layers": 1, "memory_len": 5}
CONFIGS = [
    RltConfig.model_validate(RLT),
    RltConfig.model_validate({**RLT, "tie_output": True}),
    *(
        TransformerXLConfig.model_validate({**XL, **options})
        for options in (
            {},
            {"cutoffs": (3, 7)},
            {"cutoffs": (3, 7), "div_val": 2},
            {"cutoffs": (3, 7), "div_val": 2, "tie_projections": False},
        )
    ),
]


def built(config: Any) -> Model:
    """A model none of whose parameters is at a special value such as 0 or 1."""
    model = build_model(config, VOCABULARY, torch.float64)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data = 0.5 * values
    return model


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("targets", [range(VOCABULARY), [0, 1, 2], [9], []])
def test_loss_is_the_sum_of_nll(config: Any, targets: Any) -> None:
    """Also through an embedding that the output layer is tied to, and with empty clusters."""
    model, ids = built(config), torch.tensor([[*range(VOCABULARY)]])
    wanted = torch.tensor([*targets], dtype=torch.int64)
    start, state = torch.zeros_like(ids, dtype=torch.bool), model.empty_state(1)
    sums = []
    for training in (True, False):
        output = model(ids, start, state)[0][:, : len(wanted)]
        loss = (
            model.loss(output.flatten(0, 1), wanted)
            if training
            else model.nll(output, wanted[None]).sum()
        )
        gradients = torch.autograd.grad(loss / 7, list(model.parameters()), materialize_grads=True)
        sums.append([loss, *gradients])
    for x, y in zip(*sums, strict=True):
        # Some gradients are 0 but for rounding: those of scores where there is one key.
        assert (x - y).abs().max() <= 1e-12 * y.abs().max().clamp(min=1e-3)
