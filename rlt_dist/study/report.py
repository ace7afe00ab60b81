"""A run's one-page report: its numbers gathered, and the page made of them."""

import math
import pickle
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from rlt_dist import __version__
from rlt_dist.checkpoint.load import stored_tensors
from rlt_dist.checkpoint.manifest import checkpoints, read_manifest
from rlt_dist.checkpoint.run_folder import (
    CHECKPOINTS,
    CONFIG,
    EVALUATIONS,
    METRICS,
)
from rlt_dist.config.load import load_typed
from rlt_dist.config.model import GruConfig, ModelConfig, RltConfig
from rlt_dist.config.run import RunConfig
from rlt_dist.util.errors import UserError
from rlt_dist.util.records import read_records

SAMPLE = "sample.txt"
ENDS = 20
"""Steps whose mean is called the first and the last loss: one step's is mostly noise."""

_LONGEST_SAMPLE = 8000
_MEASURED = {"step", "split", "state", "segment", "tokens", "loss", "perplexity", "bits_per_byte"}
_MEASURED |= {"lanes", "max_tokens", "data"}
_UNSHOWABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


class Fact(NamedTuple):
    """One key number, as text; the note says what the number leaves open."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Comparison:
    """The newest evaluations of one kind: with the state carried and with it cut."""

    split: str
    segment: int
    choices: str
    carried: dict[str, Any] | None = None
    cut: dict[str, Any] | None = None

    @property
    def alike(self) -> bool:
        """Whether both were measured, at the same step and on as many tokens."""
        if self.carried is None or self.cut is None:
            return False
        return all(self.carried[key] == self.cut[key] for key in ("step", "tokens"))

    def either(self, key: str) -> str:
        """A whole number of both evaluations, or the two where they differ."""
        found = [record[key] for record in (self.carried, self.cut) if record]
        return " / ".join(f"{value:,}" for value in dict.fromkeys(found))

    def value(self, state: str, key: str) -> float | None:
        """One measured number; None where it was not measured."""
        record: dict[str, Any] = getattr(self, state) or {}
        return record.get(key)

    def measured(self, key: str) -> bool:
        """Whether the number is there at all, carried or cut."""
        return any(self.value(state, key) is not None for state in ("carried", "cut"))

    def saved(self, key: str) -> float | None:
        """How much lower the number is with the state carried; None if not comparable."""
        carried, cut = self.value("carried", key), self.value("cut", key)
        return cut - carried if self.alike and carried is not None and cut is not None else None

    @property
    def sentence(self) -> str | None:
        """What carrying the state is worth, in words; None if not comparable."""
        for key, unit in (("bits_per_byte", "bits per byte"), ("loss", "nats per token")):
            saved, cut = self.saved(key), self.value("cut", key)
            if saved is not None and cut:
                verb = "saves" if saved >= 0 else "costs"
                amount = f"{abs(saved):.4f} {unit} ({abs(saved / cut):.1%})"
                what = f"{self.split}, segments of {self.segment:,} tokens"
                return f"Carrying the state {verb} {amount} on {what}."
        return None


@dataclass(frozen=True)
class RunReport:
    """Everything that the page shows of a run.

    Attributes:
        records: one a step, in order; at least one.
        parameters: of the newest checkpoint's model; None if there is no readable checkpoint.
        sample: generated text, fit to be shown; None if none was kept.
        last_step: when the last step was recorded.
    """

    folder: Path
    config: RunConfig
    records: list[dict[str, Any]]
    comparisons: list[Comparison]
    parameters: int | None
    sample: str | None
    last_step: datetime

    @property
    def title(self) -> str:
        """The model's kind in words."""
        return model_kind(self.config.model)

    @property
    def shape(self) -> str:
        """The model's size in words."""
        return model_shape(self.config.model)

    @property
    def findings(self) -> list[str]:
        """What carrying the state is worth to the model as it was trained."""
        plain = [row.sentence for row in self.comparisons if not row.choices]
        return [sentence for sentence in plain if sentence]

    @property
    def commands(self) -> list[str]:
        """What a person types to get the same run and its page in a new folder."""
        again = shlex.quote(f"{self.folder}-again")
        config = shlex.quote(str(self.folder / CONFIG))
        return [f"rlt-dist train {config} run_folder={again}", f"rlt-dist report {again}"]


