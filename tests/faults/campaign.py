"""Kills runs of four ranks again and again, and holds each to the same run that nobody killed.

A run is killed five times, each time at another moment, and started again by the same command;
after the last it is let through to its end. Whatever is not as it should be is written down, and
the exit status is 1. The report tells who was killed when, and what was under way just then.
"""

import argparse
import ctypes
import itertools
import json
import math
import multiprocessing
import os
import random
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import megatron.core.tensor_parallel.mappings  # noqa: F401  # once, before any fork
import torch

sys.path.insert(0, str(Path(__file__).parent))

from killer import MEET, Ended, Kill, adopt_orphans, end_with_parent, one_start

from rlt_dist.checkpoint.load import load_whole, stored_tensors
from rlt_dist.checkpoint.manifest import checkpoints, read_manifest, step_of, verify
from rlt_dist.config.load import load_typed
from rlt_dist.config.run import RunConfig
from rlt_dist.data.prepare.prepare import prepare_corpus
from rlt_dist.mesh.axes import parse_axes
from rlt_dist.util.errors import UserError
from rlt_dist.util.records import read_records

CONFIGS = Path(__file__).parents[2] / "configs" / "verify"
RANKS, STEPS, KILLS_PER_RUN = 4, 16, 5
COMMON = (
    *(f"train.steps={STEPS}", "data.segment=6", "checkpoint.keep=2"),
    *("validation.every=5", "validation.segments=2"),
)
LAYERS = {
    "rlt1": ("model.encoder_layers=2", "model.decoder_layers=2"),
    "txl": ("model.layers=2",),
}
OF_THE_MACHINE = (
    *("seconds", "tokens_per_second", "tokens_per_second_per_device", "mfu", "checkpoint"),
    *("waiting", "sent", "bubble", "peak_memory"),
)
"""What a step's record says that may differ from one try to the next."""
RESUMED = re.compile(r"resumed from \S+ at step (\d+)")
SHARED_MEMORY = Path("/dev/shm")
_NEW_MOUNTS, _RECURSIVE_PRIVATE = 0x20000, 0x44000  # of <sched.h> and <sys/mount.h>


@dataclass(frozen=True)
class Case:
    """A run that is killed: a configuration of configs/verify, its mesh, and more choices."""

    model: str
    mesh: str
    every: int
    workers: int = 0

    @property
    def name(self) -> str:
        return f"{self.model} {self.mesh}"

    def configure(self, folder: Path, corpus: Path) -> RunConfig:
        """The run in `folder`/run, by the file `folder`/run.yaml."""
        choices = [
            *COMMON,
            *LAYERS[self.model],
            *parse_axes(self.mesh).overrides(),
            f"checkpoint.every={self.every}",
            f"data.workers={self.workers}",
            f"data.path={corpus}",
            f"run_folder={folder / 'run'}",
        ]
        config = load_typed(CONFIGS / f"{self.model}.yaml", RunConfig, choices)
        folder.mkdir()
        (folder / "run.yaml").write_text(config.to_yaml())
        return config


CASES = (
    Case("rlt1", "2x2x1", every=1),
    Case("txl", "2x1x2", every=1),
    Case("rlt1", "1x2x2", every=2),
    Case("rlt1", "4x1x1", every=1, workers=1),
)


def _one(chance: random.Random) -> tuple[int, ...]:
    return (chance.randrange(RANKS),)


def _all(chance: random.Random) -> tuple[int, ...]:
    """All ranks, any of them the one whose notes say when."""
    return tuple(chance.sample(range(RANKS), RANKS))


def _at_any_time(ranks: tuple[int, ...], chance: random.Random) -> Kill:
    return Kill(ranks, "train_step begins", chance.randint(1, 3), chance.uniform(1e-3, 0.4))


def _saving(ranks: tuple[int, ...], chance: random.Random) -> Kill:
    """Before any operation of the saver's thread; rank 0 has five times as many as the others."""
    return Kill(ranks, "^saver: ", chance.randint(1, 15 if ranks[0] else 60))


