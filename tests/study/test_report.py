"""`rlt-dist report` from outside: what the page and the terminal say of a run folder."""

import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from torch.distributed import checkpoint as dcp
from typer.testing import CliRunner

from rlt_dist.checkpoint.manifest import Facts, Manifest, describe_files, write_manifest
from rlt_dist.cli.report import report
from rlt_dist.config.model import GruConfig, RltConfig, TransformerXLConfig
from rlt_dist.study.figures import smooth, state_panels, thin
from rlt_dist.study.report import compare, count, duration, model_kind, model_shape
from rlt_dist.util.errors import UserError

RLT = "{kind: rlt, d_model: 8, heads: 2, ffn: 8, encoder_layers: 1, decoder_layers: 2, "
CONFIG = f"""
run_folder: somewhere
model: {RLT}memory_len: 4, feedback: 4}}
data: {{path: runs/corpus, lanes: 2, segment: 64}}
optimizer: {{learning_rate: 3e-3}}
train: {{steps: 40}}
"""
SHAPE = {"d_model": 8, "heads": 2}
VOID = {"meta", "br", "link"}


class Page(HTMLParser):
    """A page's visible text and its attributes; complains of tags left open or closed twice."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.feed(source)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, _: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def a_step(step: int, loss: float, **more: Any) -> dict[str, Any]:
    skipped = int(not math.isfinite(loss))
    return {
        "step": step,
        "loss": loss,
        "learning_rate": 1e-3,
        "gradient_norm": math.inf if skipped else 1.0,
        "tokens": step * 128,
        "seconds": 0.5,
        "tokens_per_second": 200.0 + step,
        "tokens_per_second_per_device": (200.0 + step) / 4,
        "mfu": 0.25 + step / 1000,
        "skipped": skipped,
        "restarted_lanes": 2 * skipped,
        **more,
    }


def an_evaluation(state: str, bits: float | None, **more: Any) -> dict[str, Any]:
    facts = {"step": 40, "split": "test", "state": state, "segment": 64, "tokens": 999}
    return facts | {"loss": 3.0, "perplexity": 20.1, "bits_per_byte": bits} | more


def forty_steps() -> list[dict[str, Any]]:
    """Losses 8.0 then 4.0; step 7 is skipped; validation every 10 steps, best at step 30."""
    records = [a_step(s, math.nan if s == 7 else 8.0 if s <= 20 else 4.0) for s in range(1, 41)]
    waiting = dict.fromkeys(("pipeline", "replica"), 0.0) | {"data": 0.05, "tensor": 0.1}
    for record in records[9::10]:
        record |= {"waiting": waiting, "bubble": 0.125}
    for step, loss in ((10, 7.0), (20, 6.0), (30, 4.5678), (40, 5.0)):
        numbers = {"loss": loss, "perplexity": math.exp(loss), "bits_per_byte": loss / 2}
        norms = {"s": 9.0, "decoder.0.k": 1.0, "decoder.1.k": 3.0, "decoder.0.v": 2.0}
        records[step - 1] |= {"validation": numbers, "state_norm": norms}
    return records


def a_run(folder: Path, records: list[dict[str, Any]], *evaluations: dict[str, Any]) -> Path:
    run = folder / "run"
    run.mkdir()
    (run / "config.yaml").write_text(CONFIG)
    for name, lines in (("metrics", records), ("evaluations", evaluations)):
        if lines:
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (run / f"{name}.jsonl").write_text(text)
    return run


def run_report(*arguments: object) -> str:
    """What the terminal shows, in one line so that wrapping does not matter."""
    app = typer.Typer()
    app.command()(report)
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0
    return " ".join(result.output.split())


def page_of(run: Path) -> Page:
    run_report(run)
    return Page((run / "report.html").read_text())


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of a whole run."""
    run = a_run(tmp_path_factory.mktemp("whole"), forty_steps())
    run_report(run)
    return (run / "report.html").read_text()


