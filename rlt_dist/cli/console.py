"""Where tables are printed."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def console(width: int = 160) -> "Console":
    """One that prints text as it stands: names and titles may have brackets and colons.

    Args:
        width: off a terminal, where rich assumes 80 columns, which would cut numbers and names.
    """
    from rich.console import Console

    found = Console(markup=False, emoji=False)
    return found if found.is_terminal else Console(markup=False, emoji=False, width=width)
