"""Compile the loop for this machine, once; later processes find it in the user's cache.

The library's name holds a hash of the sources, the compiler with its flags, and the processor's
instruction set, and it is renamed into place when it is whole: processes that compile at once do no
harm, and one that is killed leaves nothing that another would wait for.
"""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

from rlt_dist.util.errors import UserError
from rlt_dist.util.files import fsync_folder

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
        UserError: it cannot be compiled or loaded here; the message says why.
    """
    flags = [*_FLAGS, *_MACHINE.get(platform.machine(), [])]
    try:
        command = [*compiler(), *flags]
        path = _cache() / f"{source.stem}-{_fingerprint(source, command)}.so"
        if not _is_whole(path):
            _compile(source, command, path)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"the native recurrence cannot be compiled: {error}") from None
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise UserError(
            f"the compiled recurrence cannot be loaded: {error}; let XDG_CACHE_HOME name a folder "
            "whose files may be executed"
        ) from None


def compiler() -> list[str]:
    """The words of CXX, the first of them as a path.

    Raises:
        UserError: there is none.
    """
    try:
        words = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    except ValueError as error:
        raise UserError(f"CXX: {error}") from None
    program = shutil.which(words[0])
    if program is None:
        raise UserError(
            f"the native recurrence needs a C++ compiler to be compiled, and {words[0]} is not "
            "found: install g++, or set CXX"
        )
    return [program, *words[1:]]


def _compile(source: Path, command: list[str], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        done = subprocess.run(
            [*command, f"-I{_FOLDER}", str(source), "-o", str(made)],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
            # A launcher that asks this process's group to stop would end the compiler at once.
            start_new_session=True,
        )
        if done.returncode:
            silent = f"exit status {done.returncode} without a message"
            reason = next(iter(done.stderr.strip().splitlines()), silent)
            raise UserError(f"{command[0]} cannot compile the native recurrence: {reason}")
        digest = hashlib.sha256(made.read_bytes()).digest()
        with made.open("ab") as file:
            file.write(digest)
            file.flush()
            os.fsync(file.fileno())
        made.replace(path)
    fsync_folder(path.parent)


def _is_whole(path: Path) -> bool:
    """Whether a library is there and ends in the digest of all before, as it was written.

    A loader takes no notice of what follows the library, nor of what is missing at its end: one
    that a full disk or a power cut left truncated kills the process that calls it.
    """
    if not path.is_file():
        return False
    content = path.read_bytes()
    end = len(content) - hashlib.sha256().digest_size
    return end > 0 and hashlib.sha256(content[:end]).digest() == content[end:]


def _cache() -> Path:
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "rlt_dist"
    try:
        return Path.home() / ".cache" / "rlt_dist"
    except RuntimeError:  # no HOME, and a user that the system does not know
        return _temporary_cache()


def _temporary_cache() -> Path:
    """A folder that only this user can have written to: what lies in it is run."""
    folder = Path(tempfile.gettempdir()) / f"rlt_dist-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    facts = folder.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & 0o077:
        raise UserError(
            f"{folder}: libraries are not kept in a folder that others may write or own; "
            "set HOME or XDG_CACHE_HOME"
        )
    return folder


def _fingerprint(source: Path, command: list[str]) -> str:
    """Of what is compiled, by whom, and for which processor: a home may serve unlike machines."""
    program, *words = command
    digest = hashlib.sha256(shlex.join([str(Path(program).resolve()), *words]).encode())
    version = subprocess.run(
        [*command, "--version"], capture_output=True, timeout=_SECONDS, check=False
    )
    digest.update(version.stdout)
    for file in (source, *_HEADERS):
        digest.update(file.read_bytes())
    digest.update(_processor().encode())
    return digest.hexdigest()[:16]


def _processor() -> str:
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.is_file() else []
    kind = [line for line in lines if line.startswith(("flags", "Features"))][:1]
    return f"{platform.machine()} {platform.processor()} {kind}"