def test_page_and_terminal_hold_the_same_numbers(tmp_path: Path) -> None:
    evaluations = an_evaluation("carried", 1.9), an_evaluation("cut", 2.0)
    run = a_run(tmp_path, forty_steps(), *evaluations)
    terminal = run_report(run)
    shown = Page((run / "report.html").read_text()).text
    for text in (terminal, shown):
        assert "RLT-2, B = 4" in text
        assert "Steps 40 of 40" in text
        assert "Tokens 5,120" in text
        assert "First loss 8.0000" in text
        assert "Last loss 4.0000" in text
        assert "Best validation loss 4.5678 nats per token, step 30" in text
        assert "Best bits per byte 2.2839" in text
        assert re.search(r"Throughput 22[01] tokens per second", text)
        assert "Skipped steps 1" in text
        assert "Restarted lanes 2" in text
        assert "MFU 27.0%" in text or "MFU 27.1%" in text
        assert "Per device 55 tokens per second" in text
        assert "Waiting 30.0% data 10.0%, tensor 20.0%" in text
        assert "Bubble 12.5%" in text
        assert "saves 0.1000 bits per byte (5.0%) on test, segments of 64 tokens." in text
        assert "1.9000 2.0000 0.1000" in text
    assert f"rlt-dist train {run}/config.yaml run_folder={run}-again" in shown
    assert "learning_rate: 0.003" in shown
    assert terminal.endswith("report.html")


