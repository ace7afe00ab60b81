"""A run on random tokens: what a configuration does on a mesh, without a corpus or a folder.

Tokens and document starts of a lane are drawn from (seed, lane), so a lane reads the same on every
mesh, as it does from a corpus. A segment counts as a document of the lane's cursor: a run that goes
on from a checkpoint reads on where its cursors say.
"""

from pathlib import Path

import torch
from torch import Tensor

from rlt_dist.checkpoint.contents import Contents
from rlt_dist.checkpoint.explain import Wanted, decide
from rlt_dist.checkpoint.load import load_contents, put
from rlt_dist.checkpoint.manifest import Facts, folder_name
from rlt_dist.checkpoint.save import Keep, save_checkpoint
from rlt_dist.config.run import RunConfig
from rlt_dist.data.stream.lanes import Cursor
from rlt_dist.data.stream.loader import Batch, cursors_at_start, lanes_of_rank
from rlt_dist.inference.forward import micro_batch_rows, output_loss, through_pipeline
from rlt_dist.mesh.collectives import on_leader
from rlt_dist.mesh.mesh import Mesh
from rlt_dist.models.state import State
from rlt_dist.ops.noise import seed_from
from rlt_dist.parallel.engine.engine import make_engine
from rlt_dist.parallel.execute.step import Passed
from rlt_dist.parallel.local import LocalModel
from rlt_dist.train.session import new_model
from rlt_dist.train.start import check_mesh
from rlt_dist.train.step import StepResult, train_step


class Rehearsal:
    """A model in training; every attribute is this process's part.

    Attributes:
        steps: done so far.
        lanes: global numbers.
        state: what the lanes carry.
        cursors: int64 [b, 1, 4], where they stand.
        optimizer: what updates the parameters.
    """

    def __init__(self, config: RunConfig, vocabulary: int, mesh: Mesh, document: int = 12) -> None:
        """
        Args:
            document: mean tokens of a document.

        Raises:
            UserError: see `check_mesh`.
        """
        check_mesh(config, vocabulary, mesh.axes)
        self.config, self.mesh = config, mesh
        self._vocabulary, self._document = vocabulary, document
        self.lanes = lanes_of_rank(config.data.lanes, mesh.place.data, mesh.axes.data)
        self.local: LocalModel = new_model(config, vocabulary, mesh)
        self.optimizer = make_engine(self.local, config.optimizer, mesh)
        self.state: State = self.local.model.empty_state(len(self.lanes))
        self.cursors = cursors_at_start(len(self.lanes), 1)
        self.steps = 0

    def step(self, batch: Batch | None = None) -> StepResult:
        """One optimizer step, at the configuration's full learning rate.

        Args:
            batch: what `next_batch` gave; None: it is drawn now.
        """
        batch = batch or self.next_batch()
        self.steps += 1
        result, self.state = train_step(
            self.local,
            self.optimizer,
            batch,
            self.state,
            config=self.config,
            mesh=self.mesh,
            step=self.steps,
            learning_rate=self.config.optimizer.learning_rate,
        )
        self.cursors = batch.cursors
        return result

    def pass_through(self) -> Passed:
        """Forward and backward of the next segment by the executor, even of a single stage.

        Gradients are left as this process finds them, and nothing is updated.
        """
        batch = self.next_batch()
        rows = micro_batch_rows(batch, self.config)
        scored = batch.loss_mask.sum().clamp(min=1)

        def learn(micro: int, output: Tensor) -> None:
            loss = output_loss(self.local.model, output, batch.rows(rows[micro]), self.config)
            (loss / scored).backward()

        self.optimizer.zero_gradients()
        self.steps += 1
        passed = through_pipeline(
            self.local, self.mesh, batch, self.state, self.config, self.steps, learn
        )
        self.state, self.cursors = passed.state, batch.cursors
        return passed

    def contents(self) -> Contents:
        """What a checkpoint keeps of it."""
        parameters = self.local.parameters
        return Contents(parameters, self.optimizer.tensors(), self.state, self.cursors)

    def save(self, folder: Path) -> Path:
        """Write a checkpoint of the step just done into a folder of them."""
        facts = Facts(
            step=self.steps,
            tokens=self.steps * self.config.data.tokens_per_step,
            tokenizer="",
            corpus="",
            identity=self.config.identity(),
            mesh=str(self.mesh.axes),
            engine=self.config.optimizer.engine,
        )
        contents = self.contents().pieces(self.local, self.mesh)
        keep = Keep(self.config.checkpoint.keep)
        save_checkpoint(folder, contents, facts, self.mesh.world, keep)
        return folder / folder_name(self.steps)

    def resume(self, checkpoint: Path) -> None:
        """Go on from a checkpoint of a rehearsal.

        Raises:
            UserError: on every process alike, where it does not fit.
        """
        wanted = Wanted(self.config, self.mesh.axes, self._vocabulary, "", "", "random tokens")
        decision = on_leader(self.mesh.world, lambda: decide(checkpoint, wanted).accepted())
        contents = load_contents(checkpoint, self.contents(), self.local, self.mesh)
        put(contents, self.local, self.optimizer)
        self.state, self.cursors = contents.state, contents.cursors
        self.steps = decision.facts.step

    def next_batch(self) -> Batch:
        """The next segment of every lane; its last token is the next one's first."""
        cursors = [Cursor.from_numbers(row) for row in self.cursors[:, 0].tolist()]
        segments = [
            self._lane(lane, cursor.document)
            for lane, cursor in zip(self.lanes, cursors, strict=True)
        ]
        tokens, starts = (torch.stack(parts) for parts in zip(*segments, strict=True))
        further = Cursor(document=1, tokens=self.config.data.segment)
        batch = Batch(
            tokens=tokens,
            targets=tokens[:, 1:],
            document_start=starts[:, :-1].contiguous(),
            loss_mask=~starts[:, 1:],
            lanes=torch.tensor(self.lanes, dtype=torch.int64),
            cursors=self.cursors + torch.tensor(further.to_tuple()),
        )
        return batch.to(self.mesh.world.device)

    def _lane(self, lane: int, segment: int) -> tuple[Tensor, Tensor]:
        """Tokens [T + 1] of a segment, and where documents start."""
        length = self.config.data.segment
        parts = []
        for number in (segment, segment + 1):
            key = seed_from(self.config.train.seed, "rehearsal", lane, number)
            generator = torch.Generator().manual_seed(key)
            tokens = torch.randint(self._vocabulary, (length,), generator=generator)
            starts = torch.rand(length, generator=generator) < 1 / self._document
            starts[0] |= number == 0
            parts.append((tokens, starts))
        (tokens, starts), (next_tokens, next_starts) = parts
        return torch.cat((tokens, next_tokens[:1])), torch.cat((starts, next_starts[:1]))
