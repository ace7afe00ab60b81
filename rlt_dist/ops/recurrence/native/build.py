"""Compile the loop for this machine, once; later processes find it in the user's cache.

The library's name holds a hash of the sources, the flags and the processor's instruction set, and
it is renamed into place when it is whole: processes that compile at once do no harm, and one that
is killed leaves nothing that another would wait for.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

from rlt_dist.util.errors import UserError

_FOLDER = Path(__file__).parent
_LOOP = _FOLDER / "segment.cpp"
_HEADERS = [_FOLDER / name for name in ("layer.h", "kernels.h")]
# No -ffast-math: linked in, it would set flush-to-zero for the whole process.
_FLAGS = ["-O3", "-std=c++17", "-fPIC", "-shared", "-pthread", "-fno-math-errno"]
_FLAGS += ["-fno-trapping-math"]
_MACHINE = {"x86_64": ["-march=native"], "aarch64": ["-mcpu=native"]}
_SECONDS = 300


@lru_cache
def library(source: Path = _LOOP) -> ctypes.CDLL:
    """The compiled loop, or another source that includes its headers.

    Raises:
        UserError: it cannot be compiled here; the message says why.
    """
    flags = [*_FLAGS, *_MACHINE.get(platform.machine(), [])]
    path = _cache() / f"{source.stem}-{_fingerprint(source, flags)}.so"
    if not path.is_file():
        _compile(source, flags, path)
    return ctypes.CDLL(str(path))


def _compile(source: Path, flags: list[str], path: Path) -> None:
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise UserError("the native recurrence needs a C++ compiler: install g++, or set CXX")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            command = [compiler, *flags, f"-I{_FOLDER}", str(source), "-o", str(made)]
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_SECONDS, check=False
            )
            if done.returncode:
                reason = next(iter(done.stderr.strip().splitlines()), "no message")
                raise UserError(f"{compiler} cannot compile the native recurrence: {reason}")
            made.replace(path)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"the native recurrence cannot be compiled: {error}") from None


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "rlt_dist"


def _fingerprint(source: Path, flags: list[str]) -> str:
    """Of what is compiled, and for which processor: a home folder may serve unlike machines."""
    digest = hashlib.sha256(" ".join(flags).encode())
    for file in (source, *_HEADERS):
        digest.update(file.read_bytes())
    digest.update(_processor().encode())
    return digest.hexdigest()[:16]


def _processor() -> str:
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.is_file() else []
    kind = [line for line in lines if line.startswith(("flags", "Features"))][:1]
    return f"{platform.machine()} {platform.processor()} {kind}"
