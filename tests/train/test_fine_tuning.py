"""Fine-tuning: from another run's parameters, on what is labelled, with all else as context."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlt_dist.data.prepare.inputs import InputOptions
from rlt_dist.data.prepare.labelled import UNSCORED, write_labelled
from rlt_dist.data.prepare.prepare import prepare_corpus
from rlt_dist.data.stream.corpora import open_corpora
from rlt_dist.data.stream.loader import Batch, LaneLoader
from rlt_dist.data.tokenizers.words import WordsTokenizer
from rlt_dist.inference.forward import batch_loss
from rlt_dist.inference.load import load_trained
from rlt_dist.models.build import initial_model
from rlt_dist.ops.noise import Noise
from rlt_dist.util.errors import UserError

MODELS = ["rlt1", "rlt2", "xl"]


@pytest.fixture(scope="session")
def talks(once: Callable[..., Path], small_corpus: Path) -> Path:
    """40 conversations, tokens of the small corpus's kind."""

    def make(folder: Path) -> None:
        lines = []
        for number in range(40):
            question = {"role": "user", "content": f"{number} and {number % 7}"}
            answer = {"role": "assistant", "content": "yes" * (number % 3)}
            lines.append({"messages": [question, answer]})
        (folder / "talks.jsonl").write_text("\n".join(map(json.dumps, lines)))
        prepare_corpus(
            [folder / "talks.jsonl"],
            folder / "corpus",
            small_corpus / "tokenizer.json",
            options=InputOptions(format="chat"),
            shares={"train": 0.7, "validation": 0.3},
        )

    return once("talks", make) / "corpus"


@pytest.fixture(scope="session")
def pretrained(once: Callable[..., Path], configure: Any, driver: Any) -> Path:
    def make(folder: Path) -> None:
        driver.train(configure(folder, "rlt1", "train.steps=3"))

    return once("pretrained", make) / "run"


def first_batch(config: Any) -> Batch:
    corpora = open_corpora(config.data)
    with LaneLoader(corpora.reading("train", config.data, 0), range(config.data.lanes)) as loader:
        return loader.next()


@pytest.mark.parametrize("model", MODELS)
def test_context_gives_no_gradient_of_its_own_and_changes_what_follows(
    configure: Any, tmp_path: Path, talks: Path, model: str
) -> None:
    config = configure(tmp_path, model, f"data.path={talks}", "data.segment=40")
    net = initial_model(config.bounded_model, 257, 0, torch.float64)
    batch, state = first_batch(config), net.empty_state(8)
    context = ~batch.loss_mask
    assert context.any(1).all()
    assert batch.loss_mask.any(1).all()

    def learnt(of: Batch) -> tuple[float, list[torch.Tensor], dict[str, torch.Tensor]]:
        loss, after = batch_loss(net, of, state, config, Noise(0, 1, of.lanes))
        gradients = torch.autograd.grad(loss, list(net.parameters()), materialize_grads=True)
        return loss.item(), list(gradients), after

    loss, gradients, after = learnt(batch)
    assert any(gradient.any() for gradient in gradients)
    # Whatever the context's targets are: the same loss and gradients, to the bit.
    others = torch.where(context, (batch.targets + 5) % 257, batch.targets)
    same_loss, same, _ = learnt(Batch(**vars(batch) | {"targets": others}))
    assert same_loss == loss
    assert all(torch.equal(one, two) for one, two in zip(gradients, same, strict=True))
    # Context alone teaches nothing.
    none, nothing, _ = learnt(Batch(**vars(batch) | {"loss_mask": torch.zeros_like(context)}))
    assert none == 0
    assert not any(gradient.any() for gradient in nothing)
    # Its tokens, however, are read: other ones give another state and another loss.
    tokens = batch.tokens.clone()
    tokens[:, :-1] = torch.where(context, (tokens[:, :-1] + 1) % 256, tokens[:, :-1])
    other_loss, _, other = learnt(Batch(**vars(batch) | {"tokens": tokens}))
    assert other_loss != loss
    carried = [name for name, t in after.items() if t.is_floating_point() and t.numel()]
    assert any(not torch.equal(after[name], other[name]) for name in carried)


