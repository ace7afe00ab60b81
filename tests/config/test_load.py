"""Configuration files are read strictly; every mistake is a line that says where it is."""

import pytest

from rlt_dist.config.load import load_typed, read_yaml
from rlt_dist.config.run import RunConfig
from rlt_dist.util.errors import UserError

# Misspelt keys


@pytest.mark.parametrize(
    ("override", "model", "key", "nearest"),
    [
        ("trian={}", "rlt", "trian", "train"),
        ("train.stpes=3", "rlt", "train.stpes", "steps"),
        ("data.lane=3", "rlt", "data.lane", "lanes"),
        ("validation.evrey=3", "rlt", "validation.evrey", "every"),
        ("model.memory_length=3", "rlt", "model.memory_length", "memory_len"),
        ("model.memory_length=3", "transformer_xl", "model.memory_length", "memory_len"),
        ("model.enc_layers=3", "rlt", "model.enc_layers", "encoder_layers"),
        ("model.enc_layers=3", "transformer_xl", "model.enc_layers", "layers"),
        ("model.feedbak=3", "rlt", "model.feedbak", "feedback"),
    ],
)
@pytest.mark.parametrize("by", ["file", "override"])
def test_a_misspelt_key_names_the_file_the_key_and_the_nearest(
    runs, override, model, key, nearest, by
):
    if by == "override":
        message = runs.refuse(None, override, model=model)
    else:
        section, _, name = key.rpartition(".")
        lines = [f"{k}: {v}" for k, v in runs.content(model).items() if k != section]
        if section:
            lines.append(f"{section}: {runs.content(model).get(section, {}) | {name: 3}}")
        else:
            lines.append(f"{name}: 3")
        message = runs.refuse("\n".join(lines))
    assert message == f"{runs.path}: unknown key {key!r}; did you mean {nearest!r}?"


@pytest.mark.parametrize("name", ["rlt", "transformer_xl"])
def test_a_key_that_is_spelt_as_a_kind_of_model_is_named_as_well(runs, name):
    message = runs.refuse(None, f"model.{name}=3", model=name)
    assert message.startswith(f"{runs.path}: unknown key 'model.{name}'; did you mean")


def test_every_mistake_has_a_line_of_its_own(runs):
    message = runs.refuse(None, "train.stpes=3", "optimiser.learning_rate=1", "train.steps=0")
    lines = message.splitlines()
    assert len(lines) == 3
    assert all(line.startswith(f"{runs.path}: ") for line in lines)


# Other mistakes of content


@pytest.mark.parametrize("key", ["run_folder", "data.lanes", "train.steps", "model.heads"])
def test_a_missing_key_is_named(runs, key):
    content = runs.content()
    *sections, last = key.split(".")
    inner = content[sections[0]] if sections else content
    del inner[last]
    text = "\n".join(f"{name}: {value}" for name, value in content.items())
    assert runs.refuse(text) == f"{runs.path}: key {key!r} is missing"


@pytest.mark.parametrize(
    ("override", "key", "shown"),
    [
        ("train.steps=many", "train.steps", "'many'"),
        ("train.steps=0", "train.steps", "0"),
        ("train.steps=1.5", "train.steps", "1.5"),
        ("train.steps=", "train.steps", "None"),
        ("train.precision=float16", "train.precision", "'float16'"),
        ("model.dropout=1", "model.dropout", "1"),
        ("model.alpha=.nan", "model.alpha", "nan"),
        ("optimizer.learning_rate=.inf", "optimizer.learning_rate", "inf"),
        ("model=3", "model", "3"),
        ("model.kind=rtl", "model", "rtl"),
        ("data=[1]", "data", "[1]"),
    ],
)
def test_a_wrong_value_is_shown_with_its_key(runs, override, key, shown):
    message = runs.refuse(None, override)
    assert message.startswith(f"{runs.path}: {key}: ")
    assert shown in message
    assert len(message.splitlines()) == 1


def test_a_model_without_a_kind_is_refused(runs):
    text = f"run_folder: a\nmodel: {{d_model: 8}}\ndata: {runs.content()['data']}\n"
    text += "optimizer: {learning_rate: 1e-3}\ntrain: {steps: 1}\n"
    message = runs.refuse(text)
    assert message.startswith(f"{runs.path}: model: ")
    assert "'kind'" in message


