"""The error that a person can act on."""

import errno

FULL = (errno.ENOSPC, errno.EDQUOT)
"""Of a disk that has no room."""
_DISK = (*FULL, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR)


class UserError(Exception):
    """A mistake that a person can correct.

    The message is one line that names the thing and says what to do. The command line prints it
    without a traceback and exits non-zero; every other exception is a defect of this project and
    keeps its traceback.
    """

    shared: bool = False
    """Raised alike on every process of a run, so it is no single rank's."""
    guard: bool = False
    """The guard has stopped the run."""


class Trouble(UserError):
    """One that comes from a disk, a network or another machine.

    It may pass without a person, so a job tries again; every other mistake would only be repeated.
    """


def disk_trouble(error: OSError) -> str | None:
    """One line for a disk that is full or may not be written; None for any other error."""
    if error.errno not in _DISK:
        return None
    where = f"{error.filename}: " if error.filename else ""
    advice = "make room" if error.errno in FULL else "check who may read and write there"
    return f"{where}{error.strerror}; {advice}"


def one_line(error: BaseException) -> str | None:
    """What a person is told of an error that a person can act on; None for a defect."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError):
        return disk_trouble(error)
    if isinstance(error, RuntimeError) and "can't allocate memory" in str(error):
        return "this does not fit into memory; take a smaller model, segment or micro_batch"
    return None
