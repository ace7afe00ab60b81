"""The experiment: make the corpus, train a run for each seed, test each, keep what came of it.

OUT/corpora/TASK-...       the programs trained on (see `corpora.py`)
OUT/runs/NAME              a run folder: one task, model, supervision and seed
OUT/runs/NAME/scores.jsonl what its tests gave, an object for each
OUT/recipes/TASK-....json  the one recipe of a task and supervision, so that its models compare
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from os import sched_getaffinity
from pathlib import Path
from typing import Any

from rlt_dist.checkpoint.run_folder import METRICS, describe_changes
from rlt_dist.config.run import RunConfig
from rlt_dist.costs.flops import flops_per_token
from rlt_dist.data.prepare.workers import local_workers
from rlt_dist.experiments.state_tracking.corpora import Corpus
from rlt_dist.experiments.state_tracking.recipes import Recipe, run_config
from rlt_dist.experiments.state_tracking.score import Trial, score
from rlt_dist.experiments.training import Watch, train_side_by_side
from rlt_dist.parallel.plan.counts import parameters_of
from rlt_dist.tasks.catalogue import TASKS
from rlt_dist.util.errors import UserError
from rlt_dist.util.files import make_folder, write_atomic
from rlt_dist.util.lock import locked
from rlt_dist.util.records import append_record, parse_record, read_records, to_json

SCORES = "scores.jsonl"

CARRYING = ("rlt1", "rlt2")
"""Models whose state is fed back."""

FED_BACK = (*CARRYING, "token")
"""Models whose feedback is cut in a second test."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Experiment:
    """What is to be shown.

    Attributes:
        output: the folder of all that is written.
        every: the state is supervised after every operation; else after the last one alone.
        lengths: of the programs tested by, `programs` of each.
    """

    task: str
    model: str
    seeds: tuple[int, ...]
    output: Path
    recipe: Recipe
    every: bool
    lengths: tuple[int, ...]
    programs: int

    @property
    def supervised(self) -> str:
        """Which states are: `every` one, or the `final` one."""
        return "every" if self.every else "final"

    def run_folder(self, seed: int) -> Path:
        """Of a seed."""
        return self.output / "runs" / f"{self.task}-{self.supervised}-{self.model}-{seed}"

    @property
    def learned_by(self) -> dict[str, Any]:
        """The recipe without what trained models are tested by."""
        return self.recipe.model_dump(mode="json", exclude={"tested"})


def run_experiment(experiment: Experiment, watch: Watch, say: Say) -> list[dict[str, Any]] | None:
    """Train and test what is not trained and tested yet.

    Only the main thread may call it.

    Args:
        watch: told of training.
        say: told of tests.

    Returns:
        a row for each seed, length, and with the feedback cut; None: training was asked to stop,
        and the same call goes on.

    Raises:
        UserError: there is no program of a length, the task has no states between that could be
            left unsupervised, the recipe makes no model or is not that of the task's other runs,
            the folder cannot be made, or a run has failed by a mistake.
        Trouble: another process trains or tests one of the seeds, or a run has failed otherwise.
    """
    task, recipe, output = TASKS[experiment.task](), experiment.recipe, experiment.output
    if not (experiment.every or task.every):
        raise UserError(f"{experiment.task} has no states on the way to its final one to leave out")
    trials = _trials(experiment)
    corpus = Corpus(output / "corpora", experiment.task, recipe, experiment.every)
    sizes = [task.tokens(length) for length in recipe.lengths]
    given = (recipe, experiment.model, task.tokenizer.vocabulary, sizes)
    runs = {
        experiment.run_folder(seed): run_config(
            experiment.run_folder(seed), corpus.path, seed, *given
        )
        for seed in experiment.seeds
    }
    make_folder(output)
    _keep_recipe(experiment)
    corpus.make()

    # Three seeds on two cores share them to the end: one after two would leave a core idle.
    if not train_side_by_side(list(runs.values()), watch, at_once=2 * _cores()):
        return None
    _test(experiment, trials, runs, say)
    return [
        row for folder in runs for row in read_records(folder / SCORES) if _trial_of(row) in trials
    ]


