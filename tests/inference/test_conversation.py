"""Conversations: saved, restored, branched and continued as if they had never been put away."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlt_dist.inference.conversation import Conversation, Speaker, fingerprint
from rlt_dist.inference.replay import replay
from rlt_dist.inference.sampling import Sampling
from rlt_dist.util.errors import UserError

HOT = Sampling(temperature=1.5, top_k=40)
MODELS = ["rlt1", "rlt2", "xl"]


@pytest.fixture
def speaker(trained: Any) -> Any:
    """`speaker(name)`: a new one, with the model loaded anew."""
    return lambda name="rlt1": Speaker(trained(name))


def talk(of: Speaker, turns: int = 2, begun: Conversation | None = None) -> Conversation:
    held = of.begin() if begun is None else begun
    for turn in range(turns):
        held = of.tell(held, "user", b"the state of %d" % turn)
        held, _ = of.reply(held, HOT, 6, seed=turn)
    return held


def same_state(one: Conversation, two: Conversation) -> bool:
    same_names = one.state.keys() == two.state.keys()
    return same_names and all(torch.equal(one.state[name], two.state[name]) for name in one.state)


@pytest.mark.parametrize("name", MODELS)
def test_a_restored_conversation_goes_on_as_if_it_had_never_been_put_away(
    speaker: Any, tmp_path: Path, name: str
) -> None:
    before = talk(speaker(name))
    speaker(name).save(before, tmp_path / "talk")
    other = speaker(name)
    restored = other.restore(tmp_path / "talk")
    assert torch.equal(restored.tokens, before.tokens)
    assert same_state(restored, before)
    unbroken = talk(speaker(name), 1, before)
    again = talk(other, 1, restored)
    assert torch.equal(again.tokens, unbroken.tokens)
    assert same_state(again, unbroken)


@pytest.mark.parametrize("name", MODELS)
def test_a_conversation_branches(speaker: Any, name: str) -> None:
    of = speaker(name)
    trunk = talk(of)
    kept = {key: tensor.clone() for key, tensor in trunk.state.items()}
    branches = [of.reply(of.tell(trunk, "user", b"go"), HOT, 8, seed)[0] for seed in (0, 1, 0)]
    assert torch.equal(branches[0].tokens, branches[2].tokens)
    assert not torch.equal(branches[0].tokens, branches[1].tokens)
    assert all(torch.equal(trunk.state[key], tensor) for key, tensor in kept.items())


def test_each_turn_draws_numbers_of_its_own(speaker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def replies() -> list[bytes]:
        of = speaker("rlt1")
        monkeypatch.setattr(of._frozen, "logits", lambda _: torch.zeros(1, 257))
        held, said = of.begin(), []
        for _ in range(3):
            held, episode = of.reply(of.tell(held, "user", b"go on"), Sampling(), 8, 0)
            said.append(of.text(episode))
        return said

    first = replies()
    assert len(set(first)) == 3
    assert replies() == first


@pytest.mark.parametrize("name", MODELS)
def test_changed_weights_are_refused_unless_the_conversation_is_replayed(
    trained: Any, tmp_path: Path, name: str
) -> None:
    held = talk(Speaker(trained(name)))
    Speaker(trained(name)).save(held, tmp_path / "talk")
    changed = trained(name)
    with torch.no_grad():
        next(changed.model.parameters()).mul_(1.1)
    other = Speaker(changed)
    with pytest.raises(UserError, match=r"other weights.* replay it \(--replay\)"):
        other.restore(tmp_path / "talk")
    found, _ = other.reply(other.restore(tmp_path / "talk", replay=True), HOT, 5, 3)
    anew, _ = other.reply(replace(other.begin(), tokens=held.tokens), HOT, 5, 3)
    assert same_state(found, anew)
    assert not same_state(found, talk(Speaker(trained(name))))


def test_other_choices_are_another_model(trained: Any, tmp_path: Path) -> None:
    held = talk(Speaker(trained("rlt1")))
    Speaker(trained("rlt1")).save(held, tmp_path / "talk")
    with pytest.raises(UserError, match="other choices"):
        Speaker(trained("rlt1", memory_len=20)).restore(tmp_path / "talk")


@pytest.mark.parametrize("name", MODELS)
def test_weights_that_move_meanwhile_are_noticed(trained: Any, tmp_path: Path, name: str) -> None:
    model = trained(name)
    of = Speaker(model)
    held = talk(of)
    model.model.load_state_dict(model.model.state_dict())
    with pytest.raises(RuntimeError, match="weights have changed"):
        talk(of, 1, held)
    with pytest.raises(RuntimeError, match="weights have changed"):
        of.save(held, tmp_path / "talk")


@pytest.mark.parametrize("name", ["rlt1", "rlt2"])
def test_a_reply_can_be_replayed(trained: Any, name: str) -> None:
    model = trained(name)
    of = Speaker(model)
    held, episode = of.reply(of.tell(talk(of), "user", b"and on"), HOT, 9, 0)
    found = replay(model.model, model.config, [episode])
    assert (found.log_probabilities - found.recorded).abs().max() <= 1e-12
    assert torch.equal(held.tokens[: len(episode.tokens)], episode.tokens)


def test_messages_follow_the_template(trained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = trained("rlt1")
    said = iter(b"yes")

    def logits(_: torch.Tensor) -> torch.Tensor:
        scores = torch.zeros(1, 257)
        scores[0, next(said, 256)] = 100.0
        return scores

    monkeypatch.setattr(model.model, "logits", logits)
    of = Speaker(model)
    asked = of.tell(of.tell(of.begin(), "system", b"be brief"), "user", b"is it?")
    held, episode = of.reply(asked, Sampling(), 20, 0)
    assert of.text(episode) == b"yes"
    parts = [b"<|system|>\nbe brief", b"<|user|>\nis it?", b"<|assistant|>\nyes", b""]
    expected = [token for part in parts for token in (*part, 256)][:-1]
    assert held.tokens.tolist() == expected
    # All but the last token, its end, has been read; that is read before anything is said.
    assert held.unread.tolist() == [256]
    with pytest.raises(UserError, match="no role 'robot'"):
        of.tell(held, "robot", b"")
    with pytest.raises(UserError, match="limit of 0 tokens"):
        of.reply(held, Sampling(), 0, 0)


def test_a_reply_that_is_cut_off_is_ended(speaker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    of = speaker("rlt1")
    monkeypatch.setattr(of._frozen, "logits", lambda _: torch.eye(257)[None, 65] * 100)
    held, episode = of.reply(of.tell(of.begin(), "user", b"x"), Sampling(), 3, 0)
    assert of.text(episode) == b"AAA"
    assert held.tokens[-4:].tolist() == [65, 65, 65, 256]
    assert held.unread.tolist() == [65, 256]


def test_a_damaged_file_is_refused(speaker: Any, tmp_path: Path) -> None:
    of, path = speaker("rlt1"), tmp_path / "talk"
    of.save(talk(of), path)
    whole = path.read_bytes()
    for place in range(8, len(whole), len(whole) // 40):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with pytest.raises(UserError, match=r"is damaged|is no conv|other weights|another tok"):
            of.restore(path)
        path.write_bytes(whole[:place])
        with pytest.raises(UserError, match="is no conversation"):
            of.restore(path)


@pytest.mark.parametrize("wrong", ["nothing", "text", "other tensors", "another tokenizer"])
def test_what_is_no_conversation_is_refused(
    speaker: Any, tmp_path: Path, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    of, path = speaker("rlt1"), tmp_path / "talk"
    if wrong == "text":
        path.write_text("hello")
    if wrong == "other tensors":
        save_file({"tokens": torch.zeros(3)}, path)
    if wrong == "another tokenizer":
        of.save(talk(of), path)
        monkeypatch.setattr(Speaker, "_tokenizer", "0123")
    with pytest.raises(UserError, match=r"talk: (no such file|is no conversation|is in the tok)"):
        of.restore(path)


def test_the_fingerprint_is_of_every_weight_and_of_the_precision(trained: Any) -> None:
    model = trained("rlt1")
    seen = {fingerprint(model)}
    assert fingerprint(trained("rlt1")) in seen
    for parameter in model.model.parameters():
        with torch.no_grad():
            parameter.view(-1)[-1] += 1e-9
        seen.add(fingerprint(model))
    assert len(seen) == 1 + len(list(model.model.parameters()))
    train = model.config.train.model_copy(update={"precision": "float32"})
    other = replace(model, config=model.config.model_copy(update={"train": train}))
    assert fingerprint(other) not in seen


def test_the_command_talks_saves_branches_and_replays(
    command: Any, is_one_error: Any, run_of: Any, tmp_path: Path
) -> None:
    run, talk, branch = run_of("rlt1"), tmp_path / "talk", tmp_path / "branch"
    more = ["--tokens", 6, "--temperature", 1.2]
    code, out, _ = command("chat", run, "--say", "the lane", "--session", talk, *more)
    assert code == 0
    assert out
    first = load_file(talk)
    _, one, _ = command("chat", run, "--say", "on", "--session", talk, "--branch", branch, *more)
    assert load_file(talk).keys() == first.keys()
    assert all(torch.equal(tensor, first[name]) for name, tensor in load_file(talk).items())
    _, two, _ = command("chat", run, "--say", "on", "--session", talk, *more)
    assert one == two
    _, both, _ = command("chat", run, "--say", "the lane", "--say", "on", *more)
    assert both == out + two
    older = run / "checkpoints" / "step-00000020"
    code, _, _ = command("chat", older, "--say", "on", "--session", branch, "--replay", *more)
    assert code == 0
    is_one_error(command("chat", run, "--say", "x", "--replay"), "--session")
    system = ["--system", "be brief", "--session", talk]
    is_one_error(command("chat", run, "--say", "x", *system), "has begun already")


@pytest.fixture
def chat(command: Any, trained_runs: Path) -> Any:
    """`chat(...)`: `rlt-dist chat RUN ...` with replies of 3 tokens."""
    return lambda *more: command("chat", trained_runs / "rlt1" / "run", "--tokens", 3, *more)


@pytest.fixture
def at_turn(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`at_turn(turn, do)`: let something happen before a reply, turn 0 being the first."""
    reply, turns = Speaker.reply, iter(range(9))

    def arrange(turn: int, do: Any) -> None:
        def replied(*arguments: Any) -> Any:
            if next(turns) == turn:
                do()
            return reply(*arguments)

        monkeypatch.setattr(Speaker, "reply", replied)

    return arrange