def _inside_bytes(ranks: tuple[int, ...], chance: random.Random) -> Kill:
    moment = r"^saver: open w .*distcp"
    return Kill(ranks, moment, chance.randint(1, 2), chance.uniform(1e-4, 0.03))


def _around_rename(chance: random.Random) -> Kill:
    """What only rank 0 does: before each operation, the one after the rename among them."""
    moments = (
        "^saver: .*manifest.json",
        r"^saver: os.rename checkpoints/\.step-\d+\.partial$",
        "^saver: (open None|os.fsync) checkpoints$",
        r"^saver: (os.rename checkpoints/step-|os.rmdir|os.remove|shutil.rmtree)",
    )
    return Kill((0,), chance.choice(moments), chance.randint(1, 3))


def _at_end(chance: random.Random) -> Kill:
    """Where rank 0 removes what need not be kept any more, and tells of the end."""
    moment = rf"os.rename checkpoints/step-0*({STEPS - 4}|{STEPS - 2})$|ended.json.partial$"
    return Kill((0,), moment, chance.randint(1, 5))


def _starting(ranks: tuple[int, ...], chance: random.Random) -> Kill:
    if chance.random() < 0.5:
        return Kill(ranks, seconds=chance.uniform(0.05, 1.5))
    return Kill(ranks, "^MainThread: ", chance.randint(1, 5 if ranks[0] else 40))


AT_END = "rank 0, at the run's end"
KINDS: dict[str, Callable[[random.Random], Kill]] = {
    "one rank, any time": lambda chance: _at_any_time(_one(chance), chance),
    "all ranks, any time": lambda chance: _at_any_time(_all(chance), chance),
    "one rank, its saver's operations": lambda chance: _saving(_one(chance), chance),
    "one rank, inside the bytes": lambda chance: _inside_bytes(_one(chance), chance),
    "rank 0, around the rename": _around_rename,
    "all ranks, saver's operations": lambda chance: _saving(_all(chance), chance),
    AT_END: _at_end,
    "one rank, start and resume": lambda chance: _starting(_one(chance), chance),
    "all ranks, start and resume": lambda chance: _starting(_all(chance), chance),
}

PHASES = (
    ("the manifest", "manifest.json"),
    ("hashing, waiting for rank 0", r"open r checkpoints/.*(distcp|\.metadata)$"),
    ("writing tensors", r"distcp|\.metadata|save_checkpoint|os.mkdir"),
    ("the rename", r"(os.rename|open None|os.fsync) checkpoints/\.step-\d+\.partial$"),
    ("after the rename", r"(open None|os.fsync) checkpoints$"),
    ("removing old ones", ""),
)
"""What a save is at, by the last note of the saver's thread."""
MEETING, LOADING, TRAINING, BEFORE = "meeting", "start, load", "training", "before the write"


def phase_of(notes: Sequence[str]) -> str:
    """What a rank was at when it was killed."""
    if not any("train_step" in note for note in notes):
        return LOADING if f"MainThread: {MEET} ends" in notes else MEETING
    of_saver = [note for note in notes if note.startswith("saver: ")]
    if not of_saver or of_saver[-1] == "saver: save_checkpoint ends":
        return TRAINING
    begun = next(n for n, note in enumerate(reversed(of_saver)) if "save_checkpoint begins" in note)
    if not any("open w " in note for note in of_saver[len(of_saver) - begun :]):
        return BEFORE
    return next(phase for phase, pattern in PHASES if re.search(pattern, of_saver[-1]))


@dataclass(frozen=True)
class Row:
    """One kill and what was seen of it.

    Attributes:
        kind: empty: let through.
        unmet: as in `Ended`.
        went_on: whether the start had told what it goes on from.
        cut: whether a file of tensors was left that is shorter than it should be.
        lost: steps that are to be done again.
        seconds: until all other processes were gone.
        faults: what was not as it should be.
    """

    case: str
    kind: str
    phase: str
    unmet: bool
    went_on: bool
    cut: bool
    lost: int
    seconds: float
    faults: list[str]


