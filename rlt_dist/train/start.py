"""Whether a run can start as it is configured, and from what.

Asked by `rlt-dist train` before it writes anything, and by `rlt-dist checkpoint explain`.
"""

from dataclasses import replace
from pathlib import Path

from rlt_dist.checkpoint.exchange.about import check_same_model
from rlt_dist.checkpoint.explain import Decision, Wanted, decide
from rlt_dist.checkpoint.load import find_checkpoint
from rlt_dist.checkpoint.manifest import checkpoints, latest
from rlt_dist.checkpoint.run_folder import CHECKPOINTS, TOKENIZER
from rlt_dist.checkpoint.saved_run import open_saved
from rlt_dist.config.model import TransformerXLConfig
from rlt_dist.config.run import RunConfig
from rlt_dist.data.stream.corpora import Corpora, check_lanes, open_corpora
from rlt_dist.data.stream.loader import lanes_of_rank
from rlt_dist.mesh.axes import Axes
from rlt_dist.parallel.plan.layout import check_vocabulary
from rlt_dist.util.errors import UserError


def check_mesh(config: RunConfig, vocabulary: int, axes: Axes) -> None:
    """Check what a run asks of its mesh, beyond what its configuration alone tells.

    Raises:
        UserError: lanes, micro-batches or the vocabulary do not fit.
    """
    config.micro_batch_lanes(len(lanes_of_rank(config.data.lanes, 0, axes.data)))
    check_vocabulary(config.model, vocabulary, axes.tensor)


def check_corpora(config: RunConfig, corpora: Corpora) -> None:
    """Check what a run asks of its corpora.

    Raises:
        UserError: a split is missing, there are fewer documents than lanes, or the tokenizer does
            not give what the model needs.
    """
    splits = ["train"] if config.validation.every is None else ["train", "validation"]
    for split in splits:
        check_lanes(corpora.split(split), config.data.lanes, config.train.seed)
    cutoffs = isinstance(config.model, TransformerXLConfig) and config.model.cutoffs
    if cutoffs and not corpora.tokenizer.ranked:
        raise UserError(
            "model.cutoffs: an adaptive softmax needs ids ranked by frequency, which the tokenizer "
            f"of {corpora.location} does not do; prepare a corpus with tokenizer/words.yaml"
        )


def starting_point(
    config: RunConfig, corpora: Corpora, axes: Axes, reset_state: bool
) -> Decision | None:
    """What to go on from, or None to start from the beginning.

    Raises:
        UserError: no checkpoint is whole, or the newest whole one is refused.
    """
    folder = config.run_folder / CHECKPOINTS
    newest = latest(folder)
    if newest is None:
        if checkpoints(folder):
            raise UserError(
                f"{folder}: none of its {len(checkpoints(folder))} checkpoints is whole; "
                "remove the folder to start from the beginning"
            )
        return None
    return decide(newest, _wanted(config, corpora, axes, reset_state)).accepted()


def initial_checkpoint(config: RunConfig, corpora: Corpora) -> tuple[Path, list[str]] | None:
    """The checkpoint whose parameters a run begins from; None: they are drawn.

    Returns:
        its folder, which is whole; and a text for each choice of the model that differs and may.

    Raises:
        UserError: there is none where `initial` says, or it is of another model or tokenizer.
    """
    if config.initial is None:
        return None
    saved = open_saved(config.initial)
    if saved.tokenizer.hash != corpora.tokenizer.hash:
        raise UserError(
            f"initial: {config.initial} was trained with another tokenizer than "
            f"{corpora.location} was made with; prepare that corpus with --tokenizer "
            f"{saved.run_folder / TOKENIZER}"
        )
    changes = check_same_model(saved.config.model, config.model, f"initial: {config.initial}")
    return saved.folder, [f"unlike there: {change}" for change in changes]


def explain(path: Path, config: RunConfig, axes: Axes, reset_state: bool) -> Decision:
    """What `train` would do with a checkpoint, or with a run folder's newest whole one.

    Raises:
        UserError: there is none, it is damaged, or the corpora cannot be opened.
    """
    folder, corpora = find_checkpoint(path), open_corpora(config.data, check=False)
    decision = decide(folder, _wanted(config, corpora, axes, reset_state))
    try:
        check_mesh(config, corpora.tokenizer.vocabulary, axes)
        check_corpora(config, corpora)
    except UserError as error:
        return replace(decision, refusals=(str(error), *decision.refusals))
    return decision


def _wanted(config: RunConfig, corpora: Corpora, axes: Axes, reset_state: bool) -> Wanted:
    return Wanted(
        config,
        axes,
        corpora.tokenizer.vocabulary,
        corpora.tokenizer.hash,
        corpora.fingerprint,
        corpora.location,
        reset_state,
    )