@pytest.mark.parametrize("option", ["--session", "--branch"])
@pytest.mark.parametrize("place", ["none/talk", "", "file/talk", "n" * 250, "loop"])
def test_a_place_that_cannot_be_written_is_one_error_before_the_model_is_read(
    command: Any, is_one_error: Any, tmp_path: Path, option: str, place: str
) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "loop").symlink_to("loop")
    more = ["--session", tmp_path / "file"] if option == "--branch" else []
    result = command("chat", tmp_path / "no run", "--say", "x", *more, option, tmp_path / place)
    is_one_error(result, str(tmp_path / place), "give")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "loop"]


def test_a_branch_overwrites_nothing(chat: Any, is_one_error: Any, tmp_path: Path) -> None:
    talk, other = tmp_path / "talk", tmp_path / "other"
    assert chat("--say", "x", "--session", talk)[0] == 0
    other.write_text("precious")
    for there in (talk, other):
        before = there.read_bytes()
        is_one_error(chat("--say", "x", "--session", talk, "--branch", there), "is there already")
        assert there.read_bytes() == before


def test_what_was_shown_is_kept_though_the_next_turn_is_interrupted(
    chat: Any, at_turn: Any, speaker: Any, tmp_path: Path
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    chat("--say", "one", "--session", tmp_path / "talk")
    at_turn(1, interrupt)
    code, out, _ = chat("--say", "one", "--say", "two", "--session", tmp_path / "cut")
    assert code != 0
    assert out
    kept = [speaker().restore(tmp_path / name).tokens for name in ("talk", "cut")]
    assert torch.equal(*kept)


@pytest.mark.parametrize("turn", [0, 1])
@pytest.mark.parametrize("begun", [False, True])
def test_a_conversation_that_another_process_went_on_with_is_left_alone(
    chat: Any, is_one_error: Any, at_turn: Any, tmp_path: Path, turn: int, begun: bool
) -> None:
    path = tmp_path / "talk"
    if begun:
        chat("--say", "x", "--session", path)
    at_turn(turn, lambda: path.write_text("another's"))
    result = chat("--say", "one", "--say", "two", "--session", path)
    is_one_error(result, "talk: was changed by another process", "--branch")
    assert result[0] == 1
    assert path.read_text() == "another's"


def test_a_linked_session_is_written_where_the_link_points(
    chat: Any, speaker: Any, tmp_path: Path
) -> None:
    (tmp_path / "far").mkdir()
    link, file = tmp_path / "link", tmp_path / "far" / "talk"
    link.symlink_to(file)
    for turns in (1, 2):
        assert chat("--say", "x", "--session", link)[0] == 0
        assert link.is_symlink()
        assert int((speaker().restore(file).tokens == 256).sum()) == 2 * turns
