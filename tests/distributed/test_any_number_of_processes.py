"""8 lanes on 1, 2 and 4 processes are one and the same run (float64, 1e-10, dropout 0.1)."""

from typing import Any

import pytest
import torch

TOLERANCE = 1e-10
OTHERS = [
    *[(1, model, micro_batch) for model in ("rlt1", "xl") for micro_batch in ("1", "2")],
    *[(2, model, micro_batch) for model in ("rlt1", "xl") for micro_batch in ("null", "1", "2")],
    *[(2, "rlt2", micro_batch) for micro_batch in ("null", "2")],
    *[(4, model, micro_batch) for model in ("rlt1", "xl") for micro_batch in ("null", "1")],
    (4, "rlt2", "null"),
]
"""Processes, model and micro-batch, held against one process with all lanes at once."""


def relative_error(x: torch.Tensor, y: torch.Tensor) -> float:
    return float((x - y).abs().max() / y.abs().max().clamp(min=1e-6))


def assert_close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    errors = {name: relative_error(found[name], expected[name]) for name in expected}
    assert max(errors.values()) < TOLERANCE, errors


def by_step_and_lane(forwards: list[dict[str, Any]]) -> dict[tuple[int, int], list[Any]]:
    return {
        (forward["step"], lane): [forward["tokens"][i].tolist(), forward["document_start"][i]]
        for forward in forwards
        for i, lane in enumerate(forward["lanes"])
    }


@pytest.mark.parametrize(("processes", "model", "micro_batch"), OTHERS)
def test_lanes_read_the_same_tokens(
    result: Any, processes: int, model: str, micro_batch: str
) -> None:
    expected = by_step_and_lane(result(1, f"{model}-null")["forwards"])
    found = by_step_and_lane(result(processes, f"{model}-{micro_batch}")["forwards"])
    assert len(expected) == 5 * 8
    assert found.keys() == expected.keys()
    for key, (tokens, starts) in expected.items():
        assert found[key][0] == tokens
        assert torch.equal(found[key][1], starts)


@pytest.mark.parametrize("processes", [2, 4])
def test_a_mixture_read_by_workers_is_the_same(result: Any, records: Any, processes: int) -> None:
    """One process reads by itself, two have a worker each, four two each."""
    expected, found = result(1, "mixed"), result(processes, "mixed")
    forwards, alone = (by_step_and_lane(of["forwards"]) for of in (found, expected))
    assert forwards.keys() == alone.keys()
    for key, (tokens, _) in alone.items():
        assert forwards[key][0] == tokens
    assert torch.equal(found["cursors"], expected["cursors"])
    assert found["cursors"].shape == (8, 2, 4)
    assert int(found["cursors"][:, :, 0].max()) >= 1, "the test should pass an epoch's border"
    one, other = records(1, "mixed")[-1], records(processes, "mixed")[-1]
    assert other["loss"] == pytest.approx(one["loss"], rel=TOLERANCE)


@pytest.mark.parametrize(("processes", "model", "micro_batch"), OTHERS)
def test_losses_and_gradient_norms_agree(
    records: Any, processes: int, model: str, micro_batch: str
) -> None:
    expected = records(1, f"{model}-null")
    found = records(processes, f"{model}-{micro_batch}")
    assert [record["step"] for record in found] == [1, 2, 3, 4, 5]
    for one, other in zip(expected, found, strict=True):
        for key in ("loss", "gradient_norm"):
            assert other[key] == pytest.approx(one[key], rel=TOLERANCE, abs=0)
        assert other["tokens"] == one["tokens"] == one["step"] * 8 * 10
    assert found[-1]["state_norm"] == pytest.approx(expected[-1]["state_norm"], rel=TOLERANCE)


@pytest.mark.parametrize(("processes", "model", "micro_batch"), OTHERS)
def test_final_parameters_optimizer_state_and_cursors_agree(
    result: Any, processes: int, model: str, micro_batch: str
) -> None:
    expected = result(1, f"{model}-null")
    found = result(processes, f"{model}-{micro_batch}")
    assert_close(found["parameters"][0], expected["parameters"][0])
    assert_close(found["optimizer"], expected["optimizer"])
    assert_close(found["state"], expected["state"])
    assert torch.equal(found["cursors"], expected["cursors"])


