"""YAML files to typed objects, strictly.

A misspelt key is an error that names the file, the key and the nearest known key; every other
mistake names the file and the key as well. YAML 1.2 is read, so `1e-4` is a number and a repeated
key an error.
"""

import difflib
import io
from collections.abc import Iterable
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from rlt_dist.util.errors import UserError


class Strict(BaseModel):
    """Base of every configuration object: unknown keys are refused, values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _read_as_meant(cls, values: Any) -> Any:
        """Refuse `true` for a number (pydantic reads 1); an empty section is its default."""
        if not isinstance(values, dict):
            return values
        kept = dict(values)
        for name, value in values.items():
            field = cls.model_fields.get(name)
            if isinstance(value, bool) and field is not None and field.annotation is not bool:
                raise ValueError(f"{name} is {str(value).lower()}, which is not a number")
            if value is None and field is not None and isinstance(field.default, BaseModel):
                del kept[name]
        return kept


T = TypeVar("T", bound=BaseModel)
_KEY = "[key]"
"""Where pydantic says that a key of a mapping is wrong, not its value."""


def read_yaml(path: Path) -> dict[str, Any]:
    """Read one YAML mapping.

    Raises:
        UserError: the file is missing, not text, not YAML, or not a mapping.
    """
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "no such file"
        raise UserError(f"{path}: {what}; give the path of a YAML configuration")
    try:
        content = YAML(typ="safe").load(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise UserError(f"{path}: is not text; a YAML configuration is needed") from None
    except (YAMLError, ValueError) as error:
        raise UserError(f"{path}: is not valid YAML: {_one_line(str(error))}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds no keys; a YAML mapping is needed")
    return content


def write_yaml(content: dict[str, Any]) -> str:
    """Format a plain mapping as YAML, keys in their order."""
    writer = YAML()
    writer.default_flow_style = False
    writer.representer.add_representer(
        type(None), lambda dumper, _: dumper.represent_scalar("tag:yaml.org,2002:null", "null")
    )
    stream = io.StringIO()
    writer.dump(content, stream)
    return stream.getvalue()


def load_typed(path: Path, kind: type[T], overrides: Iterable[str] = ()) -> T:
    """Read a YAML file as a `kind`, after applying overrides of the form `key.sub=value`.

    Raises:
        UserError: anything about the file or an override is wrong; one line per mistake.
    """
    content = read_yaml(path)
    for override in overrides:
        apply_override(content, override)
    return validate(content, kind, str(path))


def validate(content: dict[str, Any], kind: type[T], source: str) -> T:
    """Build a `kind` from plain values; `source` names them in errors."""
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        lines = [_explain(problem, kind, source) for problem in error.errors()]
        raise UserError("\n".join(lines)) from None


def apply_override(content: dict[str, Any], override: str) -> None:
    """Put a value that is written as `key.sub=value` into plain values.

    Raises:
        UserError: it is written otherwise.
    """
    key, equals, text = override.partition("=")
    if not equals or not key.strip("."):
        raise UserError(f"override {override!r}: write key.sub=value, for example train.steps=100")
    try:
        value = YAML(typ="safe").load(text)
    except (YAMLError, ValueError):
        raise UserError(f"override {override!r}: the value is not valid YAML") from None
    *parents, last = key.split(".")
    for parent in parents:
        if content.get(parent) is None:
            content[parent] = {}
        content = content[parent]
        if not isinstance(content, dict):
            raise UserError(f"override {override!r}: {parent} is a single value, not a section")
    content[last] = value


def _explain(problem: Any, kind: type[BaseModel], source: str) -> str:
    """One line for one of pydantic's problems."""
    location = [str(part) for part in problem["loc"]]
    if location and location[-1] == _KEY:
        *parents, key = location[:-1]
        where = ".".join(parents)
        if problem["type"] == "string_type":
            return f'{source}: {where}: the key {key} is no text; quote it, as in "{key}"'
        return f"{source}: {where}: the key {key!r}: {_one_line(problem['msg'])}"
    known, path = _walk(kind, location)
    if problem["type"] == "extra_forbidden":
        return f"{source}: unknown key {'.'.join(path)!r}; {_nearest(path[-1], known)}"
    if problem["type"] == "missing":
        return f"{source}: key {'.'.join(path)!r} is missing"
    message = problem["msg"].removeprefix("Value error, ").replace("valid tuple", "valid list")
    where = f"{'.'.join(path)}: " if path else ""
    shown = "" if isinstance(problem["input"], dict | BaseModel) else f" (got {problem['input']!r})"
    return f"{source}: {where}{_one_line(message)}{shown}"


def _nearest(key: str, known: list[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
    return f"did you mean {close[0]!r}?" if close else "no key is known here"


def _walk(kind: type[BaseModel], location: list[str]) -> tuple[list[str], list[str]]:
    """The keys known where `location` ends, and the location as the file writes it.

    pydantic inserts the tag of a discriminated union (such as `rlt`) into a location; the file
    has no such level, so the tag only chooses which model's keys are looked up.
    """
    models: list[type[BaseModel]] = [kind]
    known: list[str] = list(kind.model_fields)
    path: list[str] = []
    for part in location:
        tagged = [model for model in models if _tag(model) == part]
        if tagged and len(models) > 1:
            models, known = tagged, list(tagged[0].model_fields)
            continue
        path.append(part)
        fields = [model.model_fields[part] for model in models if part in model.model_fields]
        inner = [model for field in fields for model in _models_in(field.annotation)]
        if inner:
            models = inner
            known = sorted({name for model in inner for name in model.model_fields})
    return known, path


def _tag(model: type[BaseModel]) -> str | None:
    field = model.model_fields.get("kind")
    return field.default if field is not None else None


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (Annotated, Union, UnionType, list, dict, tuple):
        return [model for part in get_args(annotation) for model in _models_in(part)]
    return []


def _one_line(text: str) -> str:
    return " ".join(text.split())
