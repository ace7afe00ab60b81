"""`rlt-dist chat`: talk with a trained model, and go on from where one was."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlt_dist.cli.numbers import MAX_SEED
from rlt_dist.util.errors import Trouble, UserError
from rlt_dist.util.files import check_writable

if TYPE_CHECKING:
    from rlt_dist.inference.conversation import Conversation, Speaker


def chat(
    run: Annotated[Path, typer.Argument(help="A run folder, or one of its checkpoints.")],
    say: Annotated[list[str], typer.Option(help="What the user says; repeat for several turns.")],
    system: Annotated[
        str | None, typer.Option(help="A message of the system, before all else.")
    ] = None,
    session: Annotated[
        Path | None,
        typer.Option(help="File of the conversation: gone on from if there, written at each turn."),
    ] = None,
    branch: Annotated[
        Path | None, typer.Option(help="New file to write instead; --session stays as it is.")
    ] = None,
    replay: Annotated[
        bool,
        typer.Option(
            help="Read all that was said anew, where the weights have changed. Transformer-XL "
            "without same_length may go on differently: its reach depends on how segments are cut."
        ),
    ] = False,
    tokens: Annotated[int, typer.Option(min=1, help="How many tokens a reply has at most.")] = 200,
    temperature: Annotated[float, typer.Option(help="0: the most likely token; 1: plain.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Only the k most likely tokens.")] = None,
    top_p: Annotated[float, typer.Option(help="Only the most likely p of probability.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Same seed, same replies.")] = 0,
) -> None:
    """Say something, and get a reply; the model's whole state is kept in the session's file.

    Sensible with a model that was fine-tuned on conversations (`data prepare --format chat`).

    Example: `rlt-dist chat runs/tuned --say 'What is carried?' --session talk.safetensors`
    """
    from rlt_dist.inference.conversation import Speaker
    from rlt_dist.inference.load import load_trained
    from rlt_dist.inference.sampling import Sampling

    sampling, kept = Sampling(temperature, top_k, top_p), _kept(session, branch)
    resumed = session is not None and os.path.isfile(session)
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
        # Before it is shown: whatever was seen can be gone on from.
        if kept is not None:
            kept.write(speaker, held)
        typer.echo(speaker.text(episode).decode(errors="replace"))


def _kept(session: Path | None, branch: Path | None) -> "_Kept | None":
    if branch is not None and os.path.exists(branch):
        raise UserError(f"{branch}: is there already; give --branch a new file")
    path = branch or session
    return None if path is None else _Kept(path)


class _Kept:
    """A file that a conversation is written to again and again, unless another process does so."""

    def __init__(self, path: Path) -> None:
        check_writable(path)
        # A link would be replaced by a file.
        self._path = Path(os.path.realpath(path))
        self._known = self._mark()

    def write(self, speaker: "Speaker", conversation: "Conversation") -> None:
        """Raises Trouble where the file is not what it was when it was last looked at."""
        if self._mark() != self._known:
            raise Trouble(
                f"{self._path}: was changed by another process meanwhile; give --branch to keep "
                "this conversation elsewhere"
            )
        speaker.save(conversation, self._path)
        self._known = self._mark()

    def _mark(self) -> tuple[int, int] | None:
        """What another file there, or a write to this one, changes; None: there is none."""
        try:
            status = self._path.stat()
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_mtime_ns
