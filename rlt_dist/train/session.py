"""A run in memory: everything it needs, built from its configuration and its newest checkpoint."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rlt_dist.checkpoint.contents import Contents
from rlt_dist.checkpoint.load import load_contents
from rlt_dist.checkpoint.manifest import Facts, checkpoints, latest, read_manifest
from rlt_dist.checkpoint.run_folder import CHECKPOINTS, check_free, claim, describe_changes
from rlt_dist.checkpoint.save import clear_leftovers, save_checkpoint
from rlt_dist.config.model import TransformerXLConfig
from rlt_dist.config.run import RunConfig
from rlt_dist.data.stream.corpora import Corpora, check_lanes, open_corpora
from rlt_dist.data.stream.loader import LaneLoader, cursors_at_start, lanes_of_rank
from rlt_dist.inference.forward import parameter_dtype, recurrence
from rlt_dist.mesh.collectives import on_leader, together
from rlt_dist.mesh.mesh import Mesh
from rlt_dist.mesh.world import World
from rlt_dist.models.build import Model
from rlt_dist.models.state import State
from rlt_dist.parallel.engine.engine import Engine, make_engine
from rlt_dist.parallel.local import LocalModel, build_local
from rlt_dist.parallel.plan.layout import check_vocabulary
from rlt_dist.parallel.seam import seam_of
from rlt_dist.util.errors import UserError
from rlt_dist.util.lock import locked


@dataclass
class Session:
    """A run between two steps.

    Attributes:
        step: optimizer steps done.
        state: what this process's lanes carry.
        cursors: int64 [b, corpora, 4], where they stand in the data.
        byte_lengths: int64 [V], bytes of text that each token stands for.
        notes: what a person should know of how the run was started.
    """

    config: RunConfig
    mesh: Mesh
    corpora: Corpora
    local_model: LocalModel
    optimizer: Engine
    step: int
    state: State
    cursors: Tensor
    byte_lengths: Tensor
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
    def local(self) -> range:
        """This process's lanes."""
        return _local_lanes(self.config, self.mesh)

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

    def save(self) -> Path:
        """Write a checkpoint of the step just done."""
        facts = Facts(
            step=self.step,
            tokens=self.step * self.config.data.lanes * self.config.data.segment,
            tokenizer=self.corpora.tokenizer.hash,
            corpus=self.corpora.fingerprint,
            identity=self.config.identity(),
        )
        folder = self.config.run_folder / CHECKPOINTS
        contents = self.contents().pieces(self.local_model, self.mesh)
        return save_checkpoint(folder, contents, facts, self.mesh, self.config.checkpoint.keep)

    def contents(self) -> Contents:
        """What a checkpoint keeps of it."""
        parameters = self.local_model.parameters
        return Contents(parameters, self.optimizer.tensors(), self.state, self.cursors)


@contextmanager
def open_session(config: RunConfig, mesh: Mesh) -> Iterator[Session]:
    """Start a run, or go on from the newest whole checkpoint; its folder is held meanwhile.

    Raises:
        UserError: on every process alike, before anything is written, where the configuration
            does not fit the corpus, the number of processes or the run folder, or where another
            process trains there.
    """
    config, world = config.resolved(), mesh.world
    together(world, lambda: config.micro_batch_lanes(len(_local_lanes(config, mesh))))
    corpora = together(world, lambda: open_corpora(config.data, check=world.leads))
    together(world, lambda: check_fit(config, corpora))
    model = together(world, lambda: new_model(config, corpora.tokenizer.vocabulary, mesh))
    engine = together(world, lambda: make_engine(model, config.optimizer, mesh))
    on_leader(world, lambda: check_free(config.run_folder))
    with ExitStack() as held:
        on_leader(world, lambda: held.enter_context(locked(config.run_folder, "trains")))
        on_leader(world, lambda: clear_leftovers(config.run_folder / CHECKPOINTS))
        newest = on_leader(world, lambda: _newest(config, corpora))
        changes = on_leader(world, lambda: claim(config, corpora.tokenizer))
        session = _new_session(config, mesh, corpora, model, engine)
        session.notes += [f"changed since the last start: {change}" for change in changes]
        if newest is not None:
            _resume(session, newest)
        yield session


def _new_session(
    config: RunConfig,
    mesh: Mesh,
    corpora: Corpora,
    model: LocalModel,
    engine: Engine,
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
        state=model.model.empty_state(len(local)),
        cursors=cursors_at_start(len(local), len(corpora.corpora)),
        byte_lengths=lengths.to(mesh.world.device),
        notes=[],
    )


def _local_lanes(config: RunConfig, mesh: Mesh) -> range:
    return lanes_of_rank(config.data.lanes, mesh.place.data, mesh.axes.data)


def check_fit(config: RunConfig, corpora: Corpora) -> None:
    """What the configuration asks of the corpus, checked before anything is written.

    Raises:
        UserError: lanes, vocabulary or cutoffs do not fit.
    """
    splits = ["train"] if config.validation.every is None else ["train", "validation"]
    for split in splits:
        check_lanes(corpora.split(split), config.data.lanes, config.train.seed)
    check_vocabulary(config.model, corpora.tokenizer.vocabulary, config.mesh.tensor)
    cutoffs = isinstance(config.model, TransformerXLConfig) and config.model.cutoffs
    if cutoffs and not corpora.tokenizer.ranked:
        raise UserError(
            "model.cutoffs: an adaptive softmax needs ids ranked by frequency, which the tokenizer "
            f"of {corpora.location} does not do; prepare a corpus with tokenizer/words.yaml"
        )


def _newest(config: RunConfig, corpora: Corpora) -> Path | None:
    """The checkpoint to go on from, or None to start from the beginning."""
    folder = config.run_folder / CHECKPOINTS
    newest = latest(folder)
    if newest is None:
        if checkpoints(folder):
            raise UserError(
                f"{folder}: none of its {len(checkpoints(folder))} checkpoints is whole; "
                "remove the folder to start from the beginning"
            )
        return None
    facts = read_manifest(newest).facts
    for name, saved, now in (
        ("corpus", facts.corpus, corpora.fingerprint),
        ("tokenizer", facts.tokenizer, corpora.tokenizer.hash),
    ):
        if saved != now:
            raise UserError(
                f"{newest}: was trained on another {name} than {corpora.location}; "
                "point data at what it was started with"
            )
    changed = describe_changes(facts.identity, config.identity())
    if changed:
        raise UserError(
            f"{newest}: belongs to another run ({'; '.join(changed)}); "
            "give another run_folder, or undo the change"
        )
    return newest


def new_model(config: RunConfig, vocabulary: int, mesh: Mesh) -> LocalModel:
    """This process's part of the model, with the run's choices and initial values.

    Raises:
        UserError: an implementation that was asked for cannot be had.
    """
    seam, how = seam_of(mesh), recurrence(config)
    how.prepare(mesh.world.device.type, seam)
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


def _resume(session: Session, folder: Path) -> None:
    """Take over a checkpoint whose corpus, tokenizer and configuration are known to fit."""
    local, mesh, start = session.local_model, session.mesh, session.contents()
    contents = together(session.world, lambda: load_contents(folder, start, local, mesh))
    with torch.no_grad():
        for name, parameter in local.parameters.items():
            parameter.copy_(contents.model[name])
    session.optimizer.load(contents.optimizer)
    session.state, session.cursors = contents.state, contents.cursors
    session.step = read_manifest(folder).facts.step
    session.notes.append(f"resumed from {folder} at step {session.step}")
    if session.step >= session.config.train.steps:
        session.notes.append("nothing left to do; raise train.steps to go on")
