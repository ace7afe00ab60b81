"""Steps that are not to be trusted: skipped alike before and after a restart, or the run stops."""

import math
import re
import shutil
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import pytest
import torch

from rlt_dist.config.run import GuardConfig, SpikeConfig
from rlt_dist.train.guard import spike_limit
from rlt_dist.util.errors import UserError

UNEVEN = ("train.steps=12", "checkpoint.every=1", "optimizer.learning_rate=0.1")
SPIKES = (*UNEVEN, "guard.spike={deviations: 0.3, window: 3}")


class Stop(Exception):
    pass


def stop_in_step(step: int) -> Any:
    def prepare(session: Any) -> None:
        def stop(_: object, inputs: tuple[Any, ...]) -> None:
            if len(inputs) > 3 and inputs[3].step == step:
                raise Stop

        session.model.register_forward_pre_hook(stop)

    return prepare


def decisions(records: list[dict[str, Any]], deviations: float, window: int) -> list[int]:
    """By hand, which of these steps are spikes."""
    good: list[float] = []
    spikes = []
    for record in records:
        recent = good[-window:]
        full = len(recent) == window
        spike = full and record["loss"] > fmean(recent) + deviations * pstdev(recent)
        spikes.append(int(spike))
        good += [] if spike else [record["loss"]]
    return spikes


def test_a_spike_is_skipped_before_the_optimizer_moves_and_the_data_goes_on(
    driver: Any, configure: Any, tmp_path: Path, metrics: Any
) -> None:
    config = configure(tmp_path, "rlt1", *SPIKES)
    watched = driver.train(config)
    records = metrics(config.run_folder)
    skipped = [record["skipped"] for record in records]
    assert skipped == decisions(records, 0.3, 3)
    assert 0 < sum(skipped) < 9
    for step in (record["step"] for record in records[:-1]):
        before, after = watched.at(step), watched.at(step + 1)
        kept = [
            torch.equal(tensor, after.parameters[name])
            for name, tensor in before.parameters.items()
        ]
        assert all(kept) if skipped[step - 1] else not all(kept)
        for name, tensor in before.state_out.items():
            assert torch.equal(after.state_in[name], tensor)
    assert watched.session.cursors[:, 0, 3].tolist() == [120] * 8


def test_resumed_after_any_step_the_same_steps_are_skipped(
    driver: Any, configure: Any, tmp_path: Path, metrics: Any
) -> None:
    whole = configure(tmp_path / "whole", "rlt1", *SPIKES)
    driver.train(whole)
    expected = metrics(whole.run_folder)
    for step in range(3, 11, 2):
        config = configure(tmp_path / f"{step}", "rlt1", *SPIKES)
        shutil.copytree(whole.run_folder, config.run_folder)
        for later in (config.run_folder / "checkpoints").iterdir():
            if int(later.name.removeprefix("step-")) > step:
                shutil.rmtree(later)
        driver.train(config)
        assert metrics(config.run_folder) == expected


def test_a_spike_stops_the_run_if_asked_and_skipping_it_goes_on(
    driver: Any, configure: Any, tmp_path: Path, metrics: Any
) -> None:
    skips = [*UNEVEN, "guard.spike={factor: 1.001, window: 3}"]
    stops = [*UNEVEN, "guard.spike={factor: 1.001, window: 3, action: stop}"]
    whole = configure(tmp_path / "whole", "rlt1", *skips)
    driver.train(whole)
    expected = metrics(whole.run_folder)
    first = next(record["step"] for record in expected if record["skipped"])
    config = configure(tmp_path / "broken", "rlt1", *stops)
    for _ in range(2):  # it is met again, for nothing of it was saved
        with pytest.raises(UserError, match=rf"above guard.spike in step {first}; .*"):
            driver.train(config)
        assert len(metrics(config.run_folder)) == first
    assert (config.run_folder / f"guard-step-{first:08d}.txt").is_file()
    assert '"how": "guard"' in (config.run_folder / "ended.json").read_text()
    driver.train(configure(tmp_path / "broken", "rlt1", *skips))
    assert metrics(config.run_folder) == expected
    assert '"how": "finished"' in (config.run_folder / "ended.json").read_text()


