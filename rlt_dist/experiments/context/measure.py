"""What more context is worth to a trained model: losses by context, bits per byte by memory."""

import json
import math
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rlt_dist.data.corpus.index import CorpusIndex
from rlt_dist.experiments.context.contenders import Contender
from rlt_dist.experiments.context.passages import Passages, Scope, read_passages
from rlt_dist.inference.held_out import HeldOut, evaluate_split
from rlt_dist.inference.load import load_trained
from rlt_dist.models.build import Frozen, Model
from rlt_dist.util.errors import UserError
from rlt_dist.util.files import atomic_path
from rlt_dist.util.lock import locked

SPLIT = "test"

_MEASURED = "context.npz"
"""In a run's folder: what was measured of it, and how."""

_WINDOWS = 64
"""Windows that are read side by side."""

_LANES, _HELD_OUT = 8, 1 << 16
"""Lanes and tokens by which memory lengths are compared."""


@dataclass(frozen=True, eq=False)
class Measured:
    """Of one trained model.

    Attributes:
        losses: float64 [contexts, tokens], nats (see `losses_by_context`).
        bytes: of text that the scored tokens stand for.
        by_memory: float64 [memories], bits per byte with memory lengths of its kind, the state
            carried over whole documents.
    """

    losses: np.ndarray
    bytes: int
    by_memory: np.ndarray

    @property
    def by_context(self) -> np.ndarray:
        """Bits per byte by context, float64 [contexts]."""
        return self.losses.sum(axis=1) / math.log(2) / self.bytes


def passages_of(corpus: CorpusIndex, scope: Scope) -> Passages:
    """What is scored of a corpus.

    Raises:
        UserError: its tokenizer is not lossless, so that tokens are no bytes; or there is not
            enough text that is long enough.
    """
    if not corpus.tokenizer.lossless:
        raise UserError(f"{corpus.location}: its tokens are no bytes; take a lossless tokenizer")
    return read_passages(corpus.split(SPLIT), scope)


def measure(
    contender: Contender, corpus: CorpusIndex, passages: Passages, scope: Scope
) -> Measured:
    """Measure a trained model, unless that was done in the same way.

    Raises:
        UserError: what was measured before is damaged.
        Trouble: another process measures it.
    """
    path, kind = contender.config.run_folder / _MEASURED, contender.kind
    how = {"corpus": corpus.fingerprint, "choices": kind.choices, "window": kind.window}
    wanted = json.dumps(asdict(scope) | how | {"memories": kind.memories})
    with locked(path.parent, "measures what was trained"):
        if (kept := _kept(path, wanted)) is not None:
            return kept
        found = _measure(contender, corpus, passages, scope)
        with atomic_path(path) as partial, partial.open("wb") as file:
            np.savez(file, wanted=wanted, **vars(found))
    return found


def _kept(path: Path, wanted: str) -> Measured | None:
    """What was measured before, if it was in the way that is wanted."""
    if not path.is_file():
        return None
    content = BytesIO(path.read_bytes())
    try:
        with np.load(content) as kept:
            how, *found = (kept[name] for name in ("wanted", "losses", "bytes", "by_memory"))
    except Exception:  # whatever a damaged file leads numpy and zipfile to
        raise UserError(f"{path}: is damaged; remove it, and it is measured again") from None
    losses, size, by_memory = found
    return Measured(losses, int(size), by_memory) if str(how) == wanted else None


def _measure(
    contender: Contender, corpus: CorpusIndex, passages: Passages, scope: Scope
) -> Measured:
    kind, config = contender.kind, contender.config
    model = load_trained(config.run_folder, dict(kind.choices)).model
    losses = losses_by_context(model, passages, scope, kind.window)
    segment = config.data.segment
    held_out = HeldOut(corpus.location, SPLIT, segment, _LANES, _HELD_OUT, carried=True)
    by_memory = []
    for memory in kind.memories:
        trained = load_trained(config.run_folder, {**kind.choices, "memory_len": memory})
        by_memory.append(evaluate_split(trained, held_out, _unwatched).bits_per_byte)
    size = corpus.tokenizer.byte_lengths()[passages.scored].sum()
    return Measured(losses, int(size), np.array(by_memory, np.float64))


def _unwatched(_: int, __: int) -> None:
    pass


@torch.no_grad()
def losses_by_context(
    model: Model, passages: Passages, scope: Scope, window: int | None
) -> np.ndarray:
    """-log p of every scored token with every length of context and nothing before it.

    Args:
        model: whose results do not depend on where segments are cut.
        window: the longest context that the model can have, a multiple of the step: of a longer
            one it reads the end. None: any.

    Returns:
        float64 [contexts, tokens], nats.
    """
    steps = scope.longest // scope.step
    own = steps if window is None else min(steps, window // scope.step)
    found = np.full((steps, len(passages.scored)), math.nan)
    frozen, device = model.frozen(), next(model.parameters()).device
    for first in range(0, len(passages.windows), _WINDOWS):
        part = slice(first, first + _WINDOWS)
        windows = torch.from_numpy(passages.windows[part, : own * scope.step]).to(device)
        targets = torch.from_numpy(passages.targets[part, :own]).to(device)
        nll = _read(frozen, windows, targets).cpu().numpy()
        numbers = passages.numbers[part, :own]
        of_windows, contexts = np.nonzero(numbers >= 0)
        found[contexts, numbers[of_windows, contexts]] = nll[of_windows, contexts]
    found[own:] = found[own - 1]
    return found


def _read(model: Frozen, windows: Tensor, targets: Tensor) -> Tensor:
    """-log p of the tokens after each step of some windows.

    Args:
        windows: int64 [w, contexts * D].
        targets: int64 [w, contexts].

    Returns:
        float64 [w, contexts].
    """
    state, found = model.empty_state(len(windows)), []
    segments = windows.tensor_split(targets.shape[1], dim=1)
    for tokens, target in zip(segments, targets.T, strict=True):
        output, state = model(tokens, torch.zeros_like(tokens, dtype=torch.bool), state)
        found.append(model.nll(output[:, -1:], target[:, None]).double())
    return torch.cat(found, dim=1)
