"""A scaling study: a grid of runs over nodes and whatever else varies, `configs/studies/*.yaml`."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from rlt_dist.config.load import Strict, apply_override, load_typed
from rlt_dist.config.run import RunConfig
from rlt_dist.costs.cluster import ClusterConfig, load_cluster
from rlt_dist.mesh.axes import axes_of
from rlt_dist.util.errors import UserError

_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+-]*")
_LONGEST = 200
"""Characters of a point's name, which is that of a folder."""
_SAID = {
    "run_folder": "is that of a point in the study's folder",
    "train.steps": "is the study's `steps`",
    "train.cluster": "is the study's `cluster`",
    "mesh.data": "is what other axes leave of the devices of the study's `nodes`",
}
"""Keys that the study says itself."""
_CHOSEN = {
    f"mesh.{axis}": "is chosen by the study's `mesh: best`" for axis in ("pipeline", "tensor")
}
"""Those that it says besides where it chooses meshes."""

COLUMNS = (
    *("point", "nodes", "devices", "mesh", "lanes", "tokens_per_step", "error_of_seconds"),
    *("device_hours", "price"),
)
OWN_COLUMNS = ("measured_", "predicted_")
"""What other columns of points.csv begin with, besides `COLUMNS` and what varies."""


class StudyConfig(Strict):
    """What is compared."""

    title: str
    config: Path
    """The run that all points are made from; seen from the study's file."""
    overrides: tuple[str, ...] = ()
    """`KEY.SUB=VALUE` of all points."""
    cluster: Path
    """Hardware that predictions are for; seen from the study's file."""
    vocabulary: PositiveInt | None = None
    """Number of ids; null: the corpus's."""
    nodes: list[PositiveInt] = Field(min_length=1)
    """Each with all devices that the cluster's nodes have."""
    scaling: Literal["strong", "weak"] = "strong"
    """strong: every point has the configuration's lanes; weak: lanes grow with the nodes, the
    fewest nodes having the configuration's."""
    vary: dict[str, dict[str, tuple[str, ...]]] = Field(default_factory=dict)
    """By what varies, by label: overrides. Points are all combinations."""
    mesh: Literal["best", "configured"] = "configured"
    """best: of each point the mesh that is predicted to be fastest of those that fit; configured:
    the configuration's stages and tensor ranks, the data axis taking the devices that are left."""
    steps: PositiveInt = 20
    """Of a point that is really run."""
    warmup: NonNegativeInt = 3
    """Steps that are left out of its figures."""
    token_budget: PositiveFloat | None = None
    """Tokens whose cost is told."""
    device_hour: PositiveFloat | None = None
    """Price of a device for an hour, in any currency; null: costs are told in device hours."""

    @model_validator(mode="after")
    def _check(self) -> "StudyConfig":
        labels = [label for name, of in self.vary.items() for label in (name, *of)]
        if unfit := [label for label in labels if not _LABEL.fullmatch(label)]:
            raise ValueError(f"{unfit[0]!r}: labels name folders; use letters, digits and ._=+-")
        if taken := [n for n in self.vary if n in COLUMNS or n.startswith(OWN_COLUMNS)]:
            raise ValueError(f"vary.{taken[0]}: is a column of points.csv; take another name")
        if empty := [name for name, of in self.vary.items() if not of]:
            raise ValueError(f"vary.{empty[0]} has no values")
        if len(set(self.nodes)) < len(self.nodes):
            raise ValueError("a number of nodes is given twice")
        if self.warmup >= self.steps:
            raise ValueError(f"of {self.steps} steps, {self.warmup} of warm-up leave none")
        return self


@dataclass(frozen=True)
class Point:
    """One run of a study.

    Attributes:
        labels: by what varies.
        config: with `mesh.data` open where the study chooses the mesh.
    """

    nodes: int
    labels: Mapping[str, str]
    config: RunConfig

    @property
    def name(self) -> str:
        """Of its folder: `feedback=B4.nodes=2`."""
        parts = [*(f"{name}={label}" for name, label in self.labels.items()), f"nodes={self.nodes}"]
        return ".".join(parts)