@pytest.mark.parametrize("processes", [2, 4])
def test_all_ranks_hold_the_same_bits(result: Any, processes: int) -> None:
    tensors = result(processes, "xl-null")["parameters"]
    assert len(tensors) == processes
    for others in tensors[1:]:
        assert all(torch.equal(others[name], tensors[0][name]) for name in others)


@pytest.mark.parametrize("processes", [2, 4])
def test_the_optimizers_moments_are_there_once(result: Any, processes: int) -> None:
    found = result(processes, "rlt1-null")
    held = found["optimizer_elements"]
    for name, parameter in found["parameters"][0].items():
        rows = [rank[f"exp_avg.{name}"] // parameter[0].numel() for rank in held]
        assert rows == [len(part) for part in split(parameter, processes)]
        assert rows == [rank[f"exp_avg_sq.{name}"] // parameter[0].numel() for rank in held]


def split(tensor: torch.Tensor, parts: int) -> list[torch.Tensor]:
    """torch.chunk, the parts that it leaves out as empty ones."""
    given = tensor.chunk(parts)
    return [*given, *[tensor[:0]] * (parts - len(given))]


def test_the_runs_meet_what_makes_it_hard(result: Any) -> None:
    """Documents start inside rows, and so the ranks' numbers of scored tokens differ."""
    forwards = result(4, "rlt1-null")["forwards"]
    starts = {(f["step"], f["lanes"][0]): int(f["document_start"][:, 1:].sum()) for f in forwards}
    unequal = [
        step for step in range(1, 6) if len({starts[step, lane] for lane in (0, 2, 4, 6)}) > 1
    ]
    assert len(unequal) >= 3


def test_the_first_loss_is_the_mean_over_all_scored_tokens(records: Any, first_loss: Any) -> None:
    """Not a mean of means: neither of ranks nor of lanes, whose numbers of targets differ."""
    assert records(4, "undropped")[0]["loss"] == pytest.approx(first_loss.loss, rel=TOLERANCE)
    assert abs(first_loss.mean_of_lane_means - first_loss.loss) > 1e-6


@pytest.mark.parametrize("processes", [1, 4])
@pytest.mark.parametrize("model", ["rlt1", "xl"])
def test_a_run_saved_on_two_processes_goes_on_on_another_number(
    result: Any, records: Any, processes: int, model: str
) -> None:
    """The steps after the resume agree with those of the run that went on on two."""
    name = f"resume-{model}"
    expected, found = records(2, f"save-{model}"), records(processes, name)
    assert [record["step"] for record in found] == [1, 2, 3, 4, 5]
    assert {forward["step"] for forward in result(processes, name)["forwards"]} == {3, 4, 5}
    for one, other in zip(expected, found, strict=True):
        for key in ("loss", "gradient_norm"):
            assert other[key] == pytest.approx(one[key], rel=TOLERANCE, abs=0)
    one, other = result(2, f"save-{model}"), result(processes, name)
    assert_close(other["parameters"][0], one["parameters"][0])
    assert_close(other["state"], one["state"])


def test_a_spoilt_gradient_on_one_rank_is_skipped_by_all(result: Any, records: Any) -> None:
    """Parameters and optimizer stay to the bit on all ranks, and the data goes on."""
    found = result(2, "spoilt")
    assert [record["skipped"] for record in records(2, "spoilt")] == [0, 1, 1, 0, 0]
    before = {f["step"]: f for f in found["forwards"] if 0 in f["lanes"]}
    for kind in ("parameters", "optimizer"):
        for name, tensor in before[2][kind].items():
            assert torch.equal(tensor, before[4][kind][name])
        assert any(not torch.equal(t, before[5][kind][n]) for n, t in before[2][kind].items())
    first, second = found["parameters"]
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert found["cursors"][:, 0, 3].tolist() == [50] * 8
