"""A corpus on another machine: its files are brought here as they are wanted, and kept."""

import hashlib
import os
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Lock, Thread
from typing import TypeVar

from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception,
    stop_after_attempt,
    wait_exponential,
    wait_random,
)

from rlt_dist.data.corpus.cache import Cache, Write
from rlt_dist.data.corpus.storage import REPAIR, BadShard, File, RemoteOptions, size_problem
from rlt_dist.data.corpus.transfer import (
    FAILURES,
    IncompleteError,
    Source,
    describe,
    is_missing,
    may_pass,
    open_source,
)
from rlt_dist.util.errors import Trouble, UserError
from rlt_dist.util.log import warn

T = TypeVar("T")

_LONGEST_WAIT = 60.0
_CHECKS_AT_ONCE = 32
_PREFETCHES_AT_ONCE = 4


class RemoteFolder:
    """A folder that fsspec or http(s) reads, with a cache on this machine."""

    def __init__(self, location: str, options: RemoteOptions) -> None:
        """Nothing is read yet.

        Raises:
            UserError: the protocol is unknown, or its package is not installed.
        """
        self._location = location.rstrip("/")
        self._options = options
        self._source = open_source(self._location, options.timeout)
        self._cache = Cache(options.cache or _default_cache(), options.cache_limit)
        self._ahead = _Ahead(self.fetch)

    def __reduce__(self) -> tuple[type["RemoteFolder"], tuple[str, RemoteOptions]]:
        """Another process opens it itself."""
        return RemoteFolder, (self._location, self._options)

    @property
    def location(self) -> str:
        """The folder's address."""
        return self._location

    def address(self, name: str) -> str:
        """The file's address."""
        return f"{self._location}/{name}"

    def read(self, name: str) -> bytes:
        """A small file's content, always from the source."""
        address = self.address(name)

        def attempt() -> bytes:
            with self._source.body(address, 0) as body:
                content = b"".join(body.pieces)
            if body.size not in (None, len(content)):
                raise _cut(len(content), body.size)
            return content

        try:
            return self._patiently(address, attempt)
        except _MissingError:
            raise UserError(
                f"{address}: no such file; give the address of a prepared corpus"
            ) from None

    def fetch(self, name: str, size: int, sha256: str) -> Path:
        """The file's copy in the cache, brought here if it is not there."""
        if not self._cache.use(sha256, size):
            address = self.address(name)
            with self._cache.adding(sha256, size) as write:
                if write:
                    transfer = _Transfer(self._source, address, size, sha256, write)
                    self._patiently(address, transfer.attempt)
        return self._cache.path(sha256)

    def prefetch(self, name: str, size: int, sha256: str) -> None:
        """Fetch the file in the background; `fetch` waits for one that is under way."""
        if not self._cache.use(sha256, size):
            self._ahead.add((name, size, sha256))

    def check(self, name: str, size: int) -> None:
        """See that the file is at the source and of the right size, if the source tells sizes."""
        if problem := self._problem(name, size):
            raise BadShard(problem)

    def check_all(self, files: Collection[File]) -> dict[str, str]:
        """See to every file, many at once; a copy in the cache is as good as the source."""
        wanted = [
            (name, size) for name, size, sha256 in files if not self._cache.holds(sha256, size)
        ]
        with ThreadPoolExecutor(_CHECKS_AT_ONCE) as threads:
            problems = list(threads.map(lambda file: self._problem(*file), wanted))
        return {
            name: problem for (name, _), problem in zip(wanted, problems, strict=True) if problem
        }

    def discard(self, sha256: str) -> str:
        """Remove the copy from the cache."""
        self._cache.drop(sha256)
        return "its copy in the cache is removed: start again; if that fails, it is the source's"

    def _problem(self, name: str, size: int) -> str | None:
        address = self.address(name)
        try:
            actual = self._patiently(address, lambda: self._source.size(address))
        except _MissingError as error:
            return str(error)
        return None if actual is None else size_problem(address, actual, size)

    def _patiently(self, address: str, attempt: Callable[[], T]) -> T:
        """What `attempt` gives, tried again after failures that may pass."""
        options = self._options

        def tell(state: RetryCallState) -> None:
            error = state.outcome and state.outcome.exception()
            assert error and state.next_action
            attempt, wait = state.attempt_number + 1, state.next_action.sleep
            warn(
                f"{address}: {describe(error)}; attempt {attempt} of {options.attempts} "
                f"in {wait:.1f} s"
            )

        retrying = Retrying(
            stop=stop_after_attempt(options.attempts),
            wait=wait_exponential(options.first_wait, max=_LONGEST_WAIT)
            + wait_random(0, options.first_wait),  # Not all readers at the same moment.
            retry=retry_if_exception(may_pass),
            before_sleep=tell,
            reraise=True,
        )
        try:
            return retrying(attempt)
        except FAILURES as error:
            if is_missing(error):
                raise _MissingError(f"{address}: this shard file is missing; {REPAIR}") from None
            tried = retrying.statistics["attempt_number"]
            count = f"after {tried} attempts " if tried > 1 else ""
            kind = Trouble if may_pass(error) else UserError
            raise kind(
                f"{address}: cannot be read {count}({describe(error)}); see that the address is "
                f"right and can be reached from here, then start again"
            ) from error