def test_skips_in_a_row_are_counted_across_a_restart(
    driver: Any, configure: Any, tmp_path: Path, metrics: Any
) -> None:
    config = configure(tmp_path, "rlt1", "guard.max_skips=3", "checkpoint.every=1")

    def spoil(session: Any) -> None:
        driver.spoil_gradient(session, {2, 3, 4, 5}, 0)

    def spoil_and_stop(session: Any) -> None:
        spoil(session)
        stop_in_step(4)(session)

    with pytest.raises(Stop):
        driver.train(config, prepare=spoil_and_stop)
    with pytest.raises(UserError, match="in 3 steps in a row, up to step 4"):
        driver.train(config, prepare=spoil)
    assert [record["step"] for record in metrics(config.run_folder)] == [1, 2, 3, 4]


def test_the_report_says_what_the_bad_steps_were(
    driver: Any, configure: Any, tmp_path: Path, metrics: Any
) -> None:
    config = configure(tmp_path, "rlt1", "guard.max_skips=2", "checkpoint.every=1")
    with pytest.raises(UserError, match=r"guard-step-00000004\.txt"):
        driver.train(config, prepare=lambda s: driver.spoil_gradient(s, {3, 4}, 0))
    report = (config.run_folder / "guard-step-00000004.txt").read_text()
    for record in metrics(config.run_folder)[2:]:
        assert f"Step {record['step']}: loss or gradient was not finite\n" in report
        assert f"loss {record['loss']:.6g}" in report
        assert f"learning_rate {record['learning_rate']:.6g}" in report
        assert f"decoder.1.k {record['state_norm']['decoder.1.k']:.4g}" in report
    assert report.count("gradient_norm inf") == 2
    for lane in range(8):
        tokens = [line.split()[-1] for line in report.splitlines() if f"  lane {lane}:" in line]
        assert tokens == ["20", "30"]
    assert re.search(r"What to try:\n- lower optimizer.learning_rate", report)


@pytest.mark.parametrize("model", ["rlt1", "xl"])
def test_lanes_whose_state_exceeds_the_limit_start_afresh_and_are_counted(
    driver: Any, configure: Any, tmp_path: Path, metrics: Any, model: str
) -> None:
    out = driver.train(configure(tmp_path / "free", model, "train.steps=2")).at(1).state_out
    largest = torch.stack(
        [
            tensor.flatten(1).square().mean(dim=1).sqrt()
            for tensor in out.values()
            if tensor.is_floating_point() and tensor.numel()
        ]
    ).amax(dim=0)
    limit = float(largest.sort().values[2:4].mean())
    choices = ("train.steps=2", f"guard.state_norm={limit}")
    watched = driver.train(configure(tmp_path / "held", model, *choices))
    records = metrics(tmp_path / "held" / "run")
    assert [record["skipped"] for record in records] == [0, 0]
    assert records[0]["restarted_lanes"] == 5
    for name, tensor in watched.at(2).state_in.items():
        beyond = largest > limit
        assert torch.equal(tensor[~beyond], out[name][~beyond])
        assert name == "tokens" or not tensor[beyond].any()
    assert watched.session.state["tokens"].tolist() == [20] * 8


def test_state_norms_of_every_layer_are_in_the_metrics(
    driver: Any, configure: Any, tmp_path: Path, metrics: Any
) -> None:
    config = configure(tmp_path, "rlt1", "train.log_every=1")
    session = driver.train(config).session
    norms = metrics(config.run_folder)[-1]["state_norm"]
    expected = {
        name: math.sqrt(tensor.double().square().mean())
        for name, tensor in session.state.items()
        if tensor.is_floating_point()
    }
    assert norms == pytest.approx(expected, rel=1e-12)
    assert {f"decoder.{layer}.{part}" for layer in (0, 1) for part in "kv"} <= norms.keys()


def test_the_limit_of_a_spike_is_that_of_the_window() -> None:
    losses = [2.0, 4.0, 6.0]
    assert spike_limit(SpikeConfig(factor=1.5), losses) == 6.0
    expected = 4.0 + 3 * pstdev(losses)
    assert spike_limit(SpikeConfig(deviations=3), losses) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("spike", [{}, {"factor": 2, "deviations": 3}, {"factor": 0.9}])
def test_a_spike_is_either_a_factor_or_deviations(spike: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="factor"):
        GuardConfig.model_validate({"spike": spike})
