"""Sums over processes, and errors that all of them see."""

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rlt_dist.mesh.line import Line
from rlt_dist.mesh.world import World
from rlt_dist.util.errors import Trouble, UserError, disk_trouble

T = TypeVar("T")


def all_sum(values: Tensor, line: Line) -> Tensor:
    """The element-wise sum over the line's processes, on every one of them."""
    total = values.clone()
    line.all_reduce(total)
    return total


def sum_all(tensors: Iterable[Tensor], line: Line) -> None:
    """Replace tensors by their sums over the line, in one message per dtype."""
    if line.size == 1:
        return
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for alike in by_dtype.values():
        flat = torch.cat([tensor.flatten() for tensor in alike])
        line.all_reduce(flat)
        for tensor, part in zip(alike, flat.split([t.numel() for t in alike]), strict=True):
            tensor.copy_(part.view_as(tensor))


def together(world: World, action: Callable[[], T]) -> T:
    """Do something on every process; a mistake or a full disk on one is raised on all.

    Raises:
        UserError: the first failing rank's, with its rank; marked as shared, since every process
            raises it and only one need show it.
    """
    result, error = _attempt(world, action)
    errors: list[UserError | None] = [None] * world.size
    dist.all_gather_object(errors, error, group=world.group)
    for found in errors:
        if found is not None:
            raise _shared(found)
    return result  # type: ignore[return-value]


def everyones(world: World, action: Callable[[], T]) -> list[T]:
    """Do something on every process; each gets all results, by rank. Errors as in `together`."""
    outcomes: list[tuple[T | None, UserError | None]] = [(None, None)] * world.size
    dist.all_gather_object(outcomes, _attempt(world, action), group=world.group)
    for _, error in outcomes:
        if error is not None:
            raise _shared(error)
    return [result for result, _ in outcomes]  # type: ignore[misc]


def on_leader(world: World, action: Callable[[], T]) -> T:
    """Do something on the leading process only; all get its result, or its error."""
    outcome: list[tuple[T | None, UserError | None]] = [(None, None)]
    if world.leads:
        outcome = [_attempt(world, action)]
    dist.broadcast_object_list(outcome, src=0, group=world.group)
    result, error = outcome[0]
    if error is not None:
        raise _shared(error)
    return result  # type: ignore[return-value]


def _attempt(world: World, action: Callable[[], T]) -> tuple[T | None, UserError | None]:
    """The result, or a mistake with the rank whose it is."""
    try:
        return action(), None
    except UserError as error:
        kind, message = Trouble if isinstance(error, Trouble) else UserError, str(error)
    except OSError as error:
        trouble = disk_trouble(error)
        if trouble is None:
            raise
        kind, message = Trouble, trouble
    return None, kind(f"{world.name}: {message}" if world.size > 1 else message)


def _shared(error: UserError) -> UserError:
    error.shared = True
    return error
