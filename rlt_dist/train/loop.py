"""The training loop: agree to go on, step, measure, record, guard, save."""

import time
from contextlib import nullcontext
from typing import Any

import torch

from rlt_dist.checkpoint.saver import Saver
from rlt_dist.data.stream.loader import LaneLoader
from rlt_dist.inference.evaluate import Evaluation, evaluate, scorer_of, to_evaluation
from rlt_dist.mesh.collectives import all_sum, together
from rlt_dist.train.guard import Guard, GuardedStep
from rlt_dist.train.norms import StateNorms
from rlt_dist.train.reporter import Reporter
from rlt_dist.train.schedule import learning_rate
from rlt_dist.train.session import Session
from rlt_dist.train.step import StepResult, train_step
from rlt_dist.train.stop import NO_WISHES, Stop, Wishes
from rlt_dist.train.usage import Usage
from rlt_dist.train.watchdog import Watchdog
from rlt_dist.util.log import warn


def run_training(session: Session, wishes: Wishes = NO_WISHES) -> bool:
    """Train from the session's step to the last, saving on the way and at the end.

    Args:
        wishes: what may ask this process to stop; each process has its own.

    Returns:
        whether the last step is done; if not, all agreed to stop, and what was done is saved.

    Raises:
        UserError: the guard has stopped the run, or it could not be saved.
    """
    config, world = session.config, session.world
    guard, norms = Guard(config, session.guard), StateNorms(session.mesh)
    usage = Usage(config, session.vocabulary, session.mesh, session.memory_before)
    stop, start, saved = Stop(session, wishes), session.step, session.step
    with (
        together(world, lambda: session.loader("train", session.cursors)) as loader,
        session.saver() as saver,
        Reporter(config, session.step, session.notes) if world.leads else nullcontext() as reporter,
        Watchdog(world, config.run_folder, config.guard.step_timeout) as watchdog,
    ):
        while session.step < config.train.steps and not stop.agreed(saver):
            before = session.cursors
            watchdog.at(f"step {session.step + 1}", seldom=session.step == start)
            with stop.timing_step():
                record, result = _one_step(session, loader, reporter, guard, usage)
                _measure(session, norms, usage, watchdog, record, result)
            _tell_saves(saver, stop, record, reporter)
            if reporter:
                reporter.step(record, result)
            _consult(guard, session, GuardedStep(record, result, session.local, before))
            if _due(session, config.checkpoint.every):
                watchdog.at(f"saving step {session.step}", seldom=True)
                session.save(saver)
                saved = session.step
        if reporter and stop.why:
            reporter.say(f"{stop.why}; the same command goes on from there")
        watchdog.at(f"saving step {session.step}", seldom=True)
        if saved < session.step:
            session.save(saver)
        saver.wait()
        _tell_saves(saver, stop, {}, reporter)
        saver.check()
        if reporter:
            reporter.ended(stop.why, world.watch.recorder)
    return stop.why is None


def _one_step(
    session: Session, loader: LaneLoader, reporter: Reporter | None, guard: Guard, usage: Usage
) -> tuple[dict[str, Any], StepResult]:
    """Advance the session by one step; the record of it."""
    config, step = session.config, session.step + 1
    began = time.monotonic()
    batch = loader.next().to(session.world.device)
    skipped_documents, notices = loader.take_notices()
    _tell(session, notices, reporter)
    rate = learning_rate(config, step)
    with usage.metered():
        result, session.state = train_step(
            session.local_model,
            session.optimizer,
            batch,
            session.state,
            config=config,
            mesh=session.mesh,
            step=step,
            learning_rate=rate,
            judge=guard.judge,
        )
    tokens = config.data.tokens_per_step
    session.step = session.world.watch.recorder.step = step
    session.cursors = batch.cursors
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
        **usage.speed(tokens / seconds),
        "skipped": int(result.skipped),
        "restarted_lanes": result.restarted_lanes,
    }
    if config.data.skip_bad_shards:
        own = torch.tensor(skipped_documents, device=session.world.device)
        record["skipped_documents"] = int(all_sum(own, session.mesh.data))
    return record, result


def _measure(
    session: Session,
    norms: StateNorms,
    usage: Usage,
    watchdog: Watchdog,
    record: dict[str, Any],
    result: StepResult,
) -> None:
    """Add to a step's record what is not measured at every step."""
    config = session.config
    if result.skipped or _due(session, config.train.log_every):
        record |= usage.measure(result.passed)
        record["state_norm"] = norms.measure(session.state)
    if config.validation.every is not None and _due(session, config.validation.every):
        watchdog.at(f"validation after step {session.step}", seldom=True)
        record["validation"] = _numbers(_validate(session, watchdog))


def _consult(guard: Guard, session: Session, step: GuardedStep) -> None:
    """Let the guard remember a step, and end the run if it says so."""
    why = guard.note(step)
    session.guard = guard.facts
    if why is not None:
        raise guard.stop(why, session.world)


def _tell(session: Session, notices: list[str], reporter: Reporter | None) -> None:
    """Show what happened to the data of this process's lanes; others may read the same ones."""
    place = session.mesh.place
    if place.stage or place.tensor:
        return
    for notice in notices:
        if reporter:
            reporter.say(notice)
        else:
            warn(notice)


def _tell_saves(
    saver: Saver, stop: Stop, record: dict[str, Any], reporter: Reporter | None
) -> None:
    """Show what became of saves; the newest is told in the record of the step that saw its end."""
    finished = saver.finished()
    for saved in finished:
        stop.note_save(saved.seconds)
        record["checkpoint"] = {
            "step": saved.step,
            "blocked_seconds": saved.blocked,
            "seconds": saved.seconds,
            "bytes": saved.bytes,
            "failed": int(saved.failure is not None),
        }
    if reporter:
        reporter.saves(finished)


def _due(session: Session, every: int) -> bool:
    return session.step % every == 0 or session.step == session.config.train.steps


def _validate(session: Session, watchdog: Watchdog) -> Evaluation:
    """Loss on the validation split, with lanes, cursors and state of its own."""
    loader = together(session.world, lambda: session.loader("validation"))
    segments = watchdog.each(range(session.config.validation.segments))
    batches = (loader.next().to(session.world.device) for _ in segments)
    scorer = scorer_of(session.local_model, session.mesh, session.config)
    sums = evaluate(scorer, batches, session.byte_lengths)
    return to_evaluation(all_sum(sums, session.mesh.data))


def _numbers(evaluation: Evaluation) -> dict[str, float]:
    numbers = {"loss": evaluation.loss, "perplexity": evaluation.perplexity}
    if evaluation.bits_per_byte is not None:
        numbers["bits_per_byte"] = evaluation.bits_per_byte
    return numbers
