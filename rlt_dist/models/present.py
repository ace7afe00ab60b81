"""Pieces of a model that a pipeline stage may be without."""

from typing import TypeVar

from torch import nn

M = TypeVar("M", bound=nn.Module)


def present(piece: M | None) -> M:
    """A piece that must be here.

    Raises:
        RuntimeError: it is on another pipeline stage.
    """
    if piece is None:
        raise RuntimeError("this piece of the model is on another pipeline stage")
    return piece
