"""`rlt-dist generate`: continue a prompt."""

import codecs
import os
from pathlib import Path
from typing import Annotated

import typer

from rlt_dist.cli.numbers import MAX_SEED


def generate(
    run: Annotated[Path, typer.Argument(help="A run folder, or one of its checkpoints.")],
    prompt: Annotated[
        str | None, typer.Option(help="Text to go on from.", show_default="a newline")
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="A file to go on from, instead of --prompt.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="How many tokens at most.")] = 200,
    temperature: Annotated[float, typer.Option(help="0: the most likely token; 1: plain.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Only the k most likely tokens.")] = None,
    top_p: Annotated[float, typer.Option(help="Only the most likely p of probability.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Same seed, same text.")] = 0,
) -> None:
    """Prefill a prompt, then sample; text appears as it is drawn.

    Example: `rlt-dist generate runs/rlt --prompt 'import os' --tokens 100 --top-p 0.95`
    """
    from rlt_dist.inference.generate import generate as continuation
    from rlt_dist.inference.load import load_trained
    from rlt_dist.inference.sampling import Sampling
    from rlt_dist.util.errors import UserError

    if prompt is not None and prompt_file is not None:
        raise UserError("--prompt and --prompt-file exclude each other; give one")
    if prompt_file is not None and not prompt_file.is_file():
        raise UserError(f"{prompt_file}: is no file; give --prompt TEXT or an existing file")
    typed = "\n" if prompt is None else prompt
    text = os.fsencode(typed) if prompt_file is None else prompt_file.read_bytes()
    sampling = Sampling(temperature, top_k, top_p)
    # A token may end inside a character: the decoder holds bytes back until it is whole.
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    typer.echo(decoder.decode(text), nl=False)
    for piece in continuation(load_trained(run), text, tokens, sampling, seed):
        typer.echo(decoder.decode(piece), nl=False)
    typer.echo(decoder.decode(b"", final=True))