def test_a_run_begins_from_the_parameters_of_another(
    configure: Any, tmp_path: Path, talks: Path, pretrained: Path, driver: Any
) -> None:
    more = [f"data.path={talks}", "data.lanes=4", "model.dropout=0.2"]
    more += ["validation.every=2", "validation.segments=12"]
    config = configure(tmp_path, "rlt1", f"initial={pretrained}", *more)
    watched = driver.train(config)
    before = watched.at(1)
    begun = dict(load_trained(pretrained).model.named_parameters())
    assert before.parameters.keys() == begun.keys()
    assert all(torch.equal(before.parameters[name], begun[name]) for name in begun)
    assert not any(tensor.any() for tensor in before.optimizer.values())
    assert not before.state_in["tokens"].any()
    assert any("began from the parameters of" in note for note in watched.notes)
    assert "unlike there: dropout: 0.1 -> 0.2" in watched.notes
    assert watched.session.step == 5

    # Gone on from, it is its own: the other run need not be there.
    moved = config.model_copy(update={"train": config.train.model_copy(update={"steps": 6})})
    shutil.move(pretrained, tmp_path / "elsewhere")
    try:
        assert driver.train(moved).session.step == 6
    finally:
        shutil.move(tmp_path / "elsewhere", pretrained)


def test_a_step_of_context_alone_updates_nothing_and_is_no_measure_of_others(
    configure: Any, tmp_path: Path, talks: Path, pretrained: Path, driver: Any, metrics: Any
) -> None:
    steps = ["train.steps=30", "data.lanes=1", "data.segment=4", "guard.max_skips=2"]
    spike = "guard.spike={factor: 3.0, window: 3}"
    config = configure(
        tmp_path, "rlt1", f"initial={pretrained}", f"data.path={talks}", *steps, spike
    )
    watched = driver.train(config)
    records = metrics(config.run_folder)
    unscored = [record["step"] for record in records if record["loss"] is None]
    assert 3 < len(unscored) < 27
    assert any(step + 1 in unscored for step in unscored)  # more than max_skips allows of others
    assert [record["step"] for record in records if record["skipped"]] == unscored
    for step in range(1, 30):
        before, after = watched.at(step), watched.at(step + 1)
        kept = all(
            torch.equal(tensor, after.parameters[name])
            for name, tensor in before.parameters.items()
        )
        assert kept == (step in unscored)
        assert torch.equal(before.state_out["tokens"], after.state_in["tokens"])
    assert 0.0 not in watched.session.guard.losses


def test_a_checkpoint_may_be_named_and_kept_apart_from_a_run_without(
    configure: Any, tmp_path: Path, pretrained: Path, driver: Any
) -> None:
    checkpoint = pretrained / "checkpoints" / "step-00000003"
    config = configure(tmp_path, "rlt1", f"initial={checkpoint}", "train.steps=2")
    driver.train(config)
    with pytest.raises(UserError, match=r"belongs to another run \(initial: .* -> None\)"):
        driver.train(config.model_copy(update={"initial": None}))


@pytest.mark.parametrize(
    ("model", "override", "what"),
    [
        ("rlt1", "initial={folder}", "no such folder"),
        ("rlt1", "model.window=3", r"holds another model .*window: 4 -> 3"),
        ("xl", "train.steps=4", "kind: rlt -> transformer_xl"),
        ("rlt1", "data.path={words}", "was trained with another tokenizer"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    configure: Any,
    tmp_path: Path,
    pretrained: Path,
    words_corpus: Path,
    driver: Any,
    model: str,
    override: str,
    what: str,
) -> None:
    text = override.format(folder=tmp_path / "none", words=words_corpus)
    config = configure(tmp_path, model, f"initial={pretrained}", text)
    with pytest.raises(UserError, match=what):
        driver.train(config)
    assert not (config.run_folder / "config.yaml").exists()


def test_a_run_does_not_begin_from_itself(configure: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is this run itself"):
        configure(tmp_path, "rlt1", f"initial={tmp_path}/run/checkpoints/step-00000003")


def test_a_labelled_task_is_learnt(
    configure: Any, tmp_path: Path, driver: Any, metrics: Any
) -> None:
    """Which token this is not, asked at every other; what comes next, nobody could tell."""
    chance = np.random.default_rng(0)

    def documents(number: int) -> Any:
        for _ in range(number):
            tokens = chance.integers(3, 5, 12)
            yield tokens, np.where(np.arange(12) % 2, 7 - tokens, UNSCORED)

    tokenizer = WordsTokenizer([b"a", b"b"])
    splits = {"train": documents(800), "validation": documents(40)}
    write_labelled(tmp_path / "corpus", tokenizer, splits)
    more = ["train.steps=60", "model.dropout=0.0", "optimizer.learning_rate=0.02"]
    config = configure(
        tmp_path, "rlt1", f"data.path={tmp_path / 'corpus'}", "data.segment=13", *more
    )
    driver.train(config)
    losses = [record["loss"] for record in metrics(tmp_path / "run")]
    assert losses[0] > 0.6
    assert np.mean(losses[-5:]) < 0.1