@dataclass(frozen=True)
class Planned:
    """A run and its kills, by kind; what it is called tells its folder and its chances."""

    name: str
    case: Case
    kinds: tuple[str, ...]


def own_shared_memory() -> None:
    """See only what this process's descendants leave in shared memory, where that is allowed."""
    system = ctypes.CDLL(None)
    if system.unshare(_NEW_MOUNTS) == 0:
        system.mount(b"none", b"/", None, _RECURSIVE_PRIVATE, None)
        system.mount(b"tmpfs", str(SHARED_MEMORY).encode(), b"tmpfs", 0, None)


def numbers(run: Path) -> list[dict[str, Any]]:
    """A run's records, all that depends on the machine left out."""
    records = read_records(run / "metrics.jsonl")
    return [{key: of for key, of in r.items() if key not in OF_THE_MACHINE} for r in records]


def whole_steps(run: Path) -> list[int]:
    """Steps of the checkpoints that are whole, oldest first."""
    found = []
    for folder in checkpoints(run / "checkpoints"):
        try:
            verify(folder)
        except UserError:
            continue
        found.append(step_of(folder))
    return found


def unlike(folder: Path, other: Path) -> list[str]:
    """What differs between two checkpoints."""
    names = [stored_tensors(folder).keys(), stored_tensors(other).keys()]
    if names[0] != names[1] or read_manifest(folder).facts != read_manifest(other).facts:
        return [f"{folder.name}: other names or facts"]
    found, expected = load_whole(folder, names[0]), load_whole(other, names[1])
    return [f"{folder.name}: {n}" for n in found if not torch.equal(found[n], expected[n])]


def of_start(ended: Ended, newest: int, kill: Kill | None) -> Iterator[str]:
    """What is wrong with how the processes of a start behaved.

    Args:
        newest: the step of the newest checkpoint that was whole when they started, or 0.
    """
    resumed = RESUMED.search(ended.told[0])
    if resumed or any("train_step" in note for note in ended.notes[0]):
        found = int(resumed[1]) if resumed else 0
        if found != newest:
            yield f"went on from step {found} where step {newest} is whole"
    for process in ended.overdue:
        yield f"{process} was still there"
    for rank, status in enumerate(ended.statuses):
        killed = kill is not None and rank in kill.ranks
        if not killed and not ended.unmet and status < 0 and not ended.overdue:
            yield f"rank {rank} was ended by signal {-status}"
        if "Traceback" in ended.told[rank]:
            yield f"rank {rank}: {ended.told[rank][-2000:]}"


def of_folder(run: Path, newest: int, case: Case, expected: list[dict[str, Any]]) -> Iterator[str]:
    """What is wrong with what a kill left."""
    steps, records = whole_steps(run), numbers(run)
    for folder in checkpoints(run / "checkpoints"):
        if step_of(folder) not in steps:
            yield f"{folder.name} is damaged"
    if max(steps, default=0) < newest:
        yield f"step {newest} is lost, the newest is {max(steps, default=0)}"
    if records != expected[: len(records)]:
        yield f"{len(records)} records differ from the uninterrupted run's"
    if lost_steps(run) > 2 * case.every:
        yield f"{lost_steps(run)} steps are to be done again"


def lost_steps(run: Path) -> int:
    """Steps done that no checkpoint has."""
    return max(0, len(numbers(run)) - max(whole_steps(run), default=0))


def was_cut(run: Path, reference: Path) -> bool:
    """Whether a kill left a file of tensors that is shorter than that of a whole checkpoint."""
    whole = checkpoints(reference / "checkpoints")[-1]
    return any(
        0 < file.stat().st_size < 0.95 * (whole / file.name).stat().st_size
        for file in run.glob("checkpoints/.step-*.partial/*.distcp")
    )


