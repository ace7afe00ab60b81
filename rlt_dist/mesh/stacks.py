"""Where a process is: every thread's Python stack, and whether it waits for others."""

import faulthandler
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

_WAITING = ("torch/distributed/distributed_c10d.py", "rlt_dist/parallel/execute/channel.py")
"""Files whose functions wait for other ranks."""
_OWN = "/rlt_dist/"
_SAVER, _FUTURE = "rlt_dist/checkpoint/saver.py", "concurrent/futures/_base.py"
"""Files of which both are on the stack that waits for the saver's thread, whose name begins so:"""
_SAVERS_THREAD = "saver"


@dataclass(frozen=True)
class Where:
    """What a process is at.

    Attributes:
        waits: in a collective, or for another stage's message.
        place: the innermost line of this project, and of what it calls, in words.
    """

    waits: bool
    place: str


def where() -> Where:
    """What this process's main thread is at, or the saver's, where the main one waits for it."""
    frames = _frames(threading.main_thread())
    if _passes(frames, _SAVER) and _passes(frames, _FUTURE):
        every = threading.enumerate()
        saver = next((each for each in every if each.name.startswith(_SAVERS_THREAD)), None)
        frames = _frames(saver) if saver else frames
    if not frames:
        return Where(False, "no Python code")
    waits = _passes(frames, *_WAITING)
    own = next((frame for frame in frames if _OWN in _file(frame)), frames[0])
    inside = "" if own is frames[0] else f", in {frames[0].f_code.co_name}"
    return Where(waits, f"{_short(own)}{inside}")


def write_stacks(path: Path) -> None:
    """Write every thread's Python stack to a file, whatever the threads are at."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        faulthandler.dump_traceback(file, all_threads=True)


def _frames(thread: threading.Thread) -> list[FrameType]:
    """A thread's frames, the innermost first."""
    frame, frames = sys._current_frames().get(thread.ident or 0), []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def _passes(frames: list[FrameType], *files: str) -> bool:
    return any(_file(frame).endswith(files) for frame in frames)


def _file(frame: FrameType) -> str:
    return frame.f_code.co_filename


def _short(frame: FrameType) -> str:
    """`train/step.py:67 (train_step)`."""
    *_, name = _file(frame).rpartition(_OWN)
    return f"{name}:{frame.f_lineno} ({frame.f_code.co_name})"
