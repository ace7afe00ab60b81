"""`rlt-dist bench generation`: a trained model that goes on and on."""

from pathlib import Path
from typing import Annotated

import typer

from rlt_dist.cli.bench import AsJson, Threads, usable_threads, warn_disturbed


def generation(
    run: Annotated[Path, typer.Argument(help="A run folder, or one of its checkpoints.")],
    tokens: Annotated[int, typer.Option(min=1, help="How many tokens are generated.")] = 4096,
    every: Annotated[int, typer.Option(min=1, help="Tokens between two measurements.")] = 512,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Generate for long, and show what a token costs and what the state takes meanwhile.

    One lane, one token at a time. State grows until memory_len positions are held, then no more.

    Example: `rlt-dist bench generation runs/rlt --tokens 8192 --threads 1`
    """
    from dataclasses import asdict

    from rlt_dist.bench.compare import torch_threads
    from rlt_dist.bench.generation import long_generation
    from rlt_dist.bench.timing import Disturbance
    from rlt_dist.inference.load import load_trained
    from rlt_dist.util.records import to_json

    trained, count = load_trained(run), usable_threads(threads)
    with torch_threads(count), Disturbance() as disturbance:
        for part in long_generation(trained, tokens, every):
            if as_json:
                print(to_json({"threads": count} | asdict(part)), flush=True)
            else:
                typer.echo(
                    f"{part.tokens:>9,} tokens  {part.seconds * 1e3:8.2f} ms a token  "
                    f"state {part.state_bytes / 2**20:8.3f} MiB  "
                    f"process {part.resident_bytes / 2**20:7,.0f} MiB"
                )
    warn_disturbed(disturbance.cores)
