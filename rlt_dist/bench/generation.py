"""Generation without end: what a token costs, and what its state takes, as text grows longer."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from statistics import median

import torch

from rlt_dist.inference.load import Trained
from rlt_dist.inference.sample import read, walk
from rlt_dist.inference.sampling import Sampling
from rlt_dist.models.state import State
from rlt_dist.util.memory import resident


@dataclass(frozen=True)
class Stretch:
    """Consecutive tokens.

    Attributes:
        tokens: read when it ended.
        seconds: median of a token.
        state_bytes: the carried state's entries.
        resident_bytes: the whole process; 0 where the kernel does not say.
    """

    tokens: int
    seconds: float
    state_bytes: int
    resident_bytes: int


def long_generation(trained: Trained, tokens: int, every: int) -> Iterator[Stretch]:
    """Generate, whatever ends a text, and measure every so many tokens."""
    model, config = trained.model.frozen(), trained.config
    first = torch.tensor([[trained.tokenizer.end_of_text]])
    with torch.no_grad():
        logits, state = read(model, config, first, None, model.empty_state(1))
    steps, done = walk(model, config, logits, state, Sampling(), seed=0), 0
    while done < tokens:
        seconds, before = list[float](), time.perf_counter()
        for step in islice(steps, min(every, tokens - done)):
            now = time.perf_counter()
            seconds.append(now - before)
            state, before = step.state, now
        done += len(seconds)
        yield Stretch(done, median(seconds), _bytes(state), resident())


def _bytes(state: State) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())