def of_end(run: Path, reference: Path) -> Iterator[str]:
    """What is wrong with a run that has come to its end."""
    if numbers(run) != numbers(reference):
        yield "its records differ from the uninterrupted run's"
    if json.loads((run / "ended.json").read_text()) != json.loads(
        (reference / "ended.json").read_text()
    ):
        yield "it ended otherwise"
    for partial_ in run.rglob("*.partial"):
        yield f"{partial_.name} is left"
    found, expected = (checkpoints(of / "checkpoints") for of in (run, reference))
    if [folder.name for folder in found] != [folder.name for folder in expected]:
        yield f"keeps {[folder.name for folder in found]}"
    for folder, other in zip(found, expected, strict=False):
        yield from unlike(folder, other)


def one_run(planned: Planned, root: Path, seed: int) -> list[Row]:
    """Kill a run as planned, then let it through; a row a kill, and one for the end."""
    chance = random.Random(f"{seed} {planned.name}")
    folder, reference = root / planned.name, root / planned.case.name / "run"
    run = planned.case.configure(folder, root / "corpus").run_folder
    expected, rows = numbers(reference), []
    for kind in (*planned.kinds, None):
        kill = KINDS[kind](chance) if kind else None
        newest = max(whole_steps(run), default=0)
        before = set(os.listdir(SHARED_MEMORY))
        ended = one_start(folder / "run.yaml", RANKS, kill, folder)
        faults = [f"{name} is left" for name in set(os.listdir(SHARED_MEMORY)) - before]
        faults += of_start(ended, newest, kill)
        if kill is None or not ended.killed:
            faults += [f"ended with {ended.statuses}"] if any(ended.statuses) else []
        if kill is None:
            faults += of_end(run, reference) if run != reference else []
        else:
            faults += of_folder(run, newest, planned.case, expected)
        if kill is None or faults or ended.killed:
            rows.append(_row(planned, kind, kill, ended, faults, run, reference))
        if kill is not None and faults:
            break
    return rows


def _row(
    planned: Planned,
    kind: str | None,
    kill: Kill | None,
    ended: Ended,
    faults: Sequence[str],
    run: Path,
    reference: Path,
) -> Row:
    witness = 0 if kill is None or 0 in kill.ranks else kill.ranks[0]
    return Row(
        planned.case.name,
        kind or "",
        phase_of(ended.notes[witness]) if ended.killed else "",
        ended.unmet,
        RESUMED.search(ended.told[0]) is not None,
        was_cut(run, reference),
        lost_steps(run),
        ended.seconds,
        [f"{planned.name}, {kill or 'let through'}: {fault}" for fault in faults],
    )


def plan(kinds: Iterable[str], round_: int) -> Iterator[Planned]:
    """Runs for these kills, as many of each case as of any other."""
    waiting, cases = iter(kinds), itertools.cycle(CASES)
    for number in itertools.count():
        here = sorted(itertools.islice(waiting, KILLS_PER_RUN), key=AT_END.__eq__)
        if not here:
            return
        yield Planned(f"run-{round_}-{number}", next(cases), tuple(here))


def campaign(kills: int, seed: int, root: Path, jobs: int) -> list[Row]:
    """All rows of so many kills; those whose moment did not come are planned again."""
    _make_corpus(root)
    kinds = list(itertools.islice(itertools.cycle(KINDS), kills))
    random.Random(seed).shuffle(kinds)
    runs = math.ceil(kills / KILLS_PER_RUN)
    whole = [Planned(case.name, case, ()) for case in CASES[:runs]]
    rows: list[Row] = []
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(jobs, context, _prepare_process) as pool:
        do = partial(one_run, root=root, seed=seed)
        rows += itertools.chain(*pool.map(do, whole))
        if any(row.faults for row in rows):
            return rows
        wanted, round_ = Counter(kinds), 0
        while kinds:
            for found in pool.map(do, plan(kinds, round_)):
                rows += found
                for fault in itertools.chain(*(row.faults for row in found)):
                    print(f"WRONG: {fault}", flush=True)
                done = [row for row in rows if row.kind]
                faults = sum(len(row.faults) for row in rows)
                print(f"{len(done)} of {kills} kills, {faults} faults", flush=True)
            missing = wanted - Counter(row.kind for row in rows)
            kinds, round_ = list(missing.elements()), round_ + 1
    return rows


