"""Steps recorded as CUDA graphs give what the same steps give as they are asked for."""

import os

import pytest
import torch
from torch import Tensor

from rlt_dist.config.model import RltConfig
from rlt_dist.models.build import initial_model
from rlt_dist.ops.recurrence import graphs
from rlt_dist.ops.recurrence.dispatch import Backend, Recurrence

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU: untested"),
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") == "1", reason="what is interpreted is not recorded"
    ),
]
TOKENS, LANES, VOCABULARY = 24, 3, 29


def run(backend: Backend, feedback: int, part: int) -> list[Tensor]:
    """Outputs and gradients; documents start at different tokens of the lanes."""
    config = RltConfig(
        **{"d_model": 64, "heads": 4, "kv_heads": 2, "d_head": 16, "ffn": 50, "window": 4},
        **{"encoder_layers": 1, "decoder_layers": 3, "memory_len": 7, "feedback": feedback},
    )
    model = initial_model(config, VOCABULARY, 0, torch.float32, Recurrence(backend, part)).cuda()
    chance = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCABULARY, (LANES, TOKENS), generator=chance).cuda()
    start = (torch.rand(LANES, TOKENS, generator=chance) < 0.1).cuda()
    output, _ = model(tokens, start, model.empty_state(LANES))
    model.nll(output, tokens).mean().backward()
    return [output.detach(), *(x.grad for x in model.parameters() if x.grad is not None)]


@pytest.mark.parametrize("part", [TOKENS, 10])
@pytest.mark.parametrize("feedback", [0, 1, 3])
def test_a_recorded_loop_gives_what_the_loop_in_torch_gives(
    monkeypatch: pytest.MonkeyPatch, feedback: int, part: int
) -> None:
    recorded = []
    record = graphs.Steps._recorded
    monkeypatch.setattr(
        graphs.Steps, "_recorded", lambda self, at: recorded.append(at) or record(self, at)
    )
    expected = run("python", feedback, part)
    assert not recorded
    for x, y in zip(run("triton", feedback, part), expected, strict=True):
        assert (x - y).abs().max() <= 1e-3 * y.abs().max().clamp(min=1e-6)
    assert bool(recorded) == (feedback > 0)
