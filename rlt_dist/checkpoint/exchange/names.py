"""The names of parameters in files, held to those of a model.

All models carry the names that files have, so nothing is renamed on the way in or out. A weight
used in two places has one name in the model; files of others (the Transformer-XL authors' among
them) hold it under both. `aliases` is the one table of second names.
"""

import re
from collections.abc import Iterable, Mapping, Set

import torch
from torch import Tensor

from rlt_dist.config.model import GruConfig, ModelConfig, RltConfig
from rlt_dist.parallel.plan.layout import parameter_shapes
from rlt_dist.util.errors import UserError

_EMBEDDINGS = re.compile(r"embed\.weight|word_emb\.emb_layers\.\d+\.weight")
_COMPUTED = {"pos_emb.inv_freq"}
"""Buffers of the authors' state dict that follow from d_model."""
_SHOWN = 5


def aliases(config: ModelConfig, names: Iterable[str]) -> dict[str, str]:
    """Second names of a model's parameters, each with the one under which it is stored."""
    if isinstance(config, RltConfig):
        rules = [(r"encoder\.(\d+\.(?:attn|ffn)\..+)", r"decoder.\1")] * config.tied
        rules += [(r"embed\.weight", "output.weight")] * config.tie_output
    elif isinstance(config, GruConfig):
        rules = []
    else:
        rules = [(r"word_emb\.emb_layers\.(\d+)\.weight", r"crit.out_layers.\1.weight")]
        # The head's projection, number 0, is its own even where the tails' are tied.
        tails = (r"word_emb\.emb_projs\.([1-9]\d*)", r"crit.out_projs.\1")
        rules += [tails] * config.tie_projections
    return {
        found.expand(second): name
        for name in names
        for pattern, second in rules
        if (found := re.fullmatch(pattern, name))
    }


def vocabulary_of(tensors: Mapping[str, Tensor]) -> int:
    """How many ids the embedding has that is among these tensors; 0: there is none."""
    return sum(t.shape[0] for n, t in tensors.items() if _EMBEDDINGS.fullmatch(n) and t.dim())


def select_parameters(
    tensors: Mapping[str, Tensor], config: ModelConfig, vocabulary: int, where: str
) -> dict[str, Tensor]:
    """A model's parameters, in its order, out of the tensors of a file.

    Second names may be there or not.

    Raises:
        UserError: tensors are missing, unexpected, of another shape or no floating-point numbers,
            or one that the model ties is not what it is tied to.
    """
    shapes = parameter_shapes(config, vocabulary)
    second = aliases(config, shapes)
    found = {name: tensor.shape for name, tensor in tensors.items()}
    trouble = other_model(found, shapes, also=second.keys() | _COMPUTED)
    if trouble is not None:
        raise UserError(f"{where}: {trouble}")
    _refuse(where, "no floating-point numbers", _not_floating(tensors, shapes))
    _refuse(where, "not what the model ties them to", _not_tied(tensors, second))
    return {name: tensors[name] for name in shapes}


def other_model(
    found: Mapping[str, torch.Size],
    shapes: Mapping[str, torch.Size],
    also: Set[str] = frozenset(),
) -> str | None:
    """How what a file or a checkpoint has differs from a model's parameters; None: it does not.

    Args:
        found, shapes: whole shapes by name, of what is there and of the model.
        also: names that may be there beside them.

    Returns:
        what is missing, unexpected and misshapen, in one line.
    """
    troubles = {
        "missing": [name for name in shapes if name not in found],
        "unexpected": [name for name in found if name not in shapes and name not in also],
        "of another shape": [
            f"{name} ({list(found[name])} there, {list(shape)} in the model)"
            for name, shape in shapes.items()
            if name in found and found[name] != shape
        ],
    }
    texts = [f"{what}: {_some(names)}" for what, names in troubles.items() if names]
    return f"holds another model; {'; '.join(texts)}" if texts else None


def _not_floating(tensors: Mapping[str, Tensor], names: Iterable[str]) -> list[str]:
    return [f"{n} ({tensors[n].dtype})" for n in names if not tensors[n].is_floating_point()]


def _not_tied(tensors: Mapping[str, Tensor], second: Mapping[str, str]) -> list[str]:
    return [
        f"{other} (tied to {name})"
        for other, name in second.items()
        if other in tensors and not torch.equal(tensors[other], tensors[name])
    ]


def _refuse(where: str, what: str, names: list[str]) -> None:
    if names:
        raise UserError(f"{where}: {what}: {_some(names)}")


def _some(names: list[str]) -> str:
    """The first few names, and how many more there are."""
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