def gather(run: Path) -> RunReport:
    """Read a run folder.

    Raises:
        UserError: it is not a run folder, its metrics are damaged, or it has none yet.
    """
    if not (run / CONFIG).is_file():
        raise UserError(f"{run}: is not a run folder (no {CONFIG}); give what `train` wrote")
    records = read_records(run / METRICS)
    if not records:
        command = f"rlt-dist train {run / CONFIG}"
        raise UserError(f"{run}: no step is recorded yet; train first, with `{command}`")
    return RunReport(
        folder=run,
        config=load_typed(run / CONFIG, RunConfig),
        records=records,
        comparisons=compare(read_records(run / EVALUATIONS)),
        parameters=count_parameters(run),
        sample=_sample(run / SAMPLE),
        last_step=datetime.fromtimestamp((run / METRICS).stat().st_mtime, UTC),
    )


def compare(evaluations: Iterable[dict[str, Any]]) -> list[Comparison]:
    """Pair carried with cut, the newest of each; one row per split, segment and choices."""
    rows: dict[tuple[str, int, str], Comparison] = {}
    for record in evaluations:
        choices = {key: value for key, value in record.items() if key not in _MEASURED}
        words = ", ".join(f"{key} {value}" for key, value in sorted(choices.items()))
        key = (record["split"], record["segment"], words)
        row = rows.get(key, Comparison(*key))
        carried = record["state"] == "carried"
        rows[key] = replace(row, carried=record) if carried else replace(row, cut=record)
    return list(rows.values())


def key_numbers(report: RunReport) -> list[Fact]:
    """The numbers that say how the run went."""
    records, config = report.records, report.config
    losses = [record["loss"] for record in records]
    data, last = config.data, records[-1]
    ends = f"nats per token, mean of {min(ENDS, len(losses))}"
    speed = median(record["tokens_per_second"] for record in records)
    return [
        Fact("Parameters", count(report.parameters), "" if report.parameters else "no checkpoint"),
        Fact("Steps", count(last["step"]), f"of {config.train.steps:,}"),
        Fact("Tokens", count(last["tokens"]), f"{data.lanes:,} lanes x {data.segment:,} a step"),
        Fact("Training time", duration(sum(r["seconds"] for r in records)), "steps alone"),
        Fact("First loss", number(mean(losses[:ENDS])), ends),
        Fact("Last loss", number(mean(losses[-ENDS:])), ends),
        *_validation_facts(records),
        Fact("Throughput", count(round(speed)), "tokens per second, median"),
        *_usage_facts(records),
        Fact("Precision", config.train.precision, f"seed {config.train.seed}"),
        Fact(
            "Skipped steps",
            count(sum(r["skipped"] for r in records)),
            "not finite, spike, unscored",
        ),
        Fact("Restarted lanes", count(sum(r["restarted_lanes"] for r in records)), ""),
    ]


def page(report: RunReport) -> str:
    """The whole page: one HTML file that needs nothing outside itself."""
    from jinja2 import Environment, PackageLoader

    from rlt_dist.study import figures

    loader = PackageLoader("rlt_dist", "study")
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["number"] = number
    return environment.get_template("report.html.jinja").render(
        report=report,
        facts=key_numbers(report),
        loss=figures.loss_figures(report.records),
        panels=figures.panels(report.records),
        configuration=report.config.to_yaml(),
        when=f"{report.last_step:%-d %B %Y, %H:%M} UTC",
        version=__version__,
    )


def model_kind(model: ModelConfig) -> str:
    """A model's kind in words, with B, its tokens per feedback."""
    if isinstance(model, GruConfig):
        return "GRU"
    if not isinstance(model, RltConfig):
        return "Transformer-XL"
    if not model.decoder_layers:
        return "Transformer"
    if model.feedback_from == "token":
        return "RLT, fed with tokens"
    if model.feedback == 0:
        return "RLT-0, no feedback"
    return f"RLT-{min(model.feedback, 2)}, B = {model.feedback}"


