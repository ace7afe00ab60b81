"""The package's floors: imports go down only, files and functions stay readable.

`violations` reads the source under a root without importing it. It is run on the package, and on
small made-up packages that break each rule.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "rlt_dist"
FLOORS = {"config": 0, "util": 0, "mesh": 1, "ops": 2, "models": 3, "data": 4}
FLOORS |= {"tasks": 5, "parallel": 5}
FLOORS |= dict.fromkeys(("costs", "train", "checkpoint", "inference", "jobs"), 6)
FLOORS |= dict.fromkeys(("cli", "study", "bench", "experiments"), 7)
TOP = {"cli.main": 8, "__main__": 9}  # they gather the commands
WITHOUT_DISTRIBUTED = {room for room, floor in FLOORS.items() if floor <= 3} - {"mesh"}
LONGEST_FILE, LONGEST_FUNCTION = 500, 60


@dataclass(frozen=True)
class Source:
    """One file of the package."""

    root: Path
    path: Path

    @property
    def parts(self) -> tuple[str, ...]:
        """Its module below the package: ("models", "rlt", "chunks")."""
        parts = self.path.relative_to(self.root).with_suffix("").parts
        return parts[:-1] if parts[-1] == "__init__" else parts

    @property
    def name(self) -> str:
        return self.path.relative_to(self.root).as_posix()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text(encoding="utf-8"))

    def imports(self) -> Iterator[tuple[int, str]]:
        """Line and full dotted name of everything imported, anywhere in the file.

        `from a import b` gives a.b, since b may be a module.
        """
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from ((node.lineno, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = self._base(node)
                yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)

    def _base(self, node: ast.ImportFrom) -> str:
        """The module that an import's names are taken from."""
        if not node.level:
            return node.module or ""
        package = self.path.relative_to(self.root).parent.parts
        above = package[: len(package) - (node.level - 1)]
        return ".".join((self.root.name, *above, *filter(None, [node.module])))


def floor_of(parts: tuple[str, ...]) -> int:
    """The floor of a module below the package; the package's own file is at the bottom."""
    for top, floor in TOP.items():
        if parts[: top.count(".") + 1] == tuple(top.split(".")):
            return floor
    return FLOORS.get(parts[0], 0) if parts else 0


def violations(root: Path) -> list[str]:
    """Every broken rule of a package, one line each."""
    sources = [Source(root, path) for path in sorted(root.rglob("*.py"))]
    found = [line for source in sources for line in _of_file(source)]
    return found + _cycles(sources)


def _of_file(source: Source) -> Iterator[str]:
    if len(source.path.relative_to(source.root).parts) > 1 and source.parts[0] not in FLOORS:
        yield f"{source.name}: {source.parts[0]} is on no floor"
    yield from _upward(source)
    if source.parts and source.parts[0] in WITHOUT_DISTRIBUTED:
        yield from _distributed(source)
    lines = len(source.path.read_text(encoding="utf-8").splitlines())
    if lines > LONGEST_FILE:
        yield f"{source.name}: {lines} lines"
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            # A command's parameters are its help: only the body counts.
            length = (node.end_lineno or node.lineno) - node.body[0].lineno + 1
            if length > LONGEST_FUNCTION:
                yield f"{source.name}:{node.lineno}: {node.name} has {length} lines"


