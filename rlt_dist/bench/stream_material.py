"""What the stream is measured on: the sources of Python's standard library, raw and prepared."""

import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from rlt_dist.data.corpus.index import TOKENIZER_NAME, SplitIndex, load_corpus
from rlt_dist.data.prepare.inputs import InputOptions
from rlt_dist.data.prepare.prepare import prepare_corpus
from rlt_dist.data.prepare.workers import local_workers

# Many shards, as a large corpus has them: two or three could not be shared out evenly.
_SHARD_BYTES = 1 << 20
_LEFT_OUT = frozenset({"site-packages", "test", "tests"})
_RECIPE = "kind: bpe\nvocabulary: {}\ntraining_bytes: 2097152\n"


@dataclass(frozen=True)
class StreamShape:
    """How the text is cut, and how it is read.

    Attributes:
        separator: stands between documents; None: every file is one.
        tokens: that a step of reading takes, on through as many epochs as there are to it.
        most_bytes: of text, short of the last file.
    """

    separator: str | None
    tokens: int = 1 << 22
    lanes: int = 32
    segment: int = 256
    vocabulary: int = 8192
    most_bytes: int = 24 << 20


@dataclass(frozen=True)
class Material:
    """A folder with the text of a shape, and a corpus made of it.

    Attributes:
        tokens: of the corpus, the documents' end-of-text tokens included.
    """

    shape: StreamShape
    folder: Path
    tokens: int

    @property
    def tokenizer(self) -> Path:
        """The corpus's tokenizer, saved."""
        return self.folder / "corpus" / TOKENIZER_NAME

    def split(self) -> SplitIndex:
        """The corpus, opened."""
        return load_corpus(self.folder / "corpus").split("train")

    def texts(self) -> list[bytes]:
        """All documents, none of them empty."""
        files = [path.read_bytes() for path in sorted((self.folder / "text").iterdir())]
        if (separator := self.shape.separator) is not None:
            files = [part for file in files for part in file.split(separator.encode())]
        return list(filter(None, files))


@contextmanager
def made(shape: StreamShape) -> Iterator[Material]:
    """The text and the corpus, in a folder that is removed in the end."""
    with TemporaryDirectory(prefix="rlt-dist-bench-") as name:
        folder = Path(name)
        text = folder / "text"
        text.mkdir()
        files = list(_sources(shape.most_bytes))
        if shape.separator is not None:
            files = [shape.separator.encode().join(files)]
        for number, content in enumerate(files):
            (text / f"{number:06d}.py").write_bytes(content)
        recipe = folder / "recipe.yaml"
        recipe.write_text(_RECIPE.format(shape.vocabulary))
        split = prepare(shape, text, recipe, folder / "corpus")
        yield Material(shape, folder, split.tokens)


def prepare(
    shape: StreamShape, text: Path, tokenizer: Path, output: Path, workers: int = 1
) -> SplitIndex:
    """Make a corpus of one split, with so many workers."""
    corpus = prepare_corpus(
        [text],
        output,
        tokenizer,
        options=InputOptions(separator=shape.separator),
        shares={"train": 1.0},
        shard_bytes=_SHARD_BYTES,
        workers=local_workers(workers),
    ).corpus
    return corpus.split("train")


def _sources(most: int) -> Iterator[bytes]:
    """The standard library's own files, tests left out, until there are `most` bytes."""
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        if most <= 0:
            return
        if not _LEFT_OUT & set(path.relative_to(library).parts):
            content = path.read_bytes()
            most -= len(content)
            yield content