class _MissingError(BadShard):
    """The source says that there is no such file."""


class _Transfer:
    """One file on its way into the cache; each attempt goes on where the last was cut."""

    def __init__(self, source: Source, address: str, size: int, sha256: str, write: Write) -> None:
        self._source = source
        self._address = address
        self._size = size
        self._sha256 = sha256
        self._write = write
        self._wrong = 0
        self._begin_again()

    def attempt(self) -> None:
        """Bring what is missing, and hold the whole to its size and hash."""
        with self._source.body(self._address, self._came) as body:
            if body.size not in (None, self._size):
                raise BadShard(size_problem(self._address, body.size, self._size))
            if body.begin != self._came:
                self._begin_again()
            if body.begin != self._came:
                raise IncompleteError(f"the server sends from byte {body.begin} on")
            for piece in body.pieces:
                self._take(piece)
        if self._came < self._size:
            raise _cut(self._came, self._size)
        if self._digest.hexdigest() != self._sha256:
            self._refuse()

    def _begin_again(self) -> None:
        self._came = 0
        self._digest = hashlib.sha256()

    def _take(self, piece: bytes) -> None:
        if self._came + len(piece) > self._size:
            raise BadShard(
                f"{self._address}: holds more than the {self._size} bytes that the index says; "
                f"{REPAIR}"
            )
        self._write(piece, self._came)
        self._digest.update(piece)
        self._came += len(piece)

    def _refuse(self) -> None:
        self._begin_again()
        self._wrong += 1
        if self._wrong == 2:
            raise BadShard(
                f"{self._address}: its SHA-256 is not the index's, twice: it was replaced or "
                f"damaged at its source; {REPAIR}"
            )
        raise IncompleteError("its SHA-256 is not the index's")


class _Ahead:
    """A few threads that fetch ahead while there is something to fetch.

    The process does not wait for them at its end, and a child that is forked has none.
    """

    def __init__(self, fetch: Callable[[str, int, str], Path]) -> None:
        self._fetch = fetch
        self._begin()

    def add(self, file: File) -> None:
        """Fetch a file in one of the threads."""
        if self._process != os.getpid():
            self._begin()
        with self._lock:
            self._waiting.append(file)
            if self._running < _PREFETCHES_AT_ONCE:
                self._running += 1
                Thread(target=self._work, daemon=True).start()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._lock = Lock()
        self._waiting: deque[File] = deque()
        self._running = 0

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._running -= 1
                    return
                file = self._waiting.popleft()
            with suppress(Exception):  # Whoever fetches the file meets the error himself.
                self._fetch(*file)


def _cut(came: int, size: int | None) -> IncompleteError:
    return IncompleteError(f"cut after {came} of {size} bytes")


def _default_cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "rlt_dist" / "shards"