def test_page_stands_alone(source: str) -> None:
    page = Page(source)
    fetched = {"src", "srcset", "action", "data", "xlink:href", "href"}
    links = [value for name, value in page.attributes if name in fetched]
    assert links
    assert all(link.startswith("#") for link in links)
    assert "@import" not in source
    assert not re.search(r"url\((?!#)", source)
    ids = [value for name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    assert {link[1:] for link in links} <= set(ids)


def test_curves_take_their_colours_from_the_page(source: str) -> None:
    styles = ";".join(value for name, value in Page(source).attributes if name == "style")
    names = ("ink", "quiet", "rule", "first", "second", "warn")
    colours = set(re.findall(r"(?:fill|stroke): ([^;]+)", styles))
    assert colours <= {"none"} | {f"var(--{name})" for name in names}


def test_page_names_axes_and_units(source: str) -> None:
    shown = Page(source).text
    for label in ("loss (nats per token)", "tokens per second", "root mean square", "step"):
        assert label in shown
    for name in ("Fed-back state", "Decoder window", "keys", "values", "validation", "skipped"):
        assert name in shown


def test_sample_is_text_not_markup(tmp_path: Path) -> None:
    run = a_run(tmp_path, forty_steps())
    (run / "sample.txt").write_bytes(b"<script>alert(1)</script>\n\tif a &lt; b:\xff\x00")
    run_report(run)
    source = (run / "report.html").read_text()
    assert "<script>" not in source
    assert "&lt;script&gt;alert(1)&lt;/script&gt;\n\tif a &amp;lt; b:\ufffd\ufffd" in source


def test_a_long_sample_is_cut(tmp_path: Path) -> None:
    run = a_run(tmp_path, forty_steps())
    (run / "sample.txt").write_text("ab" * 100_000)
    assert 1000 < len(max(page_of(run).texts, key=len)) < 10_000


@pytest.mark.parametrize("loss", [3.25, math.nan])
def test_one_step_is_enough(tmp_path: Path, loss: float) -> None:
    shown = page_of(a_run(tmp_path, [a_step(1, loss)])).text
    assert f"First loss {'-' if math.isnan(loss) else loss} " in shown.replace("3.2500", "3.25")
    assert "Best validation loss - none" in shown
    assert "Parameters - no checkpoint" in shown
    assert "Not evaluated yet" in shown
    assert "Fed-back state" not in shown
    assert "Sample" not in shown


def test_parameters_are_counted_in_the_newest_readable_checkpoint(tmp_path: Path) -> None:
    run = a_run(tmp_path, forty_steps())
    folder = run / "checkpoints" / "step-00000020"
    tensors = {"model.a": torch.zeros(30, 41), "model.b": torch.zeros(4), "state.s": torch.zeros(9)}
    dcp.save(tensors, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    facts = Facts(
        step=20, tokens=1, tokenizer="t", corpus="c", identity={}, mesh="1x1x1", engine="torch"
    )
    files = describe_files(folder.iterdir())
    write_manifest(folder, Manifest(facts=facts, tensor_bytes=4972, files=files))
    (run / "checkpoints" / "step-00000040").mkdir()
    assert "Parameters 1,234" in run_report(run)


def test_the_newest_evaluation_of_each_kind_counts() -> None:
    older, newer = an_evaluation("carried", 1.9, step=20), an_evaluation("carried", 1.5)
    longer = an_evaluation("carried", 1.4, memory_len=512, same_length=True)
    rows = compare([older, newer, an_evaluation("cut", 1.6), longer])
    assert [row.choices for row in rows] == ["", "memory_len 512, same_length True"]
    assert rows[0].saved("bits_per_byte") == pytest.approx(0.1)
    assert rows[1].saved("bits_per_byte") is None


@pytest.mark.parametrize("other", [{"step": 20}, {"tokens": 5}])
def test_nothing_is_saved_between_unlike_evaluations(other: dict[str, int]) -> None:
    (row,) = compare([an_evaluation("carried", 1.5), an_evaluation("cut", 1.6, **other)])
    assert row.saved("bits_per_byte") is None
    assert row.sentence is None
    assert " / " in row.either("step") + row.either("tokens")


def test_without_bytes_the_loss_is_compared(tmp_path: Path) -> None:
    evaluations = an_evaluation("carried", None, loss=3.3), an_evaluation("cut", None)
    terminal = run_report(a_run(tmp_path, forty_steps(), *evaluations))
    assert "Carrying the state costs 0.3000 nats per token (10.0%) on test" in terminal
    assert "3.3000 3.0000 -0.3000" in terminal


def test_output_may_lie_elsewhere(tmp_path: Path) -> None:
    run = a_run(tmp_path, forty_steps())
    assert run_report(run, "--output", tmp_path / "page.html").endswith("page.html")
    assert Page((tmp_path / "page.html").read_text()).text
    assert not (run / "report.html").exists()


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere: is not a run folder"):
        run_report(tmp_path / "nowhere")
    run = a_run(tmp_path, [])
    with pytest.raises(UserError, match=r"no step is recorded yet; train first"):
        run_report(run)
    (run / "metrics.jsonl").write_text('{"step": 1\n{"step": 2}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl:1: is no JSON object"):
        run_report(run)
    (run / "metrics.jsonl").write_text(json.dumps(a_step(1, 2.0)) + "\n")
    for output in (tmp_path, tmp_path / "none" / "page.html"):
        with pytest.raises(UserError, match="cannot be written"):
            run_report(run, "--output", output)


def test_a_record_cut_short_by_a_kill_is_left_out(tmp_path: Path) -> None:
    run = a_run(tmp_path, forty_steps())
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "loss"')
    assert "Steps 40 of 40" in run_report(run)


def test_layers_are_drawn_one_by_one_and_as_their_mean() -> None:
    norms = {f"memory.{i}": 1.0 + i for i in range(3)} | {"new.part": 5.0}
    memory, other = state_panels([a_step(1, 1.0), a_step(2, 1.0, state_norm=norms)])
    assert memory.title == "Memory"
    assert "3 layers" in memory.note
    assert other.title == "new"
    assert not other.note


def test_smoothing_keeps_a_steep_start_and_bridges_gaps() -> None:
    values = np.array([9.0, 1.0, np.nan, 3.0, 5.0])
    assert smooth(values, 2).tolist() == [9.0, 5.0, 2.0, 4.0, 4.0]
    assert np.isnan(smooth(np.full(3, np.nan), 2)).all()


def test_thinning_keeps_spikes() -> None:
    values = np.zeros(100_000)
    values[[123, 77_777]] = 8.0, -8.0
    values[500] = np.nan
    steps, kept = thin((np.arange(100_000), values), 1000)
    assert len(steps) <= 1000
    assert {123, 77_777} <= set(steps.tolist())
    assert np.isfinite(kept).all()


def test_words_for_models_and_amounts() -> None:
    rlt = {"ffn": 8, "encoder_layers": 1, "decoder_layers": 1, **SHAPE}
    kinds = [model_kind(RltConfig(feedback=b, **rlt)) for b in (0, 1, 8)]
    assert kinds == ["RLT-0, no feedback", "RLT-1, B = 1", "RLT-2, B = 8"]
    xl = TransformerXLConfig(d_inner=8, layers=1, memory_len=4, **SHAPE)
    assert model_kind(xl) == "Transformer-XL"
    token = RltConfig(feedback_from="token", **rlt)
    transformer = RltConfig(feedback=0, **rlt | {"decoder_layers": 0})
    others = (token, transformer, GruConfig(d_model=8))
    assert [model_kind(of) for of in others] == ["RLT, fed with tokens", "Transformer", "GRU"]
    assert model_shape(transformer).startswith("1 layers, width")
    assert model_shape(others[2]) == "1 layers, width 8"
    counts = [count(amount) for amount in (None, 9_999_999, 70_600_000, 10**13)]
    assert counts == ["-", "9,999,999", "70.6 M", "10.0 T"]
    durations = [duration(seconds) for seconds in (0.31, 59.96, 125, 90_061)]
    assert durations == ["0.3 s", "1 min 0 s", "2 min 5 s", "25 h 1 min"]


def test_the_command_line_loads_no_matplotlib_before_it_is_needed() -> None:
    code = "import sys, rlt_dist.cli.report; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "rlt_dist.cli.report" in done.stdout.split()
    assert not {"matplotlib", "torch", "jinja2"} & set(done.stdout.split())
