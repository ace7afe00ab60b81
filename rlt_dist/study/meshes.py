"""The mesh of each point of a study, and the predictions that are kept in its folder."""

from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from rlt_dist.mesh.axes import Axes, least_axes, parse_axes
from rlt_dist.study.grid import Point, Study
from rlt_dist.study.predict import PREDICTIONS, Prediction, digest_of, predict_point
from rlt_dist.util.errors import UserError
from rlt_dist.util.files import make_folder, write_atomic

_LIST = TypeAdapter(list[Prediction])

Say = Callable[[str], None]


def meshes_of(study: Study, output: Path, say: Say) -> dict[str, Axes]:
    """By a point's name: the study's mesh, or the one that is predicted to be best.

    Predictions are those in the study's folder; where a point has none, or one of something else,
    they are made and kept. A point is left out if no mesh of it fits.
    """
    if study.config.mesh == "configured":
        return {point.name: least_axes(point.config.mesh) for point in study.points}
    found = _current(study, study.points, _kept(output), output, say)
    return {name: parse_axes(each.axes) for name, each in found.items() if each.fits}


def known_predictions(study: Study, output: Path, say: Say) -> dict[str, Prediction]:
    """By a point's name: the predictions that a study's folder has.

    Those that were made from another configuration, vocabulary or cluster are made anew and kept.

    Raises:
        UserError: they cannot be read, or a point cannot be predicted.
    """
    kept = _kept(output)
    points = [point for point in study.points if point.name in kept]
    return _current(study, points, kept, output, say)


def keep_predictions(output: Path, predictions: Sequence[Prediction]) -> None:
    """Write a study's predictions into its folder."""
    make_folder(output)
    write_atomic(output / PREDICTIONS, _LIST.dump_json(list(predictions), indent=1) + b"\n")


def _kept(output: Path) -> dict[str, Prediction]:
    """By a point's name, whatever they were made from."""
    path = output / PREDICTIONS
    if not path.is_file():
        return {}
    try:
        return {each.name: each for each in _LIST.validate_json(path.read_bytes())}
    except ValidationError:
        raise UserError(
            f"{path}: cannot be read; `rlt-dist scale predict` writes it anew"
        ) from None


def _current(
    study: Study, points: Sequence[Point], kept: dict[str, Prediction], output: Path, say: Say
) -> dict[str, Prediction]:
    """Of some points: what is kept where it is of them as they are now, else made anew."""
    digests = {name: each.digest for name, each in kept.items()}
    stale = [each for each in points if digests.get(each.name) != digest_of(study, each)]
    others = [each.name for each in stale if each.name in kept]
    if others:
        say(
            f"{output / PREDICTIONS}: {len(others)} of another configuration, vocabulary, cluster "
            f"or version, such as {others[0]}; they are made anew"
        )
    if stale:
        make_folder(output)
        kept |= {each.name: predict_point(study, each) for each in stale}
        keep_predictions(output, [kept[each.name] for each in points])
    return {each.name: kept[each.name] for each in points}
