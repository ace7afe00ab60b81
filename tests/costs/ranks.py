"""Every rank's messages in one step, as they are handed to torch.distributed.

    python ranks.py FOLDER

FOLDER/cases.json is a list of {"name", "config", "vocabulary", "steps"}; each rank writes
FOLDER/RANK.json: by case, the messages of the last step as [ranks, kind, bytes, calls], the bytes
of each axis as the mesh has metered them, and how many of its targets each tail of an adaptive
softmax holds.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from rlt_dist.config.model import TransformerXLConfig
from rlt_dist.config.run import RunConfig
from rlt_dist.mesh.world import World, open_world
from rlt_dist.models.transformer_xl.adaptive import Clusters
from rlt_dist.parallel.mesh import mesh_of
from rlt_dist.train.rehearsal import Rehearsal

SENT: dict[str, Callable[..., Tensor]] = {
    "all_reduce": lambda tensor, *_: tensor,
    "all_to_all_single": lambda _, tensor, *__: tensor,
    "all_gather": lambda _, tensor, *__: tensor,
    "isend": lambda tensor, *_: tensor,
}
"""By function, the argument that is sent."""
KINDS = {"all_to_all_single": "all_to_all", "isend": "send"}
ENDLESS = 1 << 60
"""Mean tokens of a document."""


@contextmanager
def recorded() -> Iterator[Counter[tuple[tuple[int, ...], str, int]]]:
    """Counts messages: the project and megatron-core name torch.distributed's functions by it."""
    found: Counter[tuple[tuple[int, ...], str, int]] = Counter()

    def watched(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            ranks = tuple(dist.get_process_group_ranks(named["group"]))
            found[ranks, KINDS.get(name, name), SENT[name](*given).nbytes] += 1
            return real(*given, **named)

        return call

    replaced = {name: watched(name, getattr(dist, name)) for name in SENT}
    with mock.patch.multiple(dist, **replaced):
        yield found


def tails(rehearsal: Rehearsal, config: RunConfig, vocabulary: int) -> list[int]:
    if not isinstance(config.model, TransformerXLConfig):
        return []
    clusters = Clusters(config.model.cutoffs, vocabulary)
    cluster = clusters.of(rehearsal.next_batch().tokens[:, 1:])
    return [int((cluster == i).sum()) for i in range(1, clusters.tails + 1)]


def run_case(case: dict[str, Any], world: World) -> dict[str, Any]:
    config, vocabulary = RunConfig.model_validate(case["config"]), case["vocabulary"]
    with mesh_of(config, world) as mesh:
        rehearsal = Rehearsal(config, vocabulary, mesh, document=ENDLESS)
        for _ in range(case["steps"] - 1):
            rehearsal.step()
        in_tails = tails(rehearsal, config, vocabulary)
        before = {axis: meter.bytes for axis, meter in mesh.meters.items()}
        with recorded() as found:
            rehearsal.step()
        metered = {axis: meter.bytes - before[axis] for axis, meter in mesh.meters.items()}
    messages = [[*key, calls] for key, calls in found.items()]
    return {"messages": messages, "metered": metered, "tails": in_tails}


def main(folder: Path) -> None:
    cases = json.loads((folder / "cases.json").read_text())
    with open_world() as world:
        found = {case["name"]: run_case(case, world) for case in cases}
        (folder / f"{world.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
