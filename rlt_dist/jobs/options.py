"""Options of sbatch, as a person writes them: `--qos=high`, `--qos high`, `-q high`, `-qhigh`."""

from collections.abc import Iterator, Sequence

_ONCE = {
    *("--array", "-a", "--begin", "-b", "--deadline", "--dependency", "-d", "--hold", "-H"),
    *("--wait", "-W"),
}
"""They are about one submission, and do not hold for a later one of the same run."""
_OURS = {"--array": "--array", "-a": "--array", "--nodes": "--nodes", "-N": "--nodes"}
"""What the mesh or the job folders follow from, by all names."""


def grouped(words: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Every option with its value, be it one word or two."""
    group: tuple[str, ...] = ()
    for word in words:
        if word.startswith("-") and group:
            yield group
            group = ()
        group += (word,)
    if group:
        yield group


def name_of(group: tuple[str, ...]) -> str:
    """An option's name: `--qos`, `-q`."""
    word = group[0]
    return word.partition("=")[0] if word.startswith("--") else word[:2]


def value_of(words: Sequence[str], *names: str) -> str | None:
    """The value of an option that has these names, the last one given."""
    found = None
    for group in grouped(words):
        if name_of(group) in names:
            word, *rest = group
            attached = word.partition("=")[2] if word.startswith("--") else word[2:]
            found = attached or " ".join(rest)
    return found


def has(words: Sequence[str], *names: str) -> bool:
    """Whether an option is given."""
    return any(name_of(group) in names for group in grouped(words))


def split(words: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The options that hold for a run's later submissions, too, and those that do not."""
    groups = list(grouped(words))
    lasting = (word for group in groups if name_of(group) not in _ONCE for word in group)
    once = (word for group in groups if name_of(group) in _ONCE for word in group)
    return tuple(lasting), tuple(once)


def merged(before: Sequence[str], now: Sequence[str]) -> tuple[str, ...]:
    """Options of an earlier submission, but for those that are given anew."""
    anew = {name_of(group) for group in grouped(now)}
    kept = (word for group in grouped(before) if name_of(group) not in anew for word in group)
    return (*kept, *now)


def misplaced(words: Sequence[str]) -> str | None:
    """An option of sbatch that this project has to know of, by its long name; None: none is."""
    found = (_OURS.get(name_of(group)) for group in grouped(words))
    return next((name for name in found if name), None)
