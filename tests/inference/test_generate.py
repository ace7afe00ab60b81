"""Generation: prefill and steps give what the whole text gives, drawn as one asks."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rlt_dist.inference.generate import generate
from rlt_dist.inference.sampling import Sampling, log_distribution
from rlt_dist.util.errors import UserError

GREEDY = Sampling(temperature=0)
PROMPT = b"the state of a lane is carried on"


def text(trained: Any, sampling: Sampling = GREEDY, limit: int = 20, seed: int = 0) -> bytes:
    return b"".join(generate(trained, PROMPT, limit, sampling, seed))


@pytest.mark.parametrize("name", ["rlt1", "rlt2", "xl", "free", "token", "transformer", "gru"])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=2.0)], ids=["greedy", "hot"])
def test_prefill_and_steps_give_what_computing_everything_anew_gives(
    trained: Any, monkeypatch: pytest.MonkeyPatch, name: str, sampling: Sampling
) -> None:
    """The prompt is longer than three segments; a trained model alone would hide a lost state."""
    model = trained(name)
    compute, seen = model.model.logits, []

    def logits(output: torch.Tensor) -> torch.Tensor:
        seen.append(compute(output))
        return seen[-1]

    monkeypatch.setattr(model.model, "logits", logits)
    tokens = list(PROMPT + text(model, sampling))
    assert len(tokens) >= len(PROMPT) + 10
    inputs = torch.tensor([tokens])
    del seen[: -1 - len(tokens) + len(PROMPT)]  # what the prompt's earlier pieces gave
    for length in range(len(PROMPT), len(tokens)):
        start = torch.zeros(1, length, dtype=torch.bool)
        with torch.no_grad():
            output, _ = model.model(inputs[:, :length], start, model.model.empty_state(1))
            anew = compute(output[:, -1])
        assert (seen[length - len(PROMPT)] - anew).abs().max() < 1e-10 * anew.abs().max()
        assert sampling != GREEDY or int(anew.argmax()) == tokens[length]


def test_the_same_seed_draws_the_same_text_and_another_another(trained: Any) -> None:
    model = trained("rlt1")
    hot = Sampling(temperature=1.5)
    assert text(model, hot, seed=1) == text(model, hot, seed=1)
    assert text(model, hot, seed=1) != text(model, hot, seed=2)


def test_the_model_is_free_between_two_tokens(trained: Any) -> None:
    model = trained("xl")
    said = generate(model, PROMPT, 20, GREEDY, 0)
    first = next(said)
    state, prompt = model.model.empty_state(1), torch.tensor([list(PROMPT)])
    assert "memory.0" in state
    output, _ = model.model(prompt, torch.zeros_like(prompt, dtype=torch.bool), state)
    output.sum().backward()
    assert first + b"".join(said) == text(model)


def test_weights_that_move_between_two_tokens_are_an_error(trained: Any) -> None:
    model = trained("xl")
    said = generate(model, PROMPT, 20, GREEDY, 0)
    next(said)
    model.model.load_state_dict(model.model.state_dict())
    with pytest.raises(RuntimeError, match="weights have changed"):
        next(said)


def test_drawing_leaves_the_global_generator_alone(trained: Any) -> None:
    model = trained("rlt1")
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    text(model, Sampling())
    assert torch.equal(torch.rand(1), expected)


def test_only_the_most_likely_token_is_greedy(trained: Any) -> None:
    model = trained("xl")
    assert text(model, Sampling(temperature=2.0, top_k=1), seed=5) == text(model)
    assert text(model, Sampling(temperature=2.0, top_p=1e-9), seed=5) == text(model)


def test_end_of_text_ends_it(trained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = trained("rlt1")
    said = iter(b"abc")

    def logits(_: torch.Tensor) -> torch.Tensor:
        scores = torch.zeros(1, model.tokenizer.vocabulary)
        scores[0, next(said, model.tokenizer.end_of_text)] = 100.0
        return scores

    monkeypatch.setattr(model.model, "logits", logits)
    assert list(generate(model, b"x", 50, GREEDY, 0)) == [b"a", b"b", b"c"]


def test_an_empty_prompt_is_refused(trained: Any) -> None:
    with pytest.raises(UserError, match="prompt is empty"):
        list(generate(trained("rlt1"), b"", 5, GREEDY, 0))


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(), [0, 1, 2, 3]),
        (Sampling(temperature=0), [0]),
        (Sampling(top_k=2), [0, 1]),
        (Sampling(top_k=99), [0, 1, 2, 3]),
        (Sampling(top_p=0.5), [0]),
        (Sampling(top_p=0.51), [0, 1]),
        (Sampling(top_p=0.81), [0, 1, 2]),
        (Sampling(top_k=3, top_p=0.6), [0, 1]),
        (Sampling(top_k=2, top_p=0.62), [0]),
    ],
)
def test_only_the_tokens_asked_for_can_be_drawn(sampling: Sampling, kept: list[int]) -> None:
    """Of 0.5, 0.3, 0.15 and 0.05: top-p counts what top-k has left."""
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64).log() + 3
    found = log_distribution(logits, sampling).exp()
    assert found.nonzero().flatten().tolist() == kept
    assert float(found.sum()) == pytest.approx(1, abs=1e-12)
    share = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)[kept]
    assert torch.allclose(found[kept], share / share.sum(), rtol=1e-12)


def test_temperature_comes_first() -> None:
    logits = torch.randn(5, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    hot = log_distribution(logits, Sampling(temperature=2.0))
    assert torch.allclose(hot, (logits / 2).log_softmax(-1), rtol=1e-12)
    assert torch.allclose(hot.exp().sum(-1), torch.ones(5, dtype=torch.float64))


def test_draws_follow_the_distribution(trained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = trained("rlt1")
    scores = torch.full((1, 257), -torch.inf)
    scores[0, [65, 66]] = torch.tensor([0.75, 0.25]).log()
    monkeypatch.setattr(model.model, "logits", lambda _: scores)
    drawn = b"".join(generate(model, b"x", 400, Sampling(), 0))
    assert set(drawn) == {65, 66}
    assert abs(drawn.count(65) / 400 - 0.75) < 0.08


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1.0}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5}]
)
def test_a_sampling_that_means_nothing_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        Sampling(**wrong)


def say(monkeypatch: pytest.MonkeyPatch, said: bytes) -> None:
    """Let every RLT say these bytes, then end-of-text."""
    from rlt_dist.models.rlt.model import RecurrentLoopedTransformer

    left = iter(said)

    def logits(self: Any, output: torch.Tensor) -> torch.Tensor:  # noqa: ARG001
        scores = torch.zeros(1, 257)
        scores[0, next(left, 256)] = 100.0
        return scores

    monkeypatch.setattr(RecurrentLoopedTransformer, "logits", logits)


def test_the_command_prints_prompt_and_text(command: Any, run_of: Any) -> None:
    code, out, _ = command(
        "generate", run_of("rlt1"), "--prompt", "the lane", "--tokens", 5, "--temperature", 0
    )
    assert code == 0
    assert out.startswith("the lane")
    assert len(out) == len("the lane") + 5 + 1


def test_characters_come_out_whole_though_each_byte_is_a_token(
    command: Any, run_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(monkeypatch, "é文🙂".encode())
    code, out, _ = command("generate", run_of("rlt1"), "--prompt", "x", "--tokens", 20)
    assert (code, out) == (0, "xé文🙂\n")


def test_a_prompt_may_end_inside_a_character(
    command: Any, run_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = "a文".encode()
    (tmp_path / "prompt").write_bytes(whole[:-1])
    say(monkeypatch, whole[-1:] + b"!")
    code, out, _ = command("generate", run_of("rlt1"), "--prompt-file", tmp_path / "prompt")
    assert (code, out) == (0, "a文!\n")


def test_a_text_that_stops_inside_a_character_is_marked_so(
    command: Any, run_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(monkeypatch, "文".encode()[:2])
    code, out, _ = command("generate", run_of("rlt1"), "--prompt", "x")
    assert (code, out) == (0, "x\ufffd\n")


def test_a_prompt_that_is_no_utf8_is_taken_as_the_bytes_it_is(
    command: Any, run_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the shell hands over $'\\xff': Python holds such a byte as a lone surrogate."""
    say(monkeypatch, b"!")
    code, out, _ = command("generate", run_of("rlt1"), "--prompt", "x\udcff")
    assert (code, out) == (0, "x\ufffd!\n")


