"""Lists of numbers, as options give them."""

from rlt_dist.util.errors import UserError

MAX_SEED = 2**63 - 1
"""The largest that every generator of random numbers takes."""


def parse_numbers(option: str, text: str, least: int) -> tuple[int, ...]:
    """The numbers of `--option 0,1,2`, each once.

    Raises:
        UserError: one is no whole number, or less than the least there may be.
    """
    try:
        numbers = tuple(dict.fromkeys(int(number) for number in text.split(",")))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < least:
        raise UserError(f"--{option} {text}: give numbers from {least} on, such as 1,2,4")
    return numbers
