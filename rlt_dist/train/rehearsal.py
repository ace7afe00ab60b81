"""A run on random tokens: what a configuration does on a mesh, without a corpus or a folder.

Tokens and document starts of a lane are drawn from (seed, lane), so a lane reads the same on every
mesh, as it does from a corpus.
"""

import torch
from torch import Tensor

from rlt_dist.config.run import RunConfig
from rlt_dist.data.stream.loader import Batch, cursors_at_start, lanes_of_rank
from rlt_dist.inference.forward import micro_batch_rows, output_loss, through_pipeline
from rlt_dist.mesh.axes import Axes
from rlt_dist.mesh.mesh import Mesh
from rlt_dist.models.state import State
from rlt_dist.ops.noise import seed_from
from rlt_dist.parallel.engine.engine import make_engine
from rlt_dist.parallel.execute.step import Passed
from rlt_dist.parallel.local import LocalModel
from rlt_dist.parallel.plan.layout import check_vocabulary
from rlt_dist.train.session import new_model
from rlt_dist.train.step import StepResult, train_step


def check_fit(config: RunConfig, vocabulary: int, axes: Axes) -> None:
    """Check, before any rank is started, what a run asks of its mesh.

    Raises:
        UserError: lanes, micro-batches or the vocabulary do not fit.
    """
    config.micro_batch_lanes(len(lanes_of_rank(config.data.lanes, 0, axes.data)))
    check_vocabulary(config.model, vocabulary, axes.tensor)


class Rehearsal:
    """A model in training; every attribute is this process's part.

    Attributes:
        steps: done so far.
        lanes: global numbers.
        state: what the lanes carry.
        optimizer: what updates the parameters.
    """

    def __init__(self, config: RunConfig, vocabulary: int, mesh: Mesh, document: int = 12) -> None:
        """
        Args:
            document: mean tokens of a document.

        Raises:
            UserError: see `check_fit`.
        """
        check_fit(config, vocabulary, mesh.axes)
        self.config, self.mesh = config, mesh
        self._vocabulary, self._document = vocabulary, document
        self.lanes = lanes_of_rank(config.data.lanes, mesh.place.data, mesh.axes.data)
        self.local: LocalModel = new_model(config, vocabulary, mesh)
        self.optimizer = make_engine(self.local, config.optimizer, mesh)
        self.state: State = self.local.model.empty_state(len(self.lanes))
        self.steps = 0

    def step(self) -> StepResult:
        """One optimizer step, at the configuration's full learning rate."""
        batch = self._batch().to(self.mesh.world.device)
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
        return result

    def pass_through(self) -> Passed:
        """Forward and backward of the next segment by the executor, even of a single stage.

        Gradients are left as this process finds them, and nothing is updated.
        """
        batch = self._batch().to(self.mesh.world.device)
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
        self.state = passed.state
        return passed

    def _batch(self) -> Batch:
        """The next segment of every lane; its last token is the next one's first."""
        segments = [self._lane(lane) for lane in self.lanes]
        tokens, starts = (torch.stack(parts) for parts in zip(*segments, strict=True))
        return Batch(
            tokens=tokens,
            document_start=starts[:, :-1].contiguous(),
            loss_mask=~starts[:, 1:],
            lanes=torch.tensor(self.lanes, dtype=torch.int64),
            cursors=cursors_at_start(len(self.lanes), 1),
        )

    def _lane(self, lane: int) -> tuple[Tensor, Tensor]:
        """Tokens [T + 1], and where documents start."""
        length = self.config.data.segment
        parts = []
        for segment in (self.steps, self.steps + 1):
            key = seed_from(self.config.train.seed, "rehearsal", lane, segment)
            generator = torch.Generator().manual_seed(key)
            tokens = torch.randint(self._vocabulary, (length,), generator=generator)
            starts = torch.rand(length, generator=generator) < 1 / self._document
            starts[0] |= segment == 0
            parts.append((tokens, starts))
        (tokens, starts), (next_tokens, next_starts) = parts
        return torch.cat((tokens, next_tokens[:1])), torch.cat((starts, next_starts[:1]))
