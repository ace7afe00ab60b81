"""The model card of an exported folder."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rlt_dist.checkpoint.run_folder import EVALUATIONS, TOKENIZER
from rlt_dist.checkpoint.saved_run import SavedRun
from rlt_dist.config.load import write_yaml
from rlt_dist.config.model import GruConfig, ModelConfig, RltConfig
from rlt_dist.util.records import read_records

_SECTIONS = ("model", "state", "optimizer", "schedule", "train")
_MEASURED = ("loss", "perplexity", "bits_per_byte")
_UNSHOWN = ("step", "data", "lanes", "max_tokens", *_MEASURED)


@dataclass(frozen=True)
class Written:
    """What was exported.

    Attributes:
        parameters: numbers, tied ones once.
        bytes: of all tensors.
        dtypes: of the tensors, such as `float32`.
        files: those that hold them.
    """

    parameters: int
    bytes: int
    dtypes: list[str]
    files: list[str]


def model_card(saved: SavedRun, written: Written, name: str) -> str:
    """What the model is, how it was trained and measured, and how it is used, as Markdown."""
    title, shape = describe(saved.config.model)
    paragraphs = [
        f"# {name}",
        f"{title}: {shape}; {written.parameters:,} parameters in {', '.join(written.dtypes)}, "
        f"vocabulary {saved.tokenizer.vocabulary:,}. Written by `rlt-dist checkpoint export`.",
        "## Training",
        _table(("", ""), _training(saved)),
        f"```yaml\n{write_yaml(_configuration(saved))}```",
        "## Evaluation",
        _evaluations(saved),
        "## Use",
        _use(name),
    ]
    return "\n\n".join(paragraphs) + "\n"


def describe(config: ModelConfig) -> tuple[str, str]:
    """What a model is called, and its shape in words."""
    if isinstance(config, GruConfig):
        shape = f"{config.layers} layers, width {config.d_model}"
        return "Gated recurrent units (Cho et al., EMNLP 2014)", shape
    if isinstance(config, RltConfig) and not config.decoder_layers:
        shape = f"{config.encoder_layers} layers, width {config.d_model}"
        return "A plain Transformer with rotary positions", shape
    if isinstance(config, RltConfig):
        kind = f"RLT-{min(config.feedback, 2)}"
        if config.feedback_from == "token":
            kind = "RLT fed with tokens"
        stacks = f"{config.encoder_layers} encoder and {config.decoder_layers} decoder layers"
        tied = ", tied" * config.tied
        shape = f"{stacks}{tied}, width {config.d_model}, window {config.window}"
        if config.feedback > 1:
            shape += f", fed back every {config.feedback} tokens"
        return f"{kind}, a Recurrent Looped Transformer (arXiv 2610.07591)", shape
    shape = f"{config.layers} layers, width {config.d_model}, memory {config.memory_len}"
    if config.cutoffs:
        shape += f", adaptive softmax with {len(config.cutoffs) + 1} clusters"
    return "Transformer-XL (Dai et al., ACL 2019)", shape


def _training(saved: SavedRun) -> list[tuple[str, str]]:
    facts, tokenizer = saved.facts, saved.tokenizer
    return [
        ("optimizer steps", f"{facts.step:,}"),
        ("tokens", f"{facts.tokens:,}"),
        ("corpus fingerprint", f"`{facts.corpus}`"),
        ("tokenizer", f"{tokenizer.kind}, `{tokenizer.hash}`"),
    ]


def _configuration(saved: SavedRun) -> dict[str, Any]:
    """The run's, without what belongs to the machine: folders, caches, processes."""
    content = saved.config.model_dump(mode="json")
    data = {key: content["data"][key] for key in ("lanes", "segment", "max_document")}
    return {key: content[key] for key in _SECTIONS} | {"data": data}


def _evaluations(saved: SavedRun) -> str:
    """What `rlt-dist eval` measured of this step's parameters."""
    records = [
        record
        for record in read_records(saved.run_folder / EVALUATIONS)
        if record.get("step") == saved.facts.step
    ]
    if not records:
        return "None: `rlt-dist eval` was not run on this step before the export."
    known = dict.fromkeys(key for record in records for key in record)
    names = [key for key in known if key not in _UNSHOWN] + list(_MEASURED)
    rows = [[_shown(record.get(key)) for key in names] for record in records]
    return _table([name.replace("_", " ") for name in names], rows)


def _use(name: str) -> str:
    trained, tokenizer = "runs/imported", f"{name}/{TOKENIZER}"
    commands = [
        f"rlt-dist data prepare --input TEXTS --output runs/corpus --tokenizer {tokenizer}",
        f"rlt-dist checkpoint import {name} --output {trained} --config run.yaml",
        f"rlt-dist generate {trained} --prompt 'TEXT'",
        f"rlt-dist eval {trained} --state both",
        f"rlt-dist train {trained}/config.yaml",
    ]
    return (
        "`run.yaml` is the configuration of a run: its `model` as above, its `data.path` a corpus "
        "made with this folder's tokenizer. Training goes on from these parameters at step 0, with "
        f"a fresh optimizer and state.\n\n```bash\n{chr(10).join(commands)}\n```"
    )


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4f}"
    return f"{value:,}" if isinstance(value, int) else "" if value is None else str(value)
