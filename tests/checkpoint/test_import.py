"""`rlt-dist checkpoint import`: what may come in, and what is refused with nothing written."""

import json
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from rlt_dist.config.load import load_typed
from rlt_dist.config.run import RunConfig
from rlt_dist.models.build import initial_model

ADAPTIVE = ("model.cutoffs=[3,8]", "model.div_val=2")
FORMS = {
    "plain": (),
    "one table": ("model.cutoffs=[3,8]",),
    "tied projections": ADAPTIVE,
    "own projections": (*ADAPTIVE, "model.tie_projections=false"),
}
TENSORS = dict[str, torch.Tensor]


@pytest.fixture
def xl(configure: Any, words_corpus: Path, tmp_path: Path) -> Callable[..., RunConfig]:
    """`xl(*overrides)`: a small Transformer-XL on 16 ranked words; its file is run.yaml."""
    path = f"data.path={words_corpus}"
    return lambda *overrides: configure(tmp_path, "xl", path, "train.precision=float32", *overrides)


@pytest.fixture
def take(command: Any, tmp_path: Path) -> Callable[..., tuple[int, str, str]]:
    """`take(source, *options)`: import into run/ by run.yaml, both in tmp_path."""
    given = ("--output", tmp_path / "run", "--config", tmp_path / "run.yaml")
    return lambda source, *options: command("checkpoint", "import", source, *given, *options)


@pytest.fixture
def refused(take: Any, is_one_error: Any, tmp_path: Path) -> Callable[..., None]:
    """`refused(source, *parts)`: one line with these parts, and nothing is written."""

    def check(source: Path, *parts: str) -> None:
        before = sorted(tmp_path.rglob("*"))
        is_one_error(take(source), *parts)
        assert sorted(tmp_path.rglob("*")) == before

    return check


def stored_once(state: TENSORS) -> TENSORS:
    """The authors' state dict without what is computed and without second names."""
    seen: set[int] = set()
    kept = {}
    for name, tensor in sorted(state.items(), key=lambda item: item[0].startswith("crit.")):
        if name != "pos_emb.inv_freq" and tensor.data_ptr() not in seen:
            kept[name] = tensor
            seen.add(tensor.data_ptr())
    return kept


@pytest.mark.parametrize("form", FORMS)
def test_the_authors_state_dict_comes_in_as_it_is(
    xl: Any, authors: Any, take: Any, stored_model: Any, same: Any, tmp_path: Path, form: str
) -> None:
    config = xl(*FORMS[form])
    state = authors.language_model(config.model, 16).state_dict()
    torch.save(state, tmp_path / "model.pt")
    code, out, err = take(tmp_path / "model.pt")
    assert code == 0, err
    assert "note" not in out
    assert same(stored_model(tmp_path / "run"), stored_once(state))


def test_what_goes_out_again_fits_the_authors_code(
    xl: Any, authors: Any, take: Any, command: Any, tmp_path: Path
) -> None:
    config = xl(*ADAPTIVE)
    theirs = authors.language_model(config.model, 16)
    torch.save(theirs.state_dict(), tmp_path / "model.pt")
    take(tmp_path / "model.pt")
    command("checkpoint", "export", tmp_path / "run", "--output", tmp_path / "out")
    for parameter in theirs.parameters():
        nn.init.zeros_(parameter)
    kept = {name: t.clone() for name, t in torch.load(tmp_path / "model.pt").items()}
    wrong = theirs.load_state_dict(load_file(tmp_path / "out/model.safetensors"), strict=False)
    # Its ties fill in the second names; the buffer is computed.
    assert not wrong.unexpected_keys
    assert all(torch.equal(t, kept[name]) for name, t in theirs.state_dict().items())


@pytest.mark.parametrize("form", ["parameters", "legacy format", "safetensors, ties left out"])
def test_other_forms_of_the_same_numbers(
    xl: Any, authors: Any, take: Any, stored_model: Any, same: Any, tmp_path: Path, form: str
) -> None:
    model = authors.language_model(xl(*ADAPTIVE).model, 16)
    source = tmp_path / "given"
    if form == "parameters":
        torch.save(dict(model.named_parameters()), source)
    elif form == "legacy format":
        torch.save(model.state_dict(), source, _use_new_zipfile_serialization=False)
    else:
        save_file(stored_once(model.state_dict()), source)
    code, _, err = take(source)
    assert code == 0, err
    assert same(stored_model(tmp_path / "run"), stored_once(model.state_dict()))


def test_a_whole_pickled_model_is_refused_unless_it_is_trusted_by_name(
    xl: Any, authors: Any, take: Any, refused: Any, stored_model: Any, same: Any, tmp_path: Path
) -> None:
    model = authors.language_model(xl().model, 16)
    for number, zipped in enumerate((True, False)):
        path = tmp_path / f"{number}.pt"
        torch.save(model, path, _use_new_zipfile_serialization=zipped)
        refused(path, "model.state_dict()", "--trust-pickle")
    code, _, err = take(tmp_path / "0.pt", "--trust-pickle")
    assert code == 0, err
    assert same(stored_model(tmp_path / "run"), stored_once(model.state_dict()))


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return os.mkdir, (str(self.path),)


