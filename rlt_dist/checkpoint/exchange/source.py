"""Files that a model can be imported from."""

import pickle
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from rlt_dist.checkpoint.exchange.about import About, read_about, read_json
from rlt_dist.checkpoint.run_folder import TOKENIZER
from rlt_dist.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from rlt_dist.util.errors import UserError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
ABOUT, CARD = "config.json", "README.md"


@dataclass(frozen=True)
class Source:
    """What was found.

    Attributes:
        tensors: by name; those of safetensors files are read when they are used.
        about, tokenizer: what an exported folder has beside them.
    """

    path: Path
    tensors: dict[str, Tensor]
    about: About | None = None
    tokenizer: Tokenizer | None = None


def read_source(path: Path, *, trust_pickle: bool = False) -> Source:
    """Read an exported folder, a safetensors file, or a state dict that torch.save wrote.

    Args:
        trust_pickle: unpickle whatever the file holds, which may run code of whoever made it.

    Raises:
        UserError: it is none of these, or damaged, or would have to be trusted.
    """
    if path.is_dir():
        about, tokenizer = read_about(path / ABOUT), load_tokenizer(path / TOKENIZER)
        return Source(path, _sharded(path), about, tokenizer)
    if not path.is_file():
        raise UserError(f"{path}: no such file or folder; give an exported folder or a file")
    with path.open("rb") as file:
        # A safetensors file is the header's length in eight bytes, then the header, JSON.
        safe = file.read(9)[8:] == b"{"
    if safe:
        return Source(path, dict(_safetensors(path)))
    return Source(path, _state_dict(path, _unpickled(path, trust_pickle)))


def _sharded(folder: Path) -> dict[str, Tensor]:
    """The tensors of all weight files of a folder."""
    index = folder / INDEX
    if not index.is_file():
        return dict(_safetensors(folder / WEIGHTS))
    listed = read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(file, str) for file in listed.values()):
        raise UserError(f"{index}: has no weight_map of names to files; export the model again")
    tensors: dict[str, Tensor] = {}
    for file in sorted(set(listed.values())):
        for name, tensor in _safetensors(folder / file):
            if listed.get(name) != file:
                raise UserError(f"{folder / file}: holds {name}, which {INDEX} says it does not")
            tensors[name] = tensor
    return tensors


def _safetensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of a file; their memory is the file's, mapped."""
    if not path.is_file():
        raise UserError(f"{path}: no such file; copy or export the model again")
    try:
        with safe_open(path, "pt") as file:
            yield from ((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118
    except SafetensorError as error:
        raise UserError(f"{path}: is damaged: {error}; copy or export it again") from None


def _unpickled(path: Path, trusted: bool) -> Any:
    """What torch.save wrote."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of old and of unusual pickles, which are read or not
            return torch.load(path, map_location="cpu", weights_only=not trusted)
    except pickle.UnpicklingError:
        raise UserError(
            f"{path}: holds more than tensors, and reading that may run code of whoever made it; "
            "save model.state_dict() where the model's code is, or, if you trust the file, add "
            "--trust-pickle"
        ) from None
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"{path}: needs the code that it was made with: {error}; put that on PYTHONPATH, or "
            "save model.state_dict() there"
        ) from None
    except Exception:  # whatever a foreign or damaged file leads the unpickler to
        raise UserError(
            f"{path}: is neither a safetensors file nor one of torch.save, or it is damaged"
        ) from None


def _state_dict(path: Path, content: Any) -> dict[str, Tensor]:
    if isinstance(content, nn.Module):
        content = content.state_dict()
    if not isinstance(content, Mapping):
        raise UserError(f"{path}: holds a {type(content).__name__}; a state dict is needed")
    for name, tensor in content.items():
        if not (isinstance(name, str) and isinstance(tensor, Tensor)):
            raise UserError(
                f"{path}: {name} is a {type(tensor).__name__}, not a tensor; save "
                "model.state_dict() alone"
            )
    return dict(content)
