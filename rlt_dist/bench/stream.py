"""The stream: reading and preparing a corpus, against the fastest plain ways, and a training step.

Seconds are those of one million tokens. `ratio` is the speed against the variant that a name ends
with; every variant of a shape goes through the same number of tokens.

- `webdataset`: plain iteration over the corpus's tars, `shardshuffle=False`, with webdataset's own
  decoder of arrays and no other;
- `lanes/webdataset`, `workers/webdataset`: the lanes of the same corpus, read in this process, and
  by one worker;
- `sentencepiece`: encodes all documents, which lie in memory, with so many threads;
- `prepare/sentencepiece`: the whole of `prepare_corpus` on the same text, in files, into a fresh
  folder, with so many workers;
- `step`: forward and backward of the small model;
- `lanes/step`: the lanes it is trained on.
"""

import base64
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import sentencepiece
import torch
import webdataset
from webdataset.autodecode import npy_loads

from rlt_dist.bench.compare import Bench, Variant
from rlt_dist.bench.steps import TrainingStep, model_of
from rlt_dist.bench.stream_material import Material, StreamShape, made, prepare
from rlt_dist.bench.timing import Step
from rlt_dist.config.model import RltConfig
from rlt_dist.data.stream.loader import LaneLoader
from rlt_dist.data.stream.mixture import Share
from rlt_dist.data.stream.reading import Reading

_UNIT = 1_000_000
_AHEAD = 4
SMALL_MODEL = RltConfig(
    d_model=128,
    heads=4,
    ffn=344,
    encoder_layers=2,
    decoder_layers=2,
    window=8,
    memory_len=256,
    feedback=1,
)
"""That of configs/rlt_stdlib.yaml."""


class Reader:
    """Reads on and on, so many tokens at a call; what came beyond them counts for the next."""

    def __init__(self, pieces: Iterator[np.ndarray], tokens: int) -> None:
        self._pieces, self._tokens, self._beyond = pieces, tokens, 0

    def __call__(self) -> None:
        """Read them."""
        count = self._beyond
        while count < self._tokens:
            count += next(self._pieces).size
        self._beyond = count - self._tokens


def webdataset_documents(material: Material) -> Iterator[np.ndarray]:
    """All documents as a plain reader of tars gives them, epoch after epoch."""
    tars = [shard.address for shard in material.split().shards]
    dataset = webdataset.WebDataset(tars, shardshuffle=False).map_dict(npy=npy_loads)
    while True:
        for sample in dataset:
            yield sample["npy"]


def lane_segments(workers: int, material: Material) -> Iterator[np.ndarray]:
    """The next input tokens of all lanes, int64 [lanes, T], without end."""
    shape = material.shape
    mixture = (Share(material.split(), 1),)
    reading = Reading(mixture, lanes=shape.lanes, segment=shape.segment, seed=0)
    with LaneLoader(reading, range(shape.lanes), workers=workers, ahead=_AHEAD) as loader:
        while True:
            yield loader.next().tokens[:, :-1].numpy()


def webdataset_step(material: Material) -> Step:
    """The next tokens of the tars."""
    return Reader(webdataset_documents(material), material.shape.tokens)


def lanes_step(workers: int, material: Material) -> Step:
    """The next tokens of the lanes. Workers end with the step object."""
    return Reader(lane_segments(workers, material), material.shape.tokens)


def sentencepiece_step(material: Material) -> Step:
    """Every document's ids, all held at once."""
    model = base64.b64decode(json.loads(material.tokenizer.read_bytes())["model"])
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    texts, threads = material.texts(), torch.get_num_threads()

    def step() -> None:
        # Bytes and arrays are its quickest ways in and out.
        encoded = processor.encode(texts, num_threads=threads, return_type="numpy")
        _check_all(sum(map(len, encoded)) + len(encoded), material)

    return step


def prepare_step(material: Material) -> Step:
    """Text in files to a corpus on disk, and its removal."""
    shape, text, workers = material.shape, material.folder / "text", torch.get_num_threads()

    def step() -> None:
        with TemporaryDirectory(dir=material.folder) as fresh:
            split = prepare(shape, text, material.tokenizer, Path(fresh) / "corpus", workers)
            _check_all(split.tokens, material)

    return step


def training_step(material: Material) -> Step:
    """Forward, loss and backward of one segment of every lane."""
    shape = material.shape
    return TrainingStep(model_of(SMALL_MODEL, shape.vocabulary), shape.lanes, shape.segment)


def _check_all(tokens: int, material: Material) -> None:
    """Raises RuntimeError: a variant has left out or added a token, and its time says nothing."""
    if tokens != material.tokens:
        raise RuntimeError(f"{tokens} tokens were made of a text of {material.tokens}")


def _read(material: Material) -> float:
    return material.shape.tokens / _UNIT


def _whole(material: Material) -> float:
    return material.tokens / _UNIT


def _segments(material: Material) -> float:
    return material.shape.lanes * material.shape.segment / _UNIT


READ = Bench(
    name="stream",
    reference="webdataset",
    shapes={
        "read_small": StreamShape("\n\n"),
        "read_large": StreamShape(None, tokens=1 << 24),
    },
    variants={
        "webdataset": Variant(webdataset_step, _read),
        "lanes/webdataset": Variant(partial(lanes_step, 0), _read),
        "workers/webdataset": Variant(partial(lanes_step, 1), _read),
    },
    setting=made,
)
PREPARE = Bench(
    name="stream",
    reference="sentencepiece",
    shapes={
        "prepare_small": StreamShape("\n\n"),
        "prepare_large": StreamShape(None),
    },
    variants={
        "sentencepiece": Variant(sentencepiece_step, _whole),
        "prepare/sentencepiece": Variant(prepare_step, _whole),
    },
    setting=made,
)
STEP = Bench(
    name="stream",
    reference="step",
    shapes={"step": StreamShape(None, segment=64)},
    variants={
        "step": Variant(training_step, _segments),
        "lanes/step": Variant(partial(lanes_step, 0), _read),
    },
    setting=made,
)
BENCHES = (READ, PREPARE, STEP)