def _prepare_process() -> None:
    end_with_parent()
    adopt_orphans()
    own_shared_memory()


def _make_corpus(root: Path) -> None:
    """160 documents of seeded words, one id a byte."""
    chance, texts = random.Random(7), root / "texts"
    words = ["the", "state", "of", "a", "lane", "is", "carried", "on", "over", "its", "segment"]
    texts.mkdir(parents=True)
    for number in range(160):
        text = " ".join(chance.choices(words, k=chance.randint(1, 20)))
        (texts / f"{number:03}.txt").write_text(f"{text}\n")
    (root / "recipe.yaml").write_text("kind: bytes\n")
    shares = {"train": 0.8, "validation": 0.1, "test": 0.1}
    prepare_corpus([texts], root / "corpus", root / "recipe.yaml", shares=shares, shard_bytes=4000)


def report(rows: Sequence[Row], kills: int, seed: int) -> str:
    """The campaign as text."""
    killed = [row for row in rows if row.kind]
    cases = list(dict.fromkeys(row.case for row in rows))
    ends, went_on = len(rows) - len(killed) - len(cases), sum(row.went_on for row in rows)
    faults = [fault for row in rows for fault in row.faults]
    lines = [
        f"# Made by python tests/faults/campaign.py --kills {kills} --seed {seed}: "
        f"{len(faults)} faults in {len(killed)} kills of runs of {RANKS} ranks.",
        f"# {ends} runs were let through to step {STEPS} and are the same as those nobody killed;",
        f"# {went_on} starts told what they went on from, always the newest whole checkpoint.",
        "# unmet: the ranks did not know of each other yet, and a launcher has to end the others",
        "# cut: a file of tensors was left cut short; steps: most that were to be done again",
        "# seconds: longest until all other processes had ended by themselves",
    ]
    for case, kind in itertools.product(cases, KINDS):
        of = [row for row in killed if (row.case, row.kind) == (case, kind)]
        if of:
            seconds = max((row.seconds for row in of if not row.unmet), default=0.0)
            lines.append(
                f"{case:10}  {kind:32}  kills {len(of):3}  unmet {sum(row.unmet for row in of):2}  "
                f"cut {sum(row.cut for row in of):2}  steps {max(row.lost for row in of)}  "
                f"seconds {seconds:4.1f}  {'WRONG' if any(row.faults for row in of) else 'ok'}"
            )
    lines.append("# what the killed rank was at, or rank 0 where all were killed")
    for phase in (MEETING, LOADING, TRAINING, BEFORE, *dict(PHASES)):
        found = Counter(row.case for row in killed if row.phase == phase)
        by_case = "  ".join(f"{case} {found[case]:3}" for case in cases)
        lines.append(f"{phase:27}  kills {found.total():3}:  {by_case}")
    return "\n".join([*lines, *(f"WRONG: {fault}" for fault in faults)]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="Example: python tests/faults/campaign.py --kills 300 --output docs/faults.txt",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--kills", type=int, default=300, help="how many (300)")
    parser.add_argument("--seed", type=int, default=0, help="of the plan (0)")
    parser.add_argument("--output", type=Path, required=True, help="the report, a text file")
    parser.add_argument("--folder", type=Path, help="for the runs, new; kept (default: removed)")
    parser.add_argument("--jobs", type=int, default=cores, help=f"runs at a time ({cores})")
    asked = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        root = (asked.folder or Path(temporary)).absolute()
        rows = campaign(asked.kills, asked.seed, root, asked.jobs)
    text = report(rows, asked.kills, asked.seed)
    asked.output.write_text(text)
    print(text, end="")
    return int(any(row.faults for row in rows))


if __name__ == "__main__":
    sys.exit(main())
