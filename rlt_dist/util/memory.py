"""How much memory a process takes, as the kernel counts it."""

import re
from contextlib import suppress
from pathlib import Path

_STATUS = Path("/proc/self/status")


def forget_peak() -> bool:
    """Take what is resident now for the peak so far; whether the kernel lets the process."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): VmHWM becomes VmRSS
        return True
    return False


def peak_resident() -> int:
    """The most bytes that were resident at a time (VmHWM); 0 where the kernel does not say."""
    return _of("VmHWM")


def resident() -> int:
    """Bytes that are resident (VmRSS); 0 where the kernel does not say."""
    return _of("VmRSS")


def _of(name: str) -> int:
    with suppress(OSError):
        found = re.search(rf"{name}:\s+(\d+) kB", _STATUS.read_text())
        return int(found[1]) * 1024 if found else 0
    return 0
