"""How bytes come from another machine: one attempt, and whether another is worth it.

http(s) is read by the standard library, whose answers show what a transfer that goes on after a cut
needs: status, range and length, and a time-out on the bytes. Every other protocol is fsspec's.
"""

import errno
import re
import ssl
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse, InvalidURL
from threading import Thread
from typing import Any, Protocol, TypeVar
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import fsspec

from rlt_dist.util.errors import UserError

T = TypeVar("T")

_PIECE = 1 << 20
_STORE_PIECE = 4 << 20
"""An object store answers each piece by a request of its own."""

_GONE = (404, 410)
_PASSING = (408, 425, 429)
_NO_HEAD = (405, 501)
_LASTING = (
    *(FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError),
    *(InvalidURL, ssl.CertificateError),
)


class IncompleteError(Exception):
    """What came is not the file; the next attempt may bring it."""


class RefusedError(Exception):
    """The source has a reason of its own, such as missing credentials."""


FAILURES = (OSError, HTTPException, IncompleteError, RefusedError)
"""All that a failed attempt raises."""


@dataclass(frozen=True)
class Body:
    """What an attempt brings.

    Attributes:
        begin: where in the file the first byte lies.
        size: bytes of the whole file, as the source says; None: it does not say.
        pieces: the bytes from `begin` on, as they come.
    """

    begin: int
    size: int | None
    pieces: Iterator[bytes]


class Source(Protocol):
    """A way to read addresses. What fails raises one of `FAILURES`."""

    def body(self, address: str, begin: int) -> AbstractContextManager[Body]:
        """A file's bytes, from byte `begin` on if that can be had, else from the first."""

    def size(self, address: str) -> int | None:
        """A file's size in bytes; None: the source does not say."""


class Http:
    """http and https; proxies are those of the environment."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout

    @contextmanager
    def body(self, address: str, begin: int, method: str = "GET") -> Iterator[Body]:
        """A file's bytes; a server that knows no ranges sends them from the first."""
        headers = {"Range": f"bytes={begin}-"} if begin else {}
        request = Request(address, headers=headers, method=method)
        with urlopen(request, timeout=self._timeout) as answer:
            yield Body(*_extent(answer), iter(lambda: answer.read1(_PIECE), b""))

    def size(self, address: str) -> int | None:
        """A file's size in bytes, by its headers alone."""
        for method in ("HEAD", "GET"):
            try:
                with self.body(address, 0, method) as body:
                    return body.size
            except HTTPError as error:
                if method == "GET" or error.code not in _NO_HEAD:
                    raise
        return None


def _extent(answer: HTTPResponse) -> tuple[int, int | None]:
    """Where the answer begins, and how long the whole file is."""
    if answer.status == 206:
        found = re.match(r"bytes (\d+)-\d+/(\d+|\*)$", answer.headers.get("Content-Range", ""))
        if not found:
            raise IncompleteError("the server answers with a part that it does not name")
        return int(found[1]), None if found[2] == "*" else int(found[2])
    length = answer.headers.get("Content-Length", "")
    encoded = answer.headers.get("Content-Encoding", "identity") != "identity"
    return 0, int(length) if length.isdecimal() and not encoded else None


class Store:
    """Whatever fsspec reads. Each call has a time-out of our own: file systems differ in theirs."""

    def __init__(self, location: str, timeout: float) -> None:
        """Raises UserError: the protocol is unknown, or its package is not installed."""
        protocol = location.partition("://")[0].rpartition("::")[2]
        try:
            fsspec.get_filesystem_class(protocol)
        except ImportError as error:
            raise UserError(f"{location}: cannot be opened: {_in_words(error)}") from None
        except ValueError:
            raise UserError(
                f"{location}: protocol {protocol!r} is unknown; give a folder, or an address that "
                f"begins with http://, https://, s3://, gs:// or another of fsspec's protocols"
            ) from None
        self._timeout = timeout

    @contextmanager
    def body(self, address: str, begin: int) -> Iterator[Body]:
        """A file's bytes from `begin` on."""
        system, path = self._open(address)
        size = self._within(lambda: system.size(path))
        handle = self._within(
            lambda: system.open(path, "rb", block_size=_STORE_PIECE, cache_type="none")
        )
        with handle:
            handle.seek(begin)
            pieces = iter(lambda: self._within(lambda: handle.read(_STORE_PIECE)), b"")
            yield Body(begin, size, pieces)

    def size(self, address: str) -> int | None:
        """A file's size in bytes."""
        system, path = self._open(address)
        return self._within(lambda: system.size(path))

    def _open(self, address: str) -> tuple[Any, str]:
        # Not kept: fsspec keeps them itself, one for each process, forked ones too.
        return self._within(lambda: fsspec.core.url_to_fs(address))

    def _within(self, call: Callable[[], T]) -> T:
        """What `call` gives; TimeoutError if it takes too long, and then it is left to itself."""
        outcome: Future[T] = Future()

        def run() -> None:
            try:
                outcome.set_result(call())
            except OSError as error:
                outcome.set_exception(error)
            except Exception as error:
                outcome.set_exception(RefusedError(_in_words(error)))

        Thread(target=run, daemon=True).start()
        return outcome.result(self._timeout)


def open_source(location: str, timeout: float) -> Source:
    """What reads addresses that begin with `location`; `timeout` in seconds without a byte.

    Raises:
        UserError: its protocol is unknown, or the protocol's package is not installed.
    """
    if location.startswith(("http://", "https://")):
        return Http(timeout)
    return Store(location, timeout)


def may_pass(error: BaseException) -> bool:
    """Whether a failed attempt is worth another."""
    error = _reason(error)
    if isinstance(error, HTTPError):
        return error.code >= 500 or error.code in _PASSING
    if isinstance(error, _LASTING):
        return False
    return isinstance(error, IncompleteError | OSError | HTTPException)


def is_missing(error: BaseException) -> bool:
    """Whether the source says that there is no such file."""
    if isinstance(error, HTTPError):
        return error.code in _GONE
    return isinstance(error, FileNotFoundError)


def describe(error: BaseException) -> str:
    """What went wrong, in a few words on one line."""
    error = _reason(error)
    if isinstance(error, HTTPError):
        return f"HTTP {error.code} {error.reason}"
    if isinstance(error, TimeoutError):
        return "no byte came in time"
    if isinstance(error, OSError) and error.errno in errno.errorcode and error.strerror:
        return error.strerror
    return _in_words(error)


def _reason(error: BaseException) -> BaseException:
    """What lies under urllib's error."""
    if isinstance(error, URLError) and isinstance(error.reason, BaseException):
        return error.reason
    return error


def _in_words(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
