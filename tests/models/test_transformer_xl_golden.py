"""Transformer-XL against values computed with the authors' code, in float64."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from rlt_dist.config.model import TransformerXLConfig
from rlt_dist.models.state import State, detach
from rlt_dist.models.transformer_xl.model import TransformerXL

GOLDEN = Path(__file__).parents[1] / "golden"
FILES = sorted(path.stem for path in GOLDEN.glob("txl*.safetensors"))
TOLERANCE = 1e-9


class Golden:
    """One file: its configuration, its tensors, and the model they describe."""

    def __init__(self, name: str) -> None:
        with safe_open(GOLDEN / f"{name}.safetensors", "pt") as file:
            settings: dict[str, Any] = json.loads(file.metadata()["config"])
            self.tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        self.length, vocabulary = settings.pop("tgt_len"), settings.pop("vocab")
        settings["memory_len"] = settings.pop("mem_len")
        # The authors write -1 where no distance is clamped.
        settings["clamp_len"] = max(0, settings["clamp_len"]) or None
        self.config = TransformerXLConfig.model_validate(settings)
        self.model = TransformerXL(self.config, vocabulary).double()
        self.model.load_state_dict(self.named("param."))

    def named(self, prefix: str) -> dict[str, Tensor]:
        return {k.removeprefix(prefix): v for k, v in self.tensors.items() if k.startswith(prefix)}

    def run(self) -> tuple[Tensor, Tensor, State]:
        """Outputs and nll of all segments, and the state after the last."""
        ids, labels = self.tensors["input_ids"], self.tensors["labels"]
        state, outputs, nll = self.model.empty_state(len(ids)), [], []
        parts = zip(ids.split(self.length, 1), labels.split(self.length, 1), strict=True)
        for tokens, targets in parts:
            output, state = self.model(tokens, torch.zeros_like(tokens, dtype=torch.bool), state)
            state = detach(state)
            outputs.append(output)
            nll.append(self.model.nll(output, targets))
        return torch.cat(outputs, 1), torch.cat(nll, 1), state


def error(x: Tensor, y: Tensor) -> float:
    assert x.shape == y.shape
    return ((x - y).abs().max() / y.abs().max().clamp(min=1e-6)).item()


def test_all_golden_files_are_read() -> None:
    assert len(FILES) == 4


@pytest.mark.parametrize("name", FILES)
def test_losses_memory_and_gradients_are_the_authors(name: str) -> None:
    golden = Golden(name)
    outputs, nll, state = golden.run()
    loss = nll.mean()
    loss.backward()
    layers, kept = golden.config.layers, golden.config.memory_len
    found = {"nll": nll, "loss": loss[None]}
    found |= {f"memory.{n}": state[f"memory.{n}"] for n in range(layers)}
    # The authors also keep what the last layer puts out, which no layer reads.
    found[f"memory.{layers}"] = outputs[:, -kept:]
    found |= {f"grad.{k}": p.grad for k, p in golden.model.named_parameters() if p.grad is not None}
    expected = {
        key: tensor
        for key, tensor in golden.tensors.items()
        if not key.startswith("param.") and key not in ("input_ids", "labels")
    }
    assert found.keys() == expected.keys()
    worst = max(found, key=lambda key: error(found[key], expected[key]))
    assert error(found[worst], expected[worst]) <= TOLERANCE, worst
