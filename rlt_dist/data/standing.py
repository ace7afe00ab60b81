"""How far a long piece of work on a corpus has come."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Standing:
    """How far a stage has come; `tokens` counts those written by this start."""

    stage: str
    bytes_read: int
    bytes_total: int
    documents: int
    tokens: int


Watch = Callable[[Standing], None]