def model_shape(model: ModelConfig) -> str:
    """Layers, width and reach in words."""
    if isinstance(model, GruConfig):
        return f"{model.layers} layers, width {model.d_model:,}"
    reach = "whole documents" if model.memory_len is None else f"{model.memory_len:,}"
    tail = f"width {model.d_model:,}, {model.heads} heads, memory {reach}"
    if isinstance(model, RltConfig) and not model.decoder_layers:
        return f"{model.encoder_layers} layers, {tail}"
    if isinstance(model, RltConfig):
        tied = "tied " if model.tied else ""
        layers = f"{model.encoder_layers} encoder and {model.decoder_layers} decoder layers"
        return f"{tied}{layers}, {tail}, window {model.window}"
    return f"{model.layers} layers, {tail}"


def count_parameters(run: Path) -> int | None:
    """How many parameters the newest readable checkpoint holds; its data is not read."""
    for folder in reversed(checkpoints(run / CHECKPOINTS)):
        try:
            read_manifest(folder)
            tensors = stored_tensors(folder)
        except (UserError, OSError, EOFError, pickle.UnpicklingError):
            continue
        return sum(s.numel() for name, (s, _) in tensors.items() if name.startswith("model."))
    return None


def mean(values: Sequence[float]) -> float | None:
    """Mean of what is finite; None if nothing is."""
    finite = [value for value in values if math.isfinite(value)]
    return fmean(finite) if finite else None


def number(value: float | None, digits: int = 4) -> str:
    """A measured number; a dash where there is none."""
    return "-" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def count(value: int | None) -> str:
    """A whole number with thousands marked; large ones in millions or billions."""
    if value is None:
        return "-"
    for unit, name in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if value >= 10 * unit:
            return f"{value / unit:,.1f} {name}"
    return f"{value:,}"


def duration(seconds: float) -> str:
    """Hours, minutes and seconds, the two largest that are not zero."""
    hours, rest = divmod(round(seconds), 3600)
    minutes, left = divmod(rest, 60)
    if hours:
        return f"{hours:,} h {minutes} min"
    return f"{minutes} min {left} s" if minutes else f"{seconds:.1f} s"


def _validation_facts(records: list[dict[str, Any]]) -> list[Fact]:
    found = [r for r in records if "validation" in r and math.isfinite(r["validation"]["loss"])]
    if not found:
        return [Fact("Best validation loss", "-", "none"), Fact("Best bits per byte", "-", "none")]
    best = min(found, key=lambda record: record["validation"]["loss"])
    numbers, where = best["validation"], f"step {best['step']:,}"
    return [
        Fact("Best validation loss", number(numbers["loss"]), f"nats per token, {where}"),
        Fact("Best bits per byte", number(numbers.get("bits_per_byte")), f"validation, {where}"),
    ]


def _usage_facts(records: list[dict[str, Any]]) -> list[Fact]:
    """What steps made of the machines; the last two are known of logged steps of several ranks."""
    each = median(record["tokens_per_second_per_device"] for record in records)
    mfu = median(record["mfu"] for record in records)
    known = [record for record in records if "waiting" in record]
    shares = {
        axis: median(record["waiting"][axis] / record["seconds"] for record in known)
        for axis in (known[0]["waiting"] if known else ())
    }
    of_axes = ", ".join(f"{axis} {share:.1%}" for axis, share in shares.items() if share)
    bubble = median(record["bubble"] for record in known) if known else 0.0
    return [
        Fact("Per device", count(round(each)), "tokens per second, median"),
        Fact("MFU", f"{mfu:.1%}", "model FLOPs of the peak, median"),
        Fact("Waiting", f"{sum(shares.values()):.1%}", of_axes or "of a step, for messages"),
        Fact("Bubble", f"{bubble:.1%}", "of the pipeline's pass, median"),
    ]


def _sample(path: Path) -> str | None:
    """Generated bytes as text that a page can hold."""
    if not path.is_file():
        return None
    text = path.read_bytes().decode(errors="replace").replace("\r\n", "\n")
    shown = text if len(text) <= _LONGEST_SAMPLE else text[:_LONGEST_SAMPLE] + " …"
    return _UNSHOWABLE.sub("\ufffd", shown)
