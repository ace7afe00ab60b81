"""A run in memory: everything it needs, built from its configuration and its newest checkpoint."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rlt_dist.checkpoint.contents import Contents
from rlt_dist.checkpoint.explain import Decision, seen
from rlt_dist.checkpoint.load import ALL, load_contents, put
from rlt_dist.checkpoint.manifest import Facts, GuardFacts
from rlt_dist.checkpoint.run_folder import CHECKPOINTS, check_free, claim
from rlt_dist.checkpoint.save import Keep, clear_leftovers, remove_old
from rlt_dist.checkpoint.saver import Saver
from rlt_dist.config.run import RunConfig
from rlt_dist.data.stream.corpora import Corpora, open_corpora
from rlt_dist.data.stream.loader import LaneLoader, cursors_at_start, lanes_of_rank
from rlt_dist.inference.forward import kind, parameter_dtype, recurrence
from rlt_dist.mesh.collectives import on_leader, together
from rlt_dist.mesh.mesh import Mesh
from rlt_dist.mesh.world import World
from rlt_dist.models.build import Model
from rlt_dist.models.state import State
from rlt_dist.parallel.engine.engine import Engine, make_engine
from rlt_dist.parallel.local import LocalModel, build_local
from rlt_dist.parallel.seam import seam_of
from rlt_dist.train.start import (
    check_corpora,
    check_mesh,
    initial_checkpoint,
    starting_point,
)
from rlt_dist.train.usage import known_peak, memory_before
from rlt_dist.util.errors import UserError
from rlt_dist.util.lock import locked


@dataclass
class Session:
    """A run between two steps.

    Attributes:
        step: optimizer steps done.
        tokens: input tokens consumed over all lanes.
        state: what this process's lanes carry.
        cursors: int64 [b, corpora, 4], where they stand in the data.
        byte_lengths: int64 [V], bytes of text that each token stands for.
        guard: what the guard remembers.
        memory_before: bytes that were resident before the model was built (`train.usage`).
        reset: the step at which `--reset-state` emptied the state, if it was asked for.
        notes: what a person should know of how the run was started.
    """

    config: RunConfig
    mesh: Mesh
    corpora: Corpora
    local_model: LocalModel
    optimizer: Engine
    step: int
    tokens: int
    state: State
    cursors: Tensor
    byte_lengths: Tensor
    guard: GuardFacts
    memory_before: int
    reset: int | None
    notes: list[str]

    @property
    def model(self) -> Model:
        """The pieces of the model that are here."""
        return self.local_model.model

    @property
    def world(self) -> World:
        """All processes of the run."""
        return self.mesh.world

    @property
    def vocabulary(self) -> int:
        """Number of ids."""
        return self.corpora.tokenizer.vocabulary

    @property
    def local(self) -> range:
        """This process's lanes."""
        return _local_lanes(self.config, self.mesh)

    def saver(self) -> Saver:
        """What writes its checkpoints; made on all processes at the same place."""
        return Saver(self.config.run_folder / CHECKPOINTS, self.world, self.config.checkpoint)

    def loader(self, split: str, cursors: Tensor | None = None) -> LaneLoader:
        """A reader of this process's lanes of a split, from cursors or from the start.

        The train split is read ahead by worker processes, if the configuration has any; the others
        are read for moments only.
        """
        data = self.config.data
        return LaneLoader(
            self.corpora.reading(split, data, self.config.train.seed),
            self.local,
            cursors=cursors,
            workers=data.reading_processes if split == "train" else 0,
            ahead=data.ahead,
        )

    def save(self, saver: Saver) -> None:
        """Save the step just done."""
        facts = Facts(
            step=self.step,
            tokens=self.tokens,
            tokenizer=self.corpora.tokenizer.hash,
            corpus=self.corpora.fingerprint,
            identity=self.config.identity(),
            mesh=str(self.mesh.axes),
            engine=self.config.optimizer.engine,
            reset=self.reset,
            guard=self.guard,
        )
        saver.save(self.contents().pieces(self.local_model, self.mesh), facts)

    def contents(self) -> Contents:
        """What a checkpoint keeps of it."""
        parameters = self.local_model.parameters
        return Contents(parameters, self.optimizer.tensors(), self.state, self.cursors)