def test_a_pickle_that_runs_code_runs_none(xl: Any, refused: Any, tmp_path: Path) -> None:
    xl()
    bomb = Bomb(tmp_path / "went off")
    torch.save({"word_emb": bomb}, tmp_path / "model.pt")
    (tmp_path / "model.safetensors").write_bytes(pickle.dumps(bomb))
    refused(tmp_path / "model.pt", "--trust-pickle")
    refused(tmp_path / "model.safetensors", "neither")


class Vanished(nn.Module):
    """A class that whoever unpickles it does not have."""


def test_a_trusted_pickle_of_missing_code_says_what_is_missing(
    xl: Any, take: Any, is_one_error: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    xl()
    with monkeypatch.context() as there:
        there.setattr(Vanished, "__module__", "mem_transformer")
        there.setitem(__import__("sys").modules, "mem_transformer", type(os)("mem_transformer"))
        there.setattr("mem_transformer.Vanished", Vanished, raising=False)
        torch.save(Vanished(), tmp_path / "model.pt")
    result = take(tmp_path / "model.pt", "--trust-pickle")
    is_one_error(result, "No module named 'mem_transformer'", "PYTHONPATH")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "neither a safetensors file nor one of torch.save"),
        (b"hello world, no pickle", "neither a safetensors file nor one of torch.save"),
        (b"\xff" * 8 + b'{"a": 1}', "is damaged"),
        (b"\x08" + b"\0" * 7 + b'{"a": 1}', "is damaged"),
    ],
)
def test_a_file_that_holds_no_model_is_one_line(
    xl: Any, refused: Any, tmp_path: Path, content: bytes, said: str
) -> None:
    xl()
    (tmp_path / "file").write_bytes(content)
    refused(tmp_path / "file", "file", said)
    refused(tmp_path / "missing", "missing: no such file")


@pytest.mark.parametrize("kind", ["safetensors", "pt"])
def test_a_truncated_file_is_one_line(
    xl: Any, authors: Any, refused: Any, tmp_path: Path, kind: str
) -> None:
    state = stored_once(authors.language_model(xl().model, 16).state_dict())
    path = tmp_path / f"model.{kind}"
    save_file(state, path) if kind == "safetensors" else torch.save(state, path)
    path.write_bytes(path.read_bytes()[:-2000])
    refused(path, path.name, "damaged")


def test_more_than_a_state_dict_is_named(
    xl: Any, authors: Any, refused: Any, tmp_path: Any
) -> None:
    state = authors.language_model(xl().model, 16).state_dict()
    torch.save({"model": state, "epoch": 3}, tmp_path / "model.pt")
    refused(tmp_path / "model.pt", "model is a OrderedDict, not a tensor")
    torch.save([1, 2], tmp_path / "list.pt")
    refused(tmp_path / "list.pt", "holds a list")


def spoilt() -> Iterator[tuple[str, Callable[[TENSORS], object], tuple[str, ...]]]:
    """What is wrong with an adaptive model of 2 layers, how, and what is said."""
    bias, table = "layers.1.pos_ff.CoreNet.3.bias", "crit.out_layers.1.weight"
    projection = "word_emb.emb_projs.1"
    yield "missing", lambda s: s.pop(bias), (f"missing: {bias}",)
    yield "unexpected", lambda s: s.update(more=s[bias]), ("unexpected: more",)
    yield "misshapen", lambda s: s.update({bias: s[bias][1:]}), (f"{bias} ([15] there, [16] in",)
    yield "integers", lambda s: s.update({bias: s[bias].long()}), (f"{bias} (torch.int64)",)
    yield "untied", lambda s: s.update({table: s[table] + 1}), (f"{table} (tied to word_emb",)
    yield "one number", lambda s: s.update({projection: s[projection] + 1}), ("crit.out_projs.1",)
    yield (
        "several",
        lambda s: [s.pop(name) for name in list(s) if name.startswith("layers.1.")],
        ("missing: layers.1.dec_attn.qkv_net.weight, ", " and 6 more"),
    )
    yield (
        "vocabulary",
        lambda s: s.update({"word_emb.emb_layers.2.weight": torch.zeros(5, 4)}),
        ("a vocabulary of 13 ids, and the run's corpus 16",),
    )


@pytest.mark.parametrize(
    ("spoil", "parts"), [c[1:] for c in spoilt()], ids=[c[0] for c in spoilt()]
)
def test_what_does_not_fit_is_named(
    xl: Any, authors: Any, refused: Any, tmp_path: Path, spoil: Any, parts: tuple[str, ...]
) -> None:
    state = authors.language_model(xl(*ADAPTIVE).model, 16).state_dict()
    spoil(state)
    torch.save(state, tmp_path / "model.pt")
    refused(tmp_path / "model.pt", "model.pt: ", *parts)


