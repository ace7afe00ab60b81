"""All tasks, by the names that commands give them."""

from collections.abc import Callable, Mapping

from rlt_dist.tasks.arithmetic import Addition, Modular
from rlt_dist.tasks.automata import five_state, parity, s5, s5_by_swaps
from rlt_dist.tasks.task import Task

TASKS: Mapping[str, Callable[[], Task]] = {
    "parity": parity,
    "five_state": five_state,
    "s5_swaps": s5_by_swaps,
    "s5": s5,
    "mod5": lambda: Modular(brackets=False),
    "mod5_brackets": lambda: Modular(brackets=True),
    "addition": Addition,
}
