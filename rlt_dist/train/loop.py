"""The training loop: step, validate, record, save."""

import math
import sys
import time
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from rlt_dist.data.stream.loader import LaneLoader
from rlt_dist.inference.evaluate import Evaluation, evaluate, scorer_of, to_evaluation
from rlt_dist.mesh.collectives import all_sum, together
from rlt_dist.models.state import mean_squares
from rlt_dist.train.reporter import Reporter
from rlt_dist.train.schedule import learning_rate
from rlt_dist.train.session import Session
from rlt_dist.train.step import StepResult, train_step
from rlt_dist.util.errors import UserError


def run_training(session: Session) -> None:
    """Train from the session's step to the last, saving on the way and at the end.

    Raises:
        UserError: too many steps in a row had to be skipped, or the disk is full.
    """
    config, world = session.config, session.world
    with (
        together(world, lambda: session.loader("train", session.cursors)) as loader,
        Reporter(config, session.step, session.notes) if world.leads else nullcontext() as reporter,
    ):
        skips = 0
        while session.step < config.train.steps:
            record, result = _one_step(session, loader, reporter)
            if reporter:
                reporter.step(record, result)
            skips = skips + 1 if result.skipped else 0
            if skips >= config.train.max_skips:
                raise _too_many_skips(session, skips)
            if _due(session, config.checkpoint.every):
                session.save()


def _one_step(
    session: Session, loader: LaneLoader, reporter: Reporter | None
) -> tuple[dict[str, Any], StepResult]:
    """Advance the session by one step; the record of it."""
    config, step = session.config, session.step + 1
    began = time.monotonic()
    batch = loader.next().to(session.world.device)
    skipped_documents, notices = loader.take_notices()
    _tell(session, notices, reporter)
    rate = learning_rate(config, step)
    result, session.state = train_step(
        session.local_model,
        session.optimizer,
        batch,
        session.state,
        config=config,
        mesh=session.mesh,
        step=step,
        learning_rate=rate,
    )
    tokens = config.data.lanes * config.data.segment
    session.step, session.cursors = step, batch.cursors
    session.tokens += tokens
    seconds = time.monotonic() - began
    record: dict[str, Any] = {
        "step": step,
        "loss": result.loss,
        "learning_rate": rate,
        "gradient_norm": result.gradient_norm,
        "tokens": session.tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "skipped": int(result.skipped),
        "restarted_lanes": result.restarted_lanes,
    }
    if config.data.skip_bad_shards:
        own = torch.tensor(skipped_documents, device=session.world.device)
        record["skipped_documents"] = int(all_sum(own, session.mesh.data))
    if _due(session, config.train.log_every):
        record["state_norm"] = _state_norms(session)
    if config.validation.every is not None and _due(session, config.validation.every):
        record["validation"] = _numbers(_validate(session))
    return record, result


def _tell(session: Session, notices: list[str], reporter: Reporter | None) -> None:
    """Show what happened to the data of this process's lanes; others may read the same ones."""
    place = session.mesh.place
    if place.stage or place.tensor:
        return
    for notice in notices:
        if reporter:
            reporter.say(notice)
        else:
            print(f"rank {session.world.rank}: {notice}", file=sys.stderr)


def _due(session: Session, every: int) -> bool:
    return session.step % every == 0 or session.step == session.config.train.steps


def _validate(session: Session) -> Evaluation:
    """Loss on the validation split, with lanes, cursors and state of its own."""
    loader = together(session.world, lambda: session.loader("validation"))
    segments = range(session.config.validation.segments)
    batches = (loader.next().to(session.world.device) for _ in segments)
    scorer = scorer_of(session.local_model, session.mesh, session.config)
    sums = evaluate(scorer, batches, session.byte_lengths)
    return to_evaluation(all_sum(sums, session.mesh.data))


def _numbers(evaluation: Evaluation) -> dict[str, float]:
    numbers = {"loss": evaluation.loss, "perplexity": evaluation.perplexity}
    if evaluation.bits_per_byte is not None:
        numbers["bits_per_byte"] = evaluation.bits_per_byte
    return numbers


def _state_norms(session: Session) -> dict[str, float]:
    """Root mean square of every state tensor over all lanes, wherever its layer and heads are."""
    own = {name: square.item() for name, square in mean_squares(session.state).items()}
    of_all: list[dict[str, float]] = [{}] * session.world.size
    dist.all_gather_object(of_all, own, group=session.world.group)
    found: dict[str, list[float]] = {}
    for of_one in of_all:
        for name, square in of_one.items():
            found.setdefault(name, []).append(square)
    # All who hold some of a tensor hold as much of it, so its mean is that of theirs.
    return {name: math.sqrt(sum(squares) / len(squares)) for name, squares in found.items()}


def _too_many_skips(session: Session, skips: int) -> UserError:
    error = UserError(
        f"loss or gradient was not finite in {skips} steps in a row, up to step {session.step}; "
        "lower optimizer.learning_rate or raise schedule.warmup, and start from an earlier "
        f"checkpoint of {session.config.run_folder}"
    )
    error.shared = True
    return error