@pytest.mark.parametrize("override", ["train.steps=true", "model.feedback=true", "data.lanes=true"])
def test_true_is_not_a_number(runs, override):
    section, key = override.removesuffix("=true").split(".")
    message = runs.refuse(None, override)
    assert message.startswith(f"{runs.path}: {section}")
    assert key in message
    assert "true" in message.lower()


@pytest.mark.parametrize("extra", ["1: 2", "true: 2", "null: 2", "[a]: 2"])
def test_a_key_that_is_no_word_is_refused(runs, extra):
    text = "\n".join(f"{name}: {value}" for name, value in runs.content().items())
    assert len(runs.refuse(f"{text}\n{extra}\n").splitlines()) == 1


# Files


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "holds no keys"),
        ("# only a comment\n", "holds no keys"),
        ("- a\n- b\n", "holds no keys"),
        ("word\n", "holds no keys"),
        ("a: [1\n", "is not valid YAML"),
        ("a: 1\n\tb: 2\n", "is not valid YAML"),
        ("a: 1\n---\nb: 2\n", "is not valid YAML"),
        ("a: 1\na: 2\n", "duplicate key"),
        ("a: {b: 1, b: 2}\n", "duplicate key"),
        ("a: *b\n", "is not valid YAML"),
        ("a: !!python/object:os.system b\n", "is not valid YAML"),
        ("a: 2020-99-99\n", "is not valid YAML"),
        (b"\x89PNG\r\n\x1a\n\x00\xff", "is not text"),
        (b"\xff\xfea\x00:\x00", "is not text"),
        (b"\x00\x01\x02", "is not valid YAML"),
    ],
)
def test_a_file_that_is_no_mapping_is_one_line(runs, content, complaint):
    message = runs.refuse(content)
    assert message.startswith(f"{runs.path}: ")
    assert complaint in message
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize("where", ["missing.yaml", "."])
def test_a_missing_file_is_one_line(tmp_path, where):
    with pytest.raises(UserError) as refused:
        load_typed(tmp_path / where, RunConfig)
    assert str(refused.value).startswith(f"{tmp_path / where}: ")
    assert len(str(refused.value).splitlines()) == 1


def test_yaml_is_of_version_1_2(tmp_path):
    path = tmp_path / "some.yaml"
    path.write_text("a: 1e-4\nb: 1E3\nc: yes\nd: 010\ne: off\nf: 0x10\n", encoding="utf-8")
    assert read_yaml(path) == {"a": 1e-4, "b": 1000.0, "c": "yes", "d": 10, "e": "off", "f": 16}


def test_a_file_with_a_byte_order_mark_is_read(runs):
    text = "\n".join(f"{name}: {value}" for name, value in runs.content().items())
    assert runs.load("\ufeff" + text) == runs.load()


# Overrides


def test_overrides_apply_in_order_and_reach_into_sections(runs):
    config = runs.load(
        None,
        "train.steps=7",
        "train.steps=9",
        "optimizer.betas=[0.8, 0.9]",
        "schedule.warmup=3",
        "model.memory_len=null",
        "data.max_document=32",
        "run_folder=runs/a=b",
    )
    assert config.train.steps == 9
    assert config.optimizer.betas == (0.8, 0.9)
    assert config.schedule.warmup == 3
    assert config.model.memory_len is None
    assert config.data.max_document == 32
    assert str(config.run_folder) == "runs/a=b"


def test_an_override_may_choose_another_model(runs):
    config = runs.load(
        None,
        "model={kind: transformer_xl, d_model: 8, heads: 2, d_inner: 4, layers: 1, memory_len: 3}",
    )
    assert config.model.kind == "transformer_xl"


@pytest.mark.parametrize(
    "override",
    [
        "train.steps",
        "=3",
        ".=3",
        "train.steps=[1",
        "train.steps=a: b: c",
        "train.steps.x=3",
        "train.steps=2020-99-99",
        "train.steps=!!int many",
    ],
)
def test_an_override_that_is_none_is_one_line_that_shows_it(runs, override):
    message = runs.refuse(None, override)
    assert message.startswith(f"override {override!r}: ")
    assert len(message.splitlines()) == 1


def test_an_override_fills_a_section_that_the_file_leaves_empty(runs):
    text = "\n".join(f"{name}: {value}" for name, value in runs.content().items())
    assert runs.load(f"{text}\nschedule:\n", "schedule.warmup=1").schedule.warmup == 1
