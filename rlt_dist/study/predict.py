"""How long a study's points take, by simulation, and which mesh is the fastest of each."""

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256
from math import inf

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from rlt_dist import __version__
from rlt_dist.config.load import Strict
from rlt_dist.costs.estimate import busiest
from rlt_dist.costs.flops import flops_per_token, utilisation
from rlt_dist.costs.run import run_of
from rlt_dist.data.corpus.index import read_content
from rlt_dist.data.corpus.location import open_storage
from rlt_dist.mesh.axes import Axes, axes_of
from rlt_dist.parallel.schedule.simulate import Timeline
from rlt_dist.study.grid import Point, Study
from rlt_dist.study.step import Step
from rlt_dist.util.errors import UserError

PREDICTIONS = "predictions.json"


class Rejected(Strict):
    """Another mesh."""

    axes: str
    seconds: PositiveFloat | None
    """Of a step; null: it was not simulated."""
    least: PositiveFloat
    """Seconds that a step takes at least, whatever its stages wait for."""
    fits: bool


class Prediction(Strict):
    """A point's figures as they are expected."""

    name: str
    digest: str
    """Of what it was made from: see `digest_of`."""
    nodes: PositiveInt
    labels: dict[str, str]
    axes: str
    """Data x pipeline x tensor, as in 2x1x4."""
    seconds: PositiveFloat
    """Of an optimizer step."""
    tokens_per_second: PositiveFloat
    """Of all ranks."""
    mfu: PositiveFloat
    """Model FLOPs utilisation; ranks beyond the cores that they share have no peak."""
    shares: dict[str, NonNegativeFloat]
    """Of the step's time, what the mean rank spends: `compute`, `memory`, `launch` in its work,
    `tensor`, `pipeline`, `data` in messages along these axes, `bubble` in waiting for other stages
    had messages taken no time, `other` in all else. They sum up to 1."""
    peak_memory: NonNegativeInt
    """Bytes of the fullest rank's tensors."""
    fits: bool
    """Whether the cluster's devices have them."""
    sent: dict[str, int]
    """By axis: bytes that the rank which sends most hands over in a step."""
    rejected: tuple[Rejected, ...] = ()
    """Other meshes of these devices, the fastest first."""


def predict(study: Study) -> list[Prediction]:
    """Predict all points of a study.

    Raises:
        UserError: a point's lanes or vocabulary cannot be cut for its mesh, or for any.
    """
    return [predict_point(study, point) for point in study.points]


def predict_point(study: Study, point: Point) -> Prediction:
    """Predict one point, on its mesh or on the best.

    Raises:
        UserError: see `predict`.
    """
    found, rejected = _chosen(study, point)
    run, seconds = found.run, found.seconds
    tokens = run.config.data.tokens_per_step / seconds
    peak = study.cluster.peak(run.config.train.precision, run.axes.size)
    sent: Counter[str] = Counter()
    for (axis, _), (_, handed, _) in busiest(run).items():
        sent[axis] += handed
    flops = flops_per_token(run.config, run.vocabulary)
    return Prediction(
        name=point.name,
        digest=digest_of(study, point),
        nodes=point.nodes,
        labels=dict(point.labels),
        axes=str(run.axes),
        seconds=seconds,
        tokens_per_second=tokens,
        mfu=utilisation(flops, tokens, peak),
        shares=found.shares,
        peak_memory=found.peak_memory,
        fits=found.peak_memory <= study.cluster.usable,
        sent=dict(sent),
        rejected=tuple(rejected),
    )


def digest_of(study: Study, point: Point) -> str:
    """SHA-256 of all that a point's prediction is made from, this package's version included.

    Raises:
        UserError: there is no corpus to tell the vocabulary.
    """
    content = {
        "version": __version__,
        "config": point.config.model_dump(mode="json"),
        "vocabulary": _vocabulary(study, point),
        "nodes": point.nodes,
        "cluster": study.cluster.model_dump(mode="json"),
    }
    return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def timeline(study: Study, point: Point, axes: Axes) -> Timeline:
    """One pass of a point's step on a mesh, by stage, shortened where it is too long to be drawn.

    Raises:
        UserError: the point cannot be cut so, or there is no corpus to tell the vocabulary.
    """
    return _step(study, point, _vocabulary(study, point), axes).passes.drawn()


# -- the best mesh -----------------------------------------------------------------------------


def _chosen(study: Study, point: Point) -> tuple[Step, list[Rejected]]:
    """The step of a point on its mesh, or on the best one with what others would take.

    Raises:
        UserError: see `predict`; it names the point.
    """
    try:
        return _tried(study, point)
    except UserError as error:
        raise UserError(f"{study.file}: {point.name}: {error}") from None


def _tried(study: Study, point: Point) -> tuple[Step, list[Rejected]]:
    """Where no mesh fits, the best is the one that needs least memory."""
    devices = point.nodes * study.cluster.devices_per_node
    vocabulary = _vocabulary(study, point)
    if study.config.mesh == "configured":
        return _step(study, point, vocabulary, axes_of(point.config.mesh, devices)), []
    steps = list(_possible(study, point, vocabulary, devices))
    if not steps:
        raise UserError(f"its model and lanes cannot be cut over {devices} devices")
    fitting = [step for step in steps if step.peak_memory <= study.cluster.usable]
    best = min(steps, key=lambda step: step.peak_memory)
    fastest = inf
    for step in sorted(fitting, key=lambda of: of.least):
        if step.least < fastest and step.seconds < fastest:
            best, fastest = step, step.seconds
    rejected = (
        Rejected(
            axes=str(step.run.axes),
            seconds=step.seconds if step in fitting and step.least < fastest else None,
            least=step.least,
            fits=step in fitting,
        )
        for step in steps
        if step is not best
    )
    return best, sorted(rejected, key=lambda of: (not of.fits, of.seconds or inf, of.least))


def _possible(study: Study, point: Point, vocabulary: int, devices: int) -> Iterator[Step]:
    """A point's step on every mesh that it can be cut for."""
    for axes in meshes(devices):
        with suppress(UserError):
            yield _step(study, point, vocabulary, axes)


def meshes(devices: int) -> Iterator[Axes]:
    """All meshes of so many devices."""
    for pipeline in _divisors(devices):
        for tensor in _divisors(devices // pipeline):
            yield Axes(devices // pipeline // tensor, pipeline, tensor)


def _divisors(number: int) -> Iterator[int]:
    return (of for of in range(1, number + 1) if number % of == 0)


def _step(study: Study, point: Point, vocabulary: int, axes: Axes) -> Step:
    """Raises UserError where the run cannot be cut so."""
    compiled = study.cluster.cores is not None
    run = run_of(point.config, vocabulary, axes, compiled=compiled, apart=True)
    return Step(run, study.cluster)


def _vocabulary(study: Study, point: Point) -> int:
    """The study's, or the corpus's."""
    if study.config.vocabulary is not None:
        return study.config.vocabulary
    corpus = open_storage(point.config.data.corpora[0].path)
    return read_content(corpus).tokenizer.vocabulary
