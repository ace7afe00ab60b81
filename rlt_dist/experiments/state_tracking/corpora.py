"""A task's programs as a labelled corpus, packed so that a lane's segment is a row of whole ones.

All rows hold programs of the same lengths, each in an order of its own. So a row has as many tokens
as any other, and a lane, which is given as many rows as any other, reads one in every step. It
stays so in all epochs, since a shard holds whole rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rlt_dist.data.prepare.labelled import Labelled, write_labelled
from rlt_dist.data.tokenizers.base import content_hash
from rlt_dist.experiments.state_tracking.recipes import Recipe
from rlt_dist.tasks.catalogue import TASKS
from rlt_dist.tasks.task import Task, last_only
from rlt_dist.util.lock import locked

_SEEDS = {"train": 1, "validation": 2}
_BLOCK = 1 << 10
"""Rows drawn at once, and of a shard."""


@dataclass(frozen=True)
class Corpus:
    """What a recipe draws of a task.

    Attributes:
        folder: of all corpora.
        every: what is to be predicted after every token counts; else at each program's end alone.
    """

    folder: Path
    task: str
    recipe: Recipe
    every: bool

    @property
    def rows(self) -> dict[str, int]:
        """By split: as many as a run reads, and no more than the recipe allows; one a lane."""
        recipe = self.recipe
        drawn = min(recipe.rows, recipe.steps * recipe.lanes)
        return {"train": drawn, "validation": recipe.lanes}

    @property
    def path(self) -> Path:
        """Where it lies, which says what it is."""
        about = {"lengths": self.recipe.lengths, "rows": self.rows, "every": self.every}
        return self.folder / f"{self.task}-{content_hash(about)[:8]}"

    def make(self) -> None:
        """Make it, unless it is there.

        Raises:
            UserError: there are no programs of a length, or another process makes one there.
        """
        with locked(self.folder, "makes a corpus"):
            if not self.path.is_dir():
                task = TASKS[self.task]()
                splits = {split: self._documents(task, split) for split in self.rows}
                of_shard = _BLOCK * len(self.recipe.lengths)
                write_labelled(self.path, task.tokenizer, splits, of_shard=of_shard)

    def _documents(self, task: Task, split: str) -> Iterator[Labelled]:
        """The programs of a split, one row's after the other's."""
        lengths, rows = self.recipe.lengths, self.rows[split]
        chance = np.random.default_rng(_SEEDS[split])
        for first in range(0, rows, _BLOCK):
            size = min(_BLOCK, rows - first)
            programs = [task.programs(size, length, chance) for length in lengths]
            if not self.every:
                programs = [(tokens, last_only(labels)) for tokens, labels in programs]
            orders = chance.permuted(np.tile(np.arange(len(lengths)), (size, 1)), axis=1)
            for row, order in enumerate(orders):
                for place in order:
                    tokens, labels = programs[place]
                    yield tokens[row], labels[row]