def test_words_are_printed_apart(
    driver: Any, configure: Any, command: Any, tmp_path: Path, words_corpus: Path
) -> None:
    config = configure(tmp_path, "rlt1", "train.steps=2", f"data.path={words_corpus}")
    driver.train(config)
    code, out, _ = command("generate", config.run_folder, "--prompt", "the state", "--tokens", 8)
    assert code == 0
    known = {"the", "state", "of", "a", "lane", "is", "carried", "on", "over", "its", "<unk>"}
    known |= {"segment", "and", "naïve", "文字", "loops", "return"}
    assert set(out.split()) <= known


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--prompt", ""], "prompt is empty"),
        (["--prompt-file", "nowhere.txt"], "nowhere.txt: is no file"),
        (["--temperature", "-1"], "temperature"),
        (["--top-k", "0"], "top-k"),
        (["--top-p", "0"], "top-p"),
    ],
)
def test_mistakes_are_one_line(
    command: Any, is_one_error: Any, run_of: Any, arguments: list[str], said: str
) -> None:
    is_one_error(command("generate", run_of("rlt1"), *arguments), said)


@pytest.mark.parametrize("command_name", [("generate",), ("chat", "--say", "x")])
def test_a_seed_is_of_63_bits(
    command: Any, trained_runs: Path, command_name: tuple[str, ...]
) -> None:
    name, *more = command_name
    arguments = [name, trained_runs / "rlt1" / "run", *more, "--tokens", 1, "--seed"]
    assert command(*arguments, 2**63 - 1)[0] == 0
    for wrong in (-1, 2**63, 99999999999999999999):
        code, out, err = command(*arguments, wrong)
        assert (code, out) == (2, "")
        assert "'--seed'" in err