@contextmanager
def open_session(config: RunConfig, mesh: Mesh, *, reset_state: bool = False) -> Iterator[Session]:
    """Start a run, or go on from the newest whole checkpoint; its folder is held meanwhile.

    Args:
        reset_state: the state that a checkpoint carries is left behind (`explain.Decision`).

    Raises:
        UserError: on every process alike, before anything is written, where the configuration
            does not fit the corpus, the number of processes or the run folder, or where another
            process trains there.
    """
    config, world = config.resolved(), mesh.world
    corpora = together(world, lambda: open_corpora(config.data, check=world.leads))
    vocabulary = corpora.tokenizer.vocabulary
    together(world, lambda: check_mesh(config, vocabulary, mesh.axes))
    together(world, lambda: check_corpora(config, corpora))
    on_leader(world, lambda: known_peak(config, world.size))
    before = memory_before(world.device)
    model = together(world, lambda: new_model(config, vocabulary, mesh))
    engine = together(world, lambda: make_engine(model, config.optimizer, mesh))
    on_leader(world, lambda: check_free(config.run_folder))
    with ExitStack() as held:
        try:
            on_leader(world, lambda: held.enter_context(locked(config.run_folder, "trains")))
        except UserError:
            world.watch.recorder.folder = None  # The record there is for the start that is at work.
            raise
        on_leader(world, lambda: clear_leftovers(config.run_folder / CHECKPOINTS))
        start = on_leader(world, lambda: starting_point(config, corpora, mesh.axes, reset_state))
        initial = None
        if start is None:
            initial = on_leader(world, lambda: initial_checkpoint(config, corpora))
        changes = on_leader(world, lambda: claim(config, corpora.tokenizer))
        world.keep_in(config.run_folder)
        session = _new_session(config, mesh, corpora, model, engine, before)
        session.reset = 0 if reset_state else None
        session.notes += [f"changed since the last start: {change}" for change in changes]
        if initial is not None:
            _begin_from(session, *initial)
        if start is not None:
            # A kill between a commit and this would leave them, at a run's end for ever.
            keep = Keep.of(config.checkpoint)
            on_leader(world, lambda: remove_old(start.folder, keep))
            _resume(session, start)
        world.watch.recorder.step = session.step
        yield session


def _new_session(
    config: RunConfig,
    mesh: Mesh,
    corpora: Corpora,
    model: LocalModel,
    engine: Engine,
    before: int,
) -> Session:
    """The session of a run that has done no step."""
    local = _local_lanes(config, mesh)
    tokenizer = corpora.tokenizer
    lengths = torch.from_numpy(tokenizer.byte_lengths()) * tokenizer.lossless
    return Session(
        config=config,
        mesh=mesh,
        corpora=corpora,
        local_model=model,
        optimizer=engine,
        step=0,
        tokens=0,
        state=model.model.empty_state(len(local)),
        cursors=cursors_at_start(len(local), len(corpora.corpora)),
        byte_lengths=lengths.to(mesh.world.device),
        guard=GuardFacts(),
        memory_before=before,
        reset=None,
        notes=[],
    )


def _local_lanes(config: RunConfig, mesh: Mesh) -> range:
    return lanes_of_rank(config.data.lanes, mesh.place.data, mesh.axes.data)


def new_model(config: RunConfig, vocabulary: int, mesh: Mesh) -> LocalModel:
    """This process's part of the model, with the run's choices and initial values.

    Raises:
        UserError: an implementation that was asked for cannot be had.
    """
    seam, how = seam_of(mesh), recurrence(config)
    how.prepare(kind(config, mesh.world.device.type), seam)
    local = build_local(
        config.bounded_model,
        vocabulary,
        config.train.seed,
        mesh.axes,
        mesh.place,
        seam,
        parameter_dtype(config),
        how,
        config.recompute.layers,
    )
    local.model.to(mesh.world.device)
    return local


def _begin_from(session: Session, folder: Path, notes: list[str]) -> None:
    """Take over the parameters of another run's checkpoint."""
    local, mesh, start = session.local_model, session.mesh, session.contents()
    contents = together(
        session.world, lambda: load_contents(folder, start, local, mesh, ("model",))
    )
    put(contents, local, session.optimizer)
    session.notes += [f"began from the parameters of {folder}", *notes]


def _resume(session: Session, decision: Decision) -> None:
    """Take over a checkpoint that is known to fit."""
    local, mesh = session.local_model, session.mesh
    parts = ALL if decision.cursors is None else ("model", "optimizer")
    if decision.cursors is not None:
        session.cursors = decision.cursors[session.local.start : session.local.stop]
        session.state["tokens"] = seen(session.cursors).to(mesh.world.device)
    start = session.contents()
    contents = together(
        session.world, lambda: load_contents(decision.folder, start, local, mesh, parts)
    )
    put(contents, local, session.optimizer)
    session.state, session.cursors = contents.state, contents.cursors
    facts = decision.facts
    session.step, session.tokens, session.guard = facts.step, facts.tokens, facts.guard
    session.notes.append(f"resumed from {decision.folder} at step {session.step}")
    session.reset = decision.reset
    if decision.note is not None:
        session.notes.append(decision.note)
    if session.step >= session.config.train.steps:
        session.notes.append("nothing left to do; raise train.steps to go on")
