"""The mesh of each point of a study, and the predictions that are kept in its folder."""

from collections.abc import Sequence
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from rlt_dist.mesh.axes import Axes, least_axes, parse_axes
from rlt_dist.study.grid import Study
from rlt_dist.study.predict import PREDICTIONS, Prediction, predict
from rlt_dist.util.errors import UserError
from rlt_dist.util.files import write_atomic

_LIST = TypeAdapter(list[Prediction])


def meshes_of(study: Study, output: Path) -> dict[str, Axes]:
    """By a point's name: the study's mesh, or the one that is predicted to be best.

    Predictions are those in the study's folder; where a point has none, they are made and kept. A
    point is left out if no mesh of it fits.
    """
    if study.config.mesh == "configured":
        return {point.name: least_axes(point.config.mesh) for point in study.points}
    known = {each.name: each for each in known_predictions(output)}
    if not all(point.name in known for point in study.points):
        known = {each.name: each for each in predict(study)}
        keep_predictions(output, list(known.values()))
    predictions = (known[point.name] for point in study.points)
    return {each.name: parse_axes(each.axes) for each in predictions if each.fits}


def known_predictions(output: Path) -> list[Prediction]:
    """Those that a study's folder has.

    Raises:
        UserError: they cannot be read.
    """
    path = output / PREDICTIONS
    if not path.is_file():
        return []
    try:
        return _LIST.validate_json(path.read_bytes())
    except ValidationError:
        raise UserError(
            f"{path}: cannot be read; `rlt-dist scale predict` writes it anew"
        ) from None


def keep_predictions(output: Path, predictions: Sequence[Prediction]) -> None:
    """Write a study's predictions into its folder."""
    output.mkdir(parents=True, exist_ok=True)
    write_atomic(output / PREDICTIONS, _LIST.dump_json(list(predictions), indent=1) + b"\n")
