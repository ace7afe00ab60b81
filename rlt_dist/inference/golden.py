"""Golden files: exact float64 answers that a model must give.

A golden file is a safetensors file with `param.*`, inputs, and what they must lead to: outputs,
the loss, and the gradient of the loss with respect to every parameter. Its metadata hold the
configuration as JSON; `segment` or `tgt_len` is the length of the segments, between which carried
state is detached.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rlt_dist.checkpoint.exchange.names import select_parameters
from rlt_dist.config.load import validate
from rlt_dist.config.model import RltConfig, TransformerXLConfig
from rlt_dist.models.build import Model, build_model
from rlt_dist.models.state import State, detach
from rlt_dist.util.errors import UserError

TOLERANCE = 1e-9

_RLT_KEYS = {
    "d": "d_model",
    "heads": "heads",
    "kv_heads": "kv_heads",
    "ffn": "ffn",
    "enc": "encoder_layers",
    "dec": "decoder_layers",
    "window": "window",
    "groups": "memory_groups",
    "memory_len": "memory_len",
    "alpha": "alpha",
    "feedback": "feedback",
    "tied": "tied",
    "tie_output": "tie_output",
    "eps": "eps",
    "rope_base": "rotary_base",
}
_XL_KEYS = {
    "d_model": "d_model",
    "heads": "heads",
    "d_head": "d_head",
    "d_inner": "d_inner",
    "layers": "layers",
    "mem_len": "memory_len",
    "same_length": "same_length",
    "clamp_len": "clamp_len",
    "cutoffs": "cutoffs",
    "div_val": "div_val",
    "pre_norm": "pre_norm",
}
_UNLIMITED = 10**9


@dataclass(frozen=True)
class Golden:
    """One file: the model it describes, filled with its parameters, and its tensors."""

    model: Model
    segment: int
    tensors: dict[str, Tensor]


def relative_error(found: Tensor, expected: Tensor) -> float:
    """max|x - y| / max(max|y|, 1e-6); infinite where a shape or a finite number is missing."""
    if found.shape != expected.shape:
        return float("inf")
    error = (found - expected).abs().max() / expected.abs().max().clamp(min=1e-6)
    return error.item() if error.isfinite() else float("inf")


def golden_errors(path: Path) -> dict[str, float]:
    """Run a golden file in float64 and compare everything it holds.

    Returns:
        relative error by tensor: outputs, `loss`, carried memory, `grad.NAME`.

    Raises:
        UserError: not a golden file.
    """
    golden = read_golden(path)
    found = _run(golden)
    expected = {
        name: tensor
        for name, tensor in golden.tensors.items()
        if not name.startswith("param.") and name not in ("input_ids", "labels", "document_start")
    }
    missing = sorted(expected.keys() - found.keys())
    if missing:
        raise UserError(f"{path}: holds {', '.join(missing)}, which this model does not compute")
    return {name: relative_error(found[name], tensor) for name, tensor in expected.items()}


def read_golden(path: Path) -> Golden:
    """Read a golden file and build its model.

    Raises:
        UserError: no such file, not safetensors, or not a golden file.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file; give the path of a golden .safetensors file")
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError:
        raise UserError(f"{path}: is not a safetensors file") from None
    if "config" not in metadata or "loss" not in tensors:
        raise UserError(f"{path}: is not a golden file: it has no configuration or no loss")
    settings = json.loads(metadata["config"])
    model = _build(settings, path)
    _fill(model, tensors, path)
    length = tensors["input_ids"].shape[1]
    segment = settings.get("tgt_len") or int(metadata.get("segment", "0")) or length
    return Golden(model, segment, tensors)


def _build(settings: dict[str, Any], path: Path) -> Model:
    config: RltConfig | TransformerXLConfig
    if "tgt_len" in settings:
        keys = {_XL_KEYS[key]: value for key, value in settings.items() if key in _XL_KEYS}
        # The authors write -1 where no distance is clamped.
        keys["clamp_len"] = keys["clamp_len"] if keys["clamp_len"] > 0 else None
        config = validate(keys, TransformerXLConfig, str(path))
    else:
        keys = {_RLT_KEYS[key]: value for key, value in settings.items() if key in _RLT_KEYS}
        keys["memory_len"] = keys["memory_len"] if keys["memory_len"] < _UNLIMITED else None
        config = validate(keys, RltConfig, str(path))
    return build_model(config, settings["vocab"], torch.float64)


def _fill(model: Model, tensors: dict[str, Tensor], path: Path) -> None:
    stored = {
        name.removeprefix("param."): tensor
        for name, tensor in tensors.items()
        if name.startswith("param.")
    }
    found = select_parameters(stored, model.config, model.vocabulary, str(path))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(found[name])


def _run(golden: Golden) -> dict[str, Tensor]:
    """Everything a golden file may hold, computed: one backward of the mean over all tokens."""
    model, tensors = golden.model, golden.tensors
    tokens, labels = tensors["input_ids"].long(), tensors["labels"].long()
    start = tensors.get("document_start", torch.zeros_like(tokens)).bool()
    state: State = model.empty_state(len(tokens))
    outputs, losses, nlls = [], [], []
    for first in range(0, tokens.shape[1], golden.segment):
        part = slice(first, first + golden.segment)
        output, state = model(tokens[:, part], start[:, part], detach(state))
        outputs.append(output)
        losses.append(model.loss(output.flatten(0, 1), labels[:, part].flatten()))
        nlls.append(model.nll(output.detach(), labels[:, part]))
    loss = torch.stack(losses).sum() / labels.numel()
    loss.backward()
    output, nll = torch.cat(outputs, dim=1), torch.cat(nlls, dim=1)
    found = {"state": output, "nll": nll, "loss": loss.reshape(1), "logits": model.logits(output)}
    found |= {name: tensor for name, tensor in state.items() if name.startswith("memory.")}
    if isinstance(model.config, TransformerXLConfig):
        # The authors also keep what the last layer puts out, which no layer reads.
        found[f"memory.{model.config.layers}"] = output[:, -model.config.memory_len :]
    found |= {f"grad.{n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {name: tensor.detach() for name, tensor in found.items()}
