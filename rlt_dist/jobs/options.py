"""Options of sbatch, as a person writes them: `--qos=high`, `--qos high`, `-q high`, `-qhigh`."""

from collections.abc import Iterator, Sequence

_ONCE = ("--array", "-a", "--begin", "-b", "--deadline", "--dependency", "-d", "--hold", "-H")
"""They are about one submission, and do not hold for a later one of the same run."""
_BEFORE = "give rlt-dist's own {}, before any --"
_LOGS = "`rlt-dist logs` shows what it prints, and -f waits for its end"
_ATTEMPTS = "--attempts 1 gives it up after a start without a new checkpoint"
_OURS = {
    **dict.fromkeys(("--array", "-a"), _BEFORE.format("--array")),
    **dict.fromkeys(("--nodes", "-N"), _BEFORE.format("--nodes")),
    **dict.fromkeys(
        ("--gpus-per-node", "--gpus", "-G", "--gpus-per-task", "--gpus-per-socket", "--gres"),
        _BEFORE.format("--gpus-per-node"),
    ),
    **dict.fromkeys(
        ("--ntasks-per-node", "--tasks-per-node", "--ntasks-per-gpu"),
        _BEFORE.format("--processes-per-node or --gpus-per-node"),
    ),
    "--signal": _BEFORE.format("--lead"),
    "--test-only": _BEFORE.format("--dry-run"),
    "--no-requeue": _ATTEMPTS,
    "--wrap": "--template gives it another job script",
    **dict.fromkeys(("--clusters", "-M"), "submit from a machine of that cluster"),
    **dict.fromkeys(("--output", "-o", "--error", "-e", "--open-mode", "--wait", "-W"), _LOGS),
}
"""What a job's folder, its mesh and its end follow from, by all names, and what to do instead."""
_AT_END = ("afterany", "afterok", "afternotok", "aftercorr")
"""Conditions of `--dependency` that hold once a job has ended, and is not requeued."""


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
    return (*without(before, *(name_of(group) for group in grouped(now))), *now)


def without(words: Sequence[str], *names: str) -> tuple[str, ...]:
    """Options but for those that have these names."""
    return tuple(word for group in grouped(words) if name_of(group) not in names for word in group)


def misplaced(words: Sequence[str]) -> str | None:
    """What is wrong with an option of sbatch that contradicts our own; None: nothing with any.

    Sbatch knows a long option by its beginning, too.
    """
    for group in grouped(words):
        given = name_of(group)
        if given == "--gres" and "gpu" not in (value_of(group, given) or ""):
            continue  # Such as a disk.
        names = [name for name in _OURS if name == given or _begins(given, name)]
        if names:
            return f"{given}: rlt-dist decides on it; {_OURS[names[0]]}"
    return None


def _begins(given: str, name: str) -> bool:
    whole = given == "--ntasks"  # an option of its own
    return given.startswith("--") and name.startswith(given) and not whole


def awaited(dependency: str, task: int) -> set[str]:
    """The jobs for whose end a job with this `--dependency` waits, by id.

    Args:
        task: the job's own of its array, which waits for the same of another by `aftercorr`.
    """
    found: set[str] = set()
    for condition in dependency.split(",") if "?" not in dependency else ():  # ?: one is enough
        kind, *ids = condition.split(":")
        if kind in _AT_END:
            found |= {f"{job_id}_{task}" if kind == "aftercorr" else job_id for job_id in ids}
    return found