def _inside(source: Source) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Line and module below the package of every import of the package itself."""
    for line, name in source.imports():
        package, *parts = name.split(".")
        if package == source.root.name:
            yield line, tuple(parts)


def _upward(source: Source) -> Iterator[str]:
    own = floor_of(source.parts)
    for line, parts in _inside(source):
        same_room = parts[:1] == source.parts[:1]
        if floor_of(parts) > own and not same_room:
            yield f"{source.name}:{line}: imports {'.'.join(parts)}, which is above"


def _distributed(source: Source) -> Iterator[str]:
    lines = [
        line
        for line, name in source.imports()
        if f"{name}.".startswith(("torch.distributed.", "torch._C._distributed"))
    ]
    lines += [
        node.lineno
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed"
    ]
    yield from (f"{source.name}:{line}: uses torch.distributed" for line in lines)


def _cycles(sources: list[Source]) -> list[str]:
    """Rooms of one floor that import each other."""
    graph: dict[str, set[str]] = {room: set() for room in FLOORS}
    for source in sources:
        if not source.parts or source.parts[0] not in FLOORS or ".".join(source.parts) in TOP:
            continue
        room = source.parts[0]
        for _, parts in _inside(source):
            other = parts[0] if parts else room
            if other != room and FLOORS.get(other) == FLOORS[room]:
                graph[room].add(other)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [f"rooms import each other: {' -> '.join(error.args[1])}"]
    return []


def test_the_package_keeps_its_floors():
    assert violations(PACKAGE) == []


# The checker itself


@pytest.fixture
def package(tmp_path: Path):
    """Builds a package `made_up` of the given files and gives its violations."""

    def build(**files: str) -> list[str]:
        root = tmp_path / "made_up"
        for name, text in files.items():
            path = root / f"{name.replace('__of__', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return violations(root)

    return build


ALLOWED = [
    ("models__of__rlt__of__model", "from made_up.ops.rotary import rotate"),
    ("models__of__rlt__of__model", "from ...config import model"),
    ("models__of__rlt__of__model", "from . import layers"),
    ("models__of__rlt__of__model", "from .. import state"),
    ("models__of__model", "import torch\nfrom torch import nn"),
    ("mesh__of__groups", "import torch.distributed as dist"),
    ("train__of__step", "from torch import distributed"),
    ("train__of__step", "from made_up.checkpoint import save"),
    ("train__of__step", "from made_up import __version__"),
    ("cli__of__main", "import made_up.study.report\nfrom made_up.cli import train"),
    ("__main__", "from made_up.cli.main import main"),
    ("models__of__model", "import made_upon.cli"),
]


@pytest.mark.parametrize(("name", "text"), ALLOWED)
def test_what_goes_down_or_stays_is_allowed(package, name, text):
    assert package(**{name: text}) == []


UPWARD = [
    ("config__of__run", "import made_up.mesh.rank"),
    ("config__of__run", "from made_up import mesh"),
    ("config__of__run", "from made_up.mesh.rank import Rank"),
    ("config__of__run", "from ..models import build"),
    ("config__of__run", "from .. import models"),
    ("ops__of__deep__of__fast", "from ...models.state import State"),
    ("ops__of__core", "def f():\n    from made_up.data import lanes"),
    ("data__of__lanes", "if True:\n    import made_up.train as t"),
    ("parallel__of__ring", "try:\n    import made_up.jobs\nexcept ImportError:\n    pass"),
    ("train__of__step", "from made_up.cli.train import run"),
    ("study__of__run", "from made_up.cli.main import main"),
    ("cli__of__train", "import made_up.__main__"),
    ("__init__", "from made_up.models.build import build_model"),
]


@pytest.mark.parametrize(("name", "text"), UPWARD)
def test_an_import_that_goes_up_is_found(package, name, text):
    found = package(**{name: text})
    assert len(found) == 1
    assert found[0].startswith(f"{name.replace('__of__', '/')}.py:")
    assert found[0].endswith("which is above")


DISTRIBUTED = [
    "import torch.distributed",
    "import torch.distributed.tensor as t",
    "from torch import distributed as dist",
    "from torch.distributed import all_reduce",
    "from torch.distributed.tensor import DTensor",
    "import torch\ndef f():\n    return torch.distributed.is_initialized()",
]


@pytest.mark.parametrize("text", DISTRIBUTED)
@pytest.mark.parametrize("room", ["models", "ops", "util", "config"])
def test_torch_distributed_below_the_models_is_found(package, room, text):
    found = package(**{f"{room}__of__a": text})
    assert len(found) == 1
    assert found[0].endswith("uses torch.distributed")


def test_rooms_of_one_floor_that_import_each_other_are_found(package):
    one_way = {"train__of__a": "import made_up.checkpoint.b", "checkpoint__of__b": ""}
    assert package(**one_way) == []
    found = package(**one_way | {"checkpoint__of__b": "from ..train import a"})
    assert len(found) == 1
    assert found[0].startswith("rooms import each other: ")


def test_a_cycle_of_three_rooms_is_found(package):
    found = package(
        train__of__a="import made_up.checkpoint",
        checkpoint__of__a="def f():\n    import made_up.inference",
        inference__of__a="import made_up.train",
    )
    assert len(found) == 1
    assert found[0].count("->") == 3


def test_a_folder_on_no_floor_is_found(package):
    assert package(attic__of__old="x = 1") == ["attic/old.py: attic is on no floor"]
    assert package(attic__of____init__="", models__of__a="") != []


def test_a_file_or_function_that_is_too_long_is_found(package):
    assert package(ops__of__file="x = 1\n" * 500) == []
    assert package(ops__of__file="x = 1\n" * 501) == ["ops/file.py: 501 lines"]
    body = "    x = 1\n" * 60
    assert package(ops__of__file=f"def f():\n{body}") == []
    long = f"class A:\n  async def f(self):\n{body}    x = 2\n"
    assert package(ops__of__file=long) == ["ops/file.py:2: f has 61 lines"]
    documented = f'def f():\n    """One.\n\n    Two.\n    """\n{body}'
    assert package(ops__of__file=documented) == ["ops/file.py:1: f has 64 lines"]
