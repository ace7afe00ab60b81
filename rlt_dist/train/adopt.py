"""A run that begins from a model's parameters instead of drawn ones."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from rlt_dist.checkpoint.contents import Contents
from rlt_dist.checkpoint.exchange.about import check_same_model
from rlt_dist.checkpoint.exchange.names import select_parameters, vocabulary_of
from rlt_dist.checkpoint.exchange.source import Source
from rlt_dist.checkpoint.manifest import Facts
from rlt_dist.checkpoint.run_folder import CHECKPOINTS, TOKENIZER, record
from rlt_dist.checkpoint.save import Keep, save_checkpoint
from rlt_dist.config.run import RunConfig
from rlt_dist.data.stream.corpora import Corpora, open_corpora
from rlt_dist.data.stream.loader import cursors_at_start
from rlt_dist.data.tokenizers.tokenizer import Tokenizer
from rlt_dist.inference.forward import parameter_dtype
from rlt_dist.mesh.axes import Axes, least_axes
from rlt_dist.mesh.mesh import open_mesh
from rlt_dist.mesh.world import open_world
from rlt_dist.models.build import build_model
from rlt_dist.parallel.engine.torch_engine import TorchEngine
from rlt_dist.parallel.local import LocalModel
from rlt_dist.parallel.plan.layout import layouts, plan_for
from rlt_dist.parallel.plan.placement import place
from rlt_dist.train.start import check_corpora, check_mesh
from rlt_dist.util.errors import UserError
from rlt_dist.util.files import atomic_folder


def adopt(source: Source, config: RunConfig) -> list[str]:
    """Make the run folder of a run that has done no step and has a source's parameters.

    It holds a whole checkpoint of step 0, with a fresh optimizer, empty state and all lanes at the
    start of the corpus. It is whole or not there.

    Returns:
        what a person should know: choices that differ from the model's, rounding.

    Raises:
        UserError: the source's configuration, tokenizer, vocabulary, names or shapes are not
            those of the run, the corpus does not suit the run, or the run folder holds something.
    """
    config = config.resolved()
    corpora = open_corpora(config.data)
    check_mesh(config, corpora.tokenizer.vocabulary, least_axes(config.mesh))
    check_corpora(config, corpora)
    notes = _check_about(source, config, corpora.tokenizer)
    vocabulary, where = corpora.tokenizer.vocabulary, str(source.path)
    parameters = select_parameters(source.tensors, config.model, vocabulary, where)
    notes += _converted(parameters, parameter_dtype(config))
    local = _filled(config, vocabulary, parameters)
    with atomic_folder(config.run_folder) as folder:
        record(folder, config, corpora.tokenizer)
        _save(folder / CHECKPOINTS, local, config, corpora)
    return notes


def _check_about(source: Source, config: RunConfig, tokenizer: Tokenizer) -> list[str]:
    """Hold what a source says of itself, and its vocabulary, to the run."""
    notes: list[str] = []
    if source.about is not None:
        notes = check_same_model(source.about.model, config.model, str(source.path))
    if source.tokenizer is not None and source.tokenizer.hash != tokenizer.hash:
        raise UserError(
            f"{source.path}: has another tokenizer than the run's corpus; prepare the corpus "
            f"with --tokenizer {source.path / TOKENIZER}"
        )
    found = vocabulary_of(source.tensors)
    if found and found != tokenizer.vocabulary:
        raise UserError(
            f"{source.path}: has a vocabulary of {found:,} ids, and the run's corpus "
            f"{tokenizer.vocabulary:,}; point data at a corpus of the model's own tokenizer"
        )
    return notes


def _converted(parameters: Mapping[str, Tensor], dtype: torch.dtype) -> list[str]:
    others = {str(tensor.dtype) for tensor in parameters.values() if tensor.dtype != dtype}
    return [
        f"parameters of type {other} become {dtype}".replace("torch.", "")
        for other in sorted(others)
    ]


def _filled(config: RunConfig, vocabulary: int, parameters: Mapping[str, Tensor]) -> LocalModel:
    """The whole model on one process."""
    model = build_model(config.bounded_model, vocabulary, parameter_dtype(config))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(parameters[name])
    every = layouts(config.model, vocabulary, 1)
    plan, placement = plan_for(config.model, vocabulary), place(config.model, 1)[0]
    return LocalModel(model, plan, placement, tensor=0, tensors=1, layouts=every)


def _save(folder: Path, local: LocalModel, config: RunConfig, corpora: Corpora) -> None:
    """Write the checkpoint of step 0, on one process."""
    facts = Facts(
        step=0,
        tokens=0,
        tokenizer=corpora.tokenizer.hash,
        corpus=corpora.fingerprint,
        identity=config.identity(),
        mesh=str(Axes(1, 1, 1)),
        engine="torch",
    )
    lanes = config.data.lanes
    with open_world() as world, open_mesh(world, Axes(1, 1, 1)) as mesh:
        contents = Contents(
            local.parameters,
            TorchEngine(local, config.optimizer, mesh).tensors(),
            local.model.empty_state(lanes),
            cursors_at_start(lanes, len(corpora.corpora)),
        )
        save_checkpoint(folder, contents.pieces(local, mesh), facts, world, Keep(1))