def _keep_recipe(experiment: Experiment) -> None:
    """Note the recipe at the first run of a task, and hold all others to it.

    Raises:
        UserError: it is another one.
    """
    folder = experiment.output / "recipes"
    path, recipe = folder / f"{experiment.task}-{experiment.supervised}.json", experiment.learned_by
    with locked(folder, "begins an experiment"):
        if not path.exists():
            write_atomic(path, to_json(recipe) + "\n")
        changes = describe_changes(parse_record(path.read_bytes(), str(path)), recipe)
    if changes:
        raise UserError(
            f"{experiment.output}: has runs of {experiment.task} by another recipe "
            f"({'; '.join(changes)}), which cannot be compared; give another --output"
        )


def _trials(experiment: Experiment) -> list[Trial]:
    """The longest, which take longest, first."""
    cuts = (False, True) if experiment.model in FED_BACK else (False,)
    return [
        Trial(experiment.task, length, experiment.programs, _reach(experiment, length, cut), cut)
        for length in sorted(experiment.lengths, reverse=True)
        for cut in cuts
    ]


def _reach(experiment: Experiment, length: int, cut: bool) -> int | None:
    """As in training, where a state is carried on; else to the start of a program of that length.

    Without a state, or with the feedback cut, what is out of reach could not be told by any model,
    and that it is not told would say nothing about the model.

    Raises:
        UserError: there is no program of that length.
    """
    task, recipe = TASKS[experiment.task](), experiment.recipe
    whole = task.tokens(length)
    if experiment.model == "gru":
        return None
    if experiment.model in CARRYING and recipe.reach == "trained" and not cut:
        return max(map(task.tokens, recipe.lengths))
    return whole


def _trial_of(row: Mapping[str, Any]) -> Trial:
    return Trial(**{field.name: row[field.name] for field in fields(Trial)})


def _test(
    experiment: Experiment, trials: Sequence[Trial], runs: Mapping[Path, RunConfig], say: Say
) -> None:
    """Test runs side by side, in processes of their own; each result is kept as it comes."""
    facts = {folder: _facts(experiment, config) for folder, config in runs.items()}
    with ExitStack() as held:
        for folder in runs:
            held.enter_context(locked(folder, "tests what was trained"))
        known = {folder: [*map(_trial_of, read_records(folder / SCORES))] for folder in runs}
        waiting = [
            (folder, trial) for trial in trials for folder in runs if trial not in known[folder]
        ]
        workers = held.enter_context(local_workers(max(1, min(_cores(), len(waiting)))))
        for done, (folder, trial, found) in enumerate(workers.run(score, waiting), 1):
            row = asdict(trial) | asdict(found) | dict(facts[folder])
            append_record(folder / SCORES, to_json(row))
            what = f"{folder.name}, length {trial.length:,}{', feedback cut' * trial.cut}"
            say(f"[{done}/{len(waiting)}] {what}: {found.headline:.2%}")


def _facts(experiment: Experiment, config: RunConfig) -> dict[str, Any]:
    """What a seed's rows have in common: how it was trained, and what that took.

    FLOPs are the model's, forward and backward, the state full (`costs.flops`). Programs are those
    read, in all epochs. Seconds are those of its steps.
    """
    recipe, steps = experiment.recipe, config.train.steps
    vocabulary = TASKS[experiment.task]().tokenizer.vocabulary
    tokens = steps * config.data.tokens_per_step
    records = read_records(config.run_folder / METRICS)
    return {
        "model": experiment.model,
        "seed": config.train.seed,
        "supervised": experiment.supervised,
        "parameters": parameters_of(config.model, vocabulary),
        "tokens": tokens,
        "trained_on": steps * config.data.lanes * len(recipe.lengths),
        "flops": flops_per_token(config, vocabulary) * tokens,
        "seconds": sum(record["seconds"] for record in records),
        "recipe": experiment.learned_by,
        "config": config.model_dump(mode="json", include={"model", "optimizer", "schedule"}),
    }


def _cores() -> int:
    return len(sched_getaffinity(0))
