"""An http server whose answers go wrong as a test wishes.

A fault is given for a file's next requests, one each:

    404, 403, 429, 500, ...     this status
    ("cut", n)                  the connection ends after n bytes
    ("stall", n)                nothing comes after n bytes, until the server is released
    ("slow", s)                 ten pieces, s seconds apart
    ("flip", n)                 byte n is another one
    ("size", n)                 n bytes, and the headers say so
    ("chunked", n)              n bytes, and no header tells how many
    "range"                     the part that is sent is another one than was asked for
    "no-head"                   a HEAD request is not allowed
"""

import re
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

Fault = int | str | tuple[str, float] | None


class Server(ThreadingHTTPServer):
    """Serves a folder on a free port of this machine."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.ranges = True
        self.faults: dict[str, deque[Fault]] = defaultdict(deque)
        self.heads: dict[str, deque[Fault]] = defaultdict(deque)
        self.requests: list[tuple[str, str, int]] = []
        self.stalled = threading.Semaphore(0)
        self.released = threading.Event()
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def fail(self, name: str, *faults: Fault) -> None:
        """The file's next requests go wrong like this."""
        self.faults[name].extend(faults)

    def gets(self, name: str) -> list[int]:
        """The first byte asked for, of each time a file was."""
        return [begin for method, asked, begin in self.requests if (method, asked) == ("GET", name)]

    def handle_error(self, *_: object) -> None:
        """A client that goes away is what the tests are about."""

    def stop(self) -> None:
        self.released.set()
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        name = self.path.lstrip("/")
        asked = re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))
        begin = int(asked[1]) if asked else 0
        self.server.requests.append((self.command, name, begin))
        faults = (self.server.heads if self.command == "HEAD" else self.server.faults)[name]
        fault = faults.popleft() if faults else None
        kind, value = fault if isinstance(fault, tuple) else (fault, 0)
        file = self.server.folder / name
        if isinstance(fault, int) or not file.is_file():
            self.send_error(fault if isinstance(fault, int) else 404)
        elif kind == "no-head":
            self.send_error(405)
        else:
            self._send(file.read_bytes(), begin, kind, value)

    do_HEAD = do_GET

    def _send(self, content: bytes, begin: int, kind: Any, value: Any) -> None:
        if kind in ("size", "chunked"):
            content = content[:value].ljust(value, b"\0")
        if kind == "flip":
            content = content[:value] + bytes([content[value] ^ 1]) + content[value + 1 :]
        if begin and self.server.ranges:
            begin += kind == "range"
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {begin}-{len(content) - 1}/{len(content)}")
            body = content[begin:]
        else:
            self.send_response(200)
            body = content
        if kind != "chunked":
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self._write(body, kind, value)

    def _write(self, body: bytes, kind: Any, value: Any) -> None:
        pause: Callable[[float], object] = self.server.released.wait
        if kind in ("cut", "stall"):
            self.wfile.write(body[:value])
        if kind == "stall":
            self.server.stalled.release()
            pause(60)
        elif kind == "slow":
            each = -(-len(body) // 10)
            for place in range(0, len(body), each):
                self.wfile.write(body[place : place + each])
                pause(value)
        elif kind != "cut":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing: the server keeps its own list."""
