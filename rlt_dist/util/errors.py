"""The error that a person can act on."""


class UserError(Exception):
    """A mistake that a person can correct.

    The message is one line that names the thing and says what to do. The command line prints it
    without a traceback and exits non-zero; every other exception is a defect of this project and
    keeps its traceback.
    """

    shared: bool = False
    """Raised alike on every process of a run, so one of them shows it for all."""
