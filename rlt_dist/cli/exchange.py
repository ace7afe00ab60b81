"""`rlt-dist checkpoint export` and `import`: models in and out."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from rlt_dist.cli.checkpoint import RunOrCheckpoint


class Type(StrEnum):
    """Types of exported numbers."""

    float64 = "float64"
    float32 = "float32"
    bfloat16 = "bfloat16"


def export(
    checkpoint: RunOrCheckpoint,
    output: Annotated[Path, typer.Option(help="Folder to write; new or empty.")],
    dtype: Annotated[
        Type | None, typer.Option(help="Type of the numbers [default: as in the checkpoint].")
    ] = None,
    shard_gib: Annotated[
        float, typer.Option(min=1e-6, help="Above so many GiB, several files and an index.")
    ] = 5.0,
) -> None:
    """Write a model for others: safetensors, configuration, tokenizer and a model card.

    Any mesh's checkpoint is exported by one process, which holds one file's tensors at a time and
    never the optimizer. RLT's tensors have the names of this project, Transformer-XL's those of its
    authors' code; weights used in two places are stored once, and the metadata say under `tied`
    what else they are. The folder appears when it is whole. `rlt-dist checkpoint import` reads it
    back, to the last bit.

    Examples:

    `rlt-dist checkpoint export runs/rlt --output runs/exported`

    `rlt-dist checkpoint export runs/rlt/checkpoints/step-00000200 --output out --dtype bfloat16`
    """
    import torch

    from rlt_dist.checkpoint.exchange.export import export_model
    from rlt_dist.checkpoint.saved_run import open_saved
    from rlt_dist.util.files import check_vacant

    check_vacant(output)
    saved = open_saved(checkpoint)
    wished = None if dtype is None else getattr(torch, dtype.value)
    written = export_model(saved, output, wished, round(shard_gib * 2**30))
    files = "1 file" if len(written.files) == 1 else f"{len(written.files)} files"
    typer.echo(
        f"{output}: step {saved.facts.step}, {written.parameters:,} parameters in {files} of "
        f"{written.bytes / 2**20:,.1f} MiB"
    )


def import_(
    source: Annotated[
        Path,
        typer.Argument(help="An exported folder, a safetensors file, or a state dict (.pt)."),
    ],
    output: Annotated[Path, typer.Option(help="Run folder to make; new or empty.")],
    config: Annotated[Path, typer.Option(help="Configuration of the run, a YAML file.")],
    trust_pickle: Annotated[
        bool,
        typer.Option(
            "--trust-pickle",
            help="Unpickle all that a file of torch.save holds. It may run any code of whoever "
            "made it.",
        ),
    ] = False,
) -> None:
    """Make a run folder that begins from a model's parameters, for train, eval and generate.

    It holds a checkpoint of step 0 with a fresh optimizer and state; `train` goes on from it. Read
    are folders of `rlt-dist checkpoint export`, single safetensors files with the same names, and
    state dicts that torch.save wrote, such as the Transformer-XL authors' (kimiyoung/
    transformer-xl): save `model.state_dict()` there. Names, shapes, vocabulary and configuration
    are checked one by one, and nothing is written where something does not fit. The configuration's
    run_folder is replaced by --output.

    Examples:

    `rlt-dist checkpoint import runs/exported --output runs/again --config configs/rlt_stdlib.yaml`

    `rlt-dist checkpoint import theirs.pt --output runs/large --config configs/txl_wt103_large.yaml`
    """
    from rlt_dist.checkpoint.exchange.source import read_source
    from rlt_dist.config.load import load_typed
    from rlt_dist.config.run import RunConfig
    from rlt_dist.train.adopt import adopt
    from rlt_dist.util.files import check_vacant

    check_vacant(output)
    run = load_typed(config, RunConfig).model_copy(update={"run_folder": output})
    for note in adopt(read_source(source, trust_pickle=trust_pickle), run):
        typer.echo(f"note: {note}")
    typer.echo(f"{output}: step 0 of a run; go on with `rlt-dist train {output}/config.yaml`")
