"""What work is made of, in torch's operators and in the compiled loop."""

from math import ceil
from typing import Any

import pytest

from rlt_dist.config.load import validate
from rlt_dist.config.run import RunConfig
from rlt_dist.costs.run import Run, run_of
from rlt_dist.costs.taken import Taken, compiled, rate_name, taken
from rlt_dist.mesh.axes import Axes
from rlt_dist.mesh.world import open_world
from rlt_dist.ops.recurrence import dispatch
from rlt_dist.ops.recurrence.native.loop import NativeLoop
from rlt_dist.parallel.mesh import mesh_of
from rlt_dist.parallel.schedule.instructions import Kind, Work
from rlt_dist.train.rehearsal import Rehearsal

VOCABULARY, LANES, TOKENS = 41, 3, 10
RLT = {
    **{"kind": "rlt", "d_model": 24, "heads": 2, "ffn": 40, "memory_len": 6, "window": 3},
    **{"encoder_layers": 1, "decoder_layers": 2},
}


def config_of(
    precision: str = "float32", recurrence: str = "auto", chunk: Any = "auto"
) -> RunConfig:
    content = {
        "run_folder": "none",
        "model": RLT,
        "data": {"path": "none", "lanes": LANES, "segment": TOKENS},
        "optimizer": {"learning_rate": 1e-3},
        "train": {"steps": 1, "precision": precision},
        "ops": {"recurrence": recurrence},
        "recompute": {"decoder_chunk": chunk},
    }
    return validate(content, RunConfig, "test")


def run_on(**choices: Any) -> Run:
    return run_of(config_of(**choices), VOCABULARY, Axes(1, 1, 1))


def of(run: Run, kind: Kind, step: int = 0, count: int = 1, *, stepwise: bool = True) -> Taken:
    return taken(run, run.rank(0), Work(kind, 0, step, count), stepwise=stepwise)


@pytest.mark.parametrize("precision", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("recurrence", ["auto", "native", "python"])
def test_rates_are_those_of_the_loop_that_runs(
    monkeypatch: pytest.MonkeyPatch, precision: str, recurrence: str
) -> None:
    chosen, made = dispatch._loop, set[Any]()

    def choose(*given: Any) -> Any:
        loop = chosen(*given)
        made.add(loop)
        return loop

    monkeypatch.setattr(dispatch, "_loop", choose)
    config = config_of(precision, recurrence)
    with open_world() as world, mesh_of(config, world) as mesh:
        Rehearsal(config, VOCABULARY, mesh, document=8).step()
    run = run_of(config, VOCABULARY, Axes(1, 1, 1))
    assert made == {NativeLoop} if compiled(run) else NativeLoop not in made
    name = rate_name(run, Kind.DECODE)
    assert name == ("decode, compiled" if made == {NativeLoop} else "decode")
    assert rate_name(run, Kind.ENCODE) == "encode"


@pytest.mark.parametrize(
    ("precision", "columns"), [("float32", 64), ("float64", 32), ("bfloat16", 64)]
)
def test_the_compiled_loop_forms_whole_panels(precision: str, columns: int) -> None:
    run = run_on(precision=precision, recurrence="native")
    rank, work = run.rank(0), Work(Kind.DECODE, 0, 0)
    weights = [product for product in rank.effort(work).products if product.weight]
    assert any(product.n % columns for product in weights)
    whole = sum(p.flops // p.n * columns * ceil(p.n / columns) for p in weights)
    found = taken(run, rank, work, stepwise=True)
    assert found.weighted == pytest.approx(whole)
    assert found.operations == 2 * LANES  # layers, one token
    assert found.scores == 2 * LANES * 2 * (7 + 3)  # heads, memory and own token, window


def test_what_was_kept_is_not_replayed_and_what_was_not_is_decoded_again() -> None:
    kept, parts = (run_on(recurrence="native", chunk=chunk) for chunk in ("none", 4))
    assert of(kept, Kind.REPLAY) == Taken()
    steps = [of(parts, Kind.DECODE, step) for step in range(4)]
    again = of(parts, Kind.REPLAY, count=len(steps))
    assert rate_name(parts, Kind.REPLAY) == rate_name(parts, Kind.DECODE) == "decode, compiled"
    for figure in ("weighted", "other", "scores", "operations"):
        assert getattr(again, figure) == pytest.approx(sum(getattr(s, figure) for s in steps))
    # A part is one call, and reads the weights once.
    assert (again.calls, again.numbers) == (1.0, pytest.approx(steps[0].numbers))


def test_in_torch_a_replay_of_what_was_kept_starts_nothing() -> None:
    kept = run_on(recurrence="python", chunk="none")
    assert of(kept, Kind.REPLAY) == Taken()


def test_steps_of_a_segment_that_runs_at_once_are_no_calls() -> None:
    run = run_on(recurrence="native")
    assert of(run, Kind.DECODE).calls == 1.0
    assert of(run, Kind.DECODE, stepwise=False).calls == 0.0
