"""`rlt-dist chat`: talk with a trained model, and go on from where one was."""

import os
from pathlib import Path
from typing import Annotated

import typer

from rlt_dist.cli.numbers import MAX_SEED


def chat(
    run: Annotated[Path, typer.Argument(help="A run folder, or one of its checkpoints.")],
    say: Annotated[list[str], typer.Option(help="What the user says; repeat for several turns.")],
    system: Annotated[
        str | None, typer.Option(help="A message of the system, before all else.")
    ] = None,
    session: Annotated[
        Path | None,
        typer.Option(help="File of the conversation: gone on from if it is there, then written."),
    ] = None,
    branch: Annotated[
        Path | None, typer.Option(help="Write it here instead, and leave --session as it is.")
    ] = None,
    replay: Annotated[
        bool, typer.Option(help="Read all that was said anew, where the weights have changed.")
    ] = False,
    tokens: Annotated[int, typer.Option(min=1, help="How many tokens a reply has at most.")] = 200,
    temperature: Annotated[float, typer.Option(help="0: the most likely token; 1: plain.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Only the k most likely tokens.")] = None,
    top_p: Annotated[float, typer.Option(help="Only the most likely p of probability.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Same seed, same replies.")] = 0,
) -> None:
    """Say something, and get a reply; the model's whole state is kept in the session's file.

    Sensible with a model that was fine-tuned on conversations (`data prepare --format chat`).

    Example: `rlt-dist chat runs/chat --say 'What is carried?' --session talk.safetensors`
    """
    from rlt_dist.inference.conversation import Speaker
    from rlt_dist.inference.load import load_trained
    from rlt_dist.inference.sampling import Sampling
    from rlt_dist.util.errors import UserError

    sampling, resumed = Sampling(temperature, top_k, top_p), bool(session and session.exists())
    if system is not None and resumed:
        raise UserError(f"{session}: has begun already, and --system comes before all else")
    if (branch is not None or replay) and not resumed:
        raise UserError("--branch and --replay go on from a conversation; give its --session")
    speaker = Speaker(load_trained(run))
    held = speaker.begin()
    if session is not None and resumed:
        held = speaker.restore(session, replay=replay)
    if system is not None:
        held = speaker.tell(held, "system", os.fsencode(system))
    for text in say:
        held = speaker.tell(held, "user", os.fsencode(text))
        held, episode = speaker.reply(held, sampling, tokens, seed)
        typer.echo(speaker.text(episode).decode(errors="replace"))
    target = branch or session
    if target is not None:
        speaker.save(held, target)