@pytest.fixture
def exported(command: Any, run: RunConfig, tmp_path: Path) -> Path:
    """A folder exported from the finished run; run/ is free again."""
    size = ("--shard-gib", "1e-5")
    command("checkpoint", "export", run.run_folder, "--output", tmp_path / "out", *size)
    run.run_folder.rename(tmp_path / "before")
    return tmp_path / "out"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model.window=5", "window: 4 -> 5"),
        ("model.alpha=0.5", "alpha: 0.1 -> 0.5"),
        ("model.rotary_base=500", "rotary_base: 10000.0 -> 500.0"),
        ("model.kv_heads=1", "kv_heads: 2 -> 1"),
    ],
)
def test_another_configuration_is_refused_key_by_key(
    configure: Any, refused: Any, exported: Path, tmp_path: Path, override: str, said: str
) -> None:
    """Also what no shape tells."""
    configure(tmp_path, "rlt1", override)
    refused(exported, said)


def test_another_kind_or_tokenizer_is_refused(
    configure: Any, refused: Any, xl: Any, exported: Path, words_corpus: Path, tmp_path: Path
) -> None:
    xl()
    refused(exported, "kind: rlt -> transformer_xl")
    configure(tmp_path, "rlt1", f"data.path={words_corpus}")
    refused(exported, "another tokenizer", "--tokenizer")


def test_choices_that_may_change_are_told(
    configure: Any, take: Any, exported: Path, tmp_path: Path
) -> None:
    changes = ("model.dropout=0.0", "model.memory_len=30", "model.kv_heads=2")
    configure(tmp_path, "rlt1", *changes)
    code, out, _ = take(exported)
    assert code == 0
    assert [line for line in out.splitlines() if line.startswith("note")] == [
        "note: memory_len: 24 -> 30",
        "note: dropout: 0.1 -> 0.0",
    ]


def first_shard(folder: Path) -> Path:
    return min(folder.glob("*.safetensors"))


def spoil_index(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    spoil(folder / "model.safetensors.index.json", change)


def spoil(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda out: first_shard(out).unlink(), "model-00001-of-"),
        (lambda out: (out / "config.json").unlink(), "config.json: no such file"),
        (lambda out: (out / "config.json").write_text("[]"), "config.json: is no JSON object"),
        (
            lambda out: spoil(out / "config.json", lambda c: c.pop("vocabulary")),
            "config.json: key 'vocabulary' is missing",
        ),
        (lambda out: (out / "tokenizer.json").unlink(), "tokenizer.json: no such file"),
        (lambda out: spoil_index(out, lambda i: i.pop("weight_map")), "has no weight_map"),
        (
            lambda out: spoil_index(out, lambda i: i["weight_map"].pop("merge.gate.bias")),
            "holds merge.gate.bias, which",
        ),
        (
            lambda out: first_shard(out).write_bytes(first_shard(out).read_bytes()[:-9]),
            "is damaged",
        ),
    ],
)
def test_a_folder_that_is_not_whole_is_one_line(
    configure: Any, refused: Any, exported: Path, tmp_path: Path, damage: Any, said: str
) -> None:
    configure(tmp_path, "rlt1")
    damage(exported)
    refused(exported, said)


def test_a_run_folder_in_use_and_a_wrong_configuration_are_refused(
    configure: Any, take: Any, is_one_error: Any, exported: Path, tmp_path: Path
) -> None:
    configure(tmp_path, "rlt1", "data.lanes=1000")
    is_one_error(take(exported), "1000 lanes cannot share")
    configure(tmp_path, "rlt1")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("x")
    is_one_error(take(exported), "holds notes.txt")


@pytest.mark.parametrize("model", ["rlt1", "rlt2", "xl"])
def test_a_run_from_imported_initial_values_is_the_run_that_draws_them(
    configure: Any, driver: Any, metrics: Any, take: Any, tmp_path: Path, model: str
) -> None:
    """Hence an imported checkpoint is a whole one, with a fresh optimizer, state and cursors."""
    config = configure(tmp_path, model)
    initial = initial_model(config.model, 257, config.train.seed, torch.float64)
    save_file(dict(initial.named_parameters()), tmp_path / "initial.safetensors")
    assert take(tmp_path / "initial.safetensors")[0] == 0
    imported = load_typed(tmp_path / "run" / "config.yaml", RunConfig)
    driver.train(imported)
    drawn = configure(tmp_path / "drawn", model)
    driver.train(drawn)
    assert metrics(imported.run_folder) == metrics(drawn.run_folder)


def test_it_is_evaluated_and_sampled_from_like_the_run_it_came_from(
    command: Any, configure: Any, take: Any, exported: Path, tmp_path: Path
) -> None:
    configure(tmp_path, "rlt1")
    take(exported)
    shown = []
    for run in ("before", "run"):
        evaluated = command("eval", tmp_path / run, "--max-tokens", 200, "--json")
        assert evaluated[0] == 0, evaluated[2]
        record = json.loads(evaluated[1])
        del record["step"]
        sampled = command("generate", tmp_path / run, "--tokens", 20)
        shown.append((record, sampled))
    assert shown[0] == shown[1]
