"""Workers: the same tasks in this process, in processes of this machine, or over MPI."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from concurrent.futures.process import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import active_children, get_context
from typing import Any, ParamSpec, TypeVar, cast

from rlt_dist.util.children import serve_parent
from rlt_dist.util.errors import UserError

P = ParamSpec("P")
R = TypeVar("R")

_PRELOAD = ["rlt_dist.data.prepare.survey", "rlt_dist.data.prepare.writer"]


class Workers:
    """An executor, and how many tasks it works on at once."""

    def __init__(self, executor: Executor, number: int) -> None:
        self._executor = executor
        self._number = number

    def run(self, task: Callable[..., R], arguments: Iterable[tuple[Any, ...]]) -> Iterator[R]:
        """Run a task for each of `arguments`; gives the results as they come, in any order.

        Few arguments are drawn ahead. An error in a task is raised here, and no further one begins.
        """
        pending: set[Future[R]] = set()
        try:
            for each in arguments:
                pending.add(self._executor.submit(task, *each))
                while len(pending) >= 2 * self._number:
                    done, pending = wait(pending, return_when=FIRST_COMPLETED)
                    yield from (future.result() for future in done)
            while pending:
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)
        finally:
            for future in pending:
                future.cancel()


@contextmanager
def local_workers(number: int, fewer: str = "on fewer cores (taskset)") -> Iterator[Workers]:
    """Workers of this machine; one is this process itself.

    Whatever passes through the context, or kills this process, ends the others at once.

    Args:
        fewer: how a person runs the same command with fewer of them, in words.

    Raises:
        UserError: a worker was killed.
    """
    if number == 1:
        yield Workers(_Here(), 1)
        return
    # A fork of this process would copy its threads' locks; a server that has imported what the
    # tasks need starts the workers quickly.
    context = get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    others = set(active_children())
    executor = ProcessPoolExecutor(number, context, initializer=serve_parent)
    try:
        yield Workers(executor, number)
    except BrokenExecutor:  # It has ended the others.
        raise UserError(
            "a worker was killed, perhaps because memory ran out; run the same command again, "
            f"{fewer} if so: what is finished is kept"
        ) from None
    except BaseException:
        for process in set(active_children()) - others:
            process.terminate()
        raise
    finally:
        executor.shutdown(cancel_futures=True)


@contextmanager
def mpi_workers() -> Iterator[Workers | None]:
    """On rank 0 the other ranks as workers; on these None, after they have worked.

    Raises:
        UserError: there is no MPI, or a world of one process only.
    """
    try:
        from mpi4py import MPI
        from mpi4py.futures import MPICommExecutor
    except (ImportError, RuntimeError):  # RuntimeError: mpi4py finds no library
        raise UserError("--mpi needs mpi4py and an MPI library: pip install '.[mpi]'") from None
    world = MPI.COMM_WORLD
    if world.size == 1:
        raise UserError(
            "--mpi: this is a world of one process; start several, as launch/prepare_mpi.sh does"
        )
    with MPICommExecutor(world, root=0) as executor:
        yield Workers(cast(Executor, executor), world.size - 1) if executor else None


class _Here(Executor):
    """Runs every task when it is given."""

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Run it now."""
        future: Future[R] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future