@dataclass(frozen=True)
class Study:
    """A study with what its files hold.

    Attributes:
        points: by labels, then nodes, in the order of the file.
    """

    file: Path
    config: StudyConfig
    cluster: ClusterConfig
    points: tuple[Point, ...]


def load_study(file: Path, overrides: tuple[str, ...] = ()) -> Study:
    """Read a study and all that it names.

    Args:
        overrides: `KEY.SUB=VALUE` of the runs, after those of the study.

    Raises:
        UserError: a file or a point's configuration is wrong, a mesh does not fill the nodes, or
            points cannot be told apart.
    """
    config = load_typed(file, StudyConfig)
    for key, path in (("config", config.config), ("cluster", config.cluster)):
        if not (file.parent / path).is_file():
            raise UserError(f"{file}: {key}: {file.parent / path}: no such file")
    cluster = load_cluster(file.parent / config.cluster)
    points = tuple(_points(file, config, cluster, overrides))
    _check_names(file, points)
    return Study(file, config, cluster, points)


def _check_names(file: Path, points: tuple[Point, ...]) -> None:
    for name, number in Counter(point.name for point in points).items():
        if number > 1:
            raise UserError(f"{file}: {number} points are named {name}; take other labels")
        if len(name) > _LONGEST:
            raise UserError(
                f"{file}: {name}: {len(name)} characters name a folder; take labels with which it "
                f"has at most {_LONGEST}"
            )


def _points(
    file: Path, study: StudyConfig, cluster: ClusterConfig, more: tuple[str, ...]
) -> Iterator[Point]:
    for chosen in product(*(of.items() for of in study.vary.values())):
        labels = {name: label for name, (label, _) in zip(study.vary, chosen, strict=True)}
        own = [override for _, overrides in chosen for override in overrides]
        wished = [*study.overrides, *own, *more]
        try:
            yield from _by_nodes(file.parent / study.config, study, cluster, labels, wished)
        except UserError as error:
            which = ".".join(f"{name}={label}" for name, label in labels.items())
            raise UserError(": ".join(filter(None, (str(file), which, str(error))))) from None


def _by_nodes(
    base: Path,
    study: StudyConfig,
    cluster: ClusterConfig,
    labels: Mapping[str, str],
    overrides: list[str],
) -> Iterator[Point]:
    """Points of the same labels."""
    plain = load_typed(base, RunConfig, overrides)
    _check_said(study, overrides)
    for nodes in study.nodes:
        mesh = "mesh.data=null"
        if study.mesh == "configured":
            open_mesh = plain.mesh.model_copy(update={"data": None})
            mesh = f"mesh.data={axes_of(open_mesh, nodes * cluster.devices_per_node).data}"
        given = [*overrides, f"data.lanes={_lanes(study, plain.data.lanes, nodes)}", mesh]
        yield Point(nodes, labels, load_typed(base, RunConfig, given))


def _check_said(study: StudyConfig, overrides: list[str]) -> None:
    """Raises UserError where an override sets what the study says, alone or in a whole section."""
    said = _SAID | _CHOSEN if study.mesh == "best" else _SAID
    for override in overrides:
        content: dict[str, Any] = {}
        apply_override(content, override)
        for key, why in said.items():
            section, _, name = key.rpartition(".")
            given = content.get(section) if section else content
            if isinstance(given, dict) and name in given:
                raise UserError(f"{override}: {key} {why}")


def _lanes(study: StudyConfig, lanes: int, nodes: int) -> int:
    if study.scaling == "strong":
        return lanes
    grown, left = divmod(lanes * nodes, min(study.nodes))
    if left:
        raise UserError(f"{lanes} lanes on {min(study.nodes)} nodes do not grow to {nodes}")
    return grown
