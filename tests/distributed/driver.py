"""Runs that are watched from outside: what goes into the model, what comes out, what is left.

In one process, `train(config)`. On several, every rank runs the same list of cases in one launch:

    python -m torch.distributed.run --standalone --nproc-per-node 2 driver.py CASES.json RESULTS

CASES.json is a list of {"name", "kind", ...}; the leading rank writes RESULTS/NAME.pt for each, and
every rank RESULTS/left-RANK.json: the threads that are left when its world is closed.
"""

import json
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlt_dist.config.load import load_typed
from rlt_dist.config.run import RunConfig
from rlt_dist.mesh.axes import parse_axes
from rlt_dist.mesh.collectives import all_sum, on_leader, together
from rlt_dist.mesh.mesh import open_mesh
from rlt_dist.mesh.world import World, open_world
from rlt_dist.parallel.mesh import mesh_of
from rlt_dist.train.loop import run_training
from rlt_dist.train.session import Session, open_session
from rlt_dist.util.errors import UserError

Tensors = dict[str, Tensor]


@dataclass
class Forward:
    """One training forward, as the model saw it, of the lanes of one micro-batch.

    `parameters` and `optimizer` are those before the step, and only with its first forward.
    """

    step: int
    lanes: list[int]
    tokens: Tensor
    document_start: Tensor
    state_in: Tensors
    state_out: Tensors
    parameters: Tensors
    optimizer: Tensors


@dataclass
class Watched:
    """A finished (or stopped) run: its session and all its training forwards."""

    session: Session
    forwards: list[Forward] = field(default_factory=list)

    @property
    def parameters(self) -> Tensors:
        return copy_of(dict(self.session.model.named_parameters()))

    @property
    def notes(self) -> list[str]:
        return self.session.notes

    def at(self, step: int) -> Forward:
        """The first forward of a step: its parameters are those after the step before."""
        return next(forward for forward in self.forwards if forward.step == step)


def copy_of(tensors: Tensors) -> Tensors:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def watch(session: Session) -> Watched:
    """Look over the model's shoulder from now on; validation (which has no noise) is left out."""
    watched = Watched(session)

    def see(_: object, inputs: tuple[Any, ...], outputs: tuple[Tensor, Tensors]) -> None:
        tokens, document_start, state, noise, *_ = [*inputs, None]
        if noise is not None:
            first = noise.step not in {forward.step for forward in watched.forwards}
            watched.forwards.append(
                Forward(
                    step=noise.step,
                    lanes=noise.lanes.tolist(),
                    tokens=tokens.clone(),
                    document_start=document_start.clone(),
                    state_in=copy_of(state),
                    state_out=copy_of(outputs[1]),
                    parameters=watched.parameters if first else {},
                    optimizer=copy_of(session.optimizer.tensors()) if first else {},
                )
            )

    session.model.register_forward_hook(see)
    return watched


def train(
    config: RunConfig,
    world: World | None = None,
    prepare: Callable[[Session], object] = lambda _: None,
    *,
    reset_state: bool = False,
) -> Watched:
    """Start or resume a run and train it to its end; `prepare` may change the session first."""
    if world is None:
        with open_world({"OMP_NUM_THREADS": "1"}) as alone:
            return train(config, alone, prepare, reset_state=reset_state)
    with opened(config, world, reset_state=reset_state) as session:
        prepare(session)
        watched = watch(session)
        run_training(session)
    return watched


@contextmanager
def opened(config: RunConfig, world: World, *, reset_state: bool = False) -> Iterator[Session]:
    """A run on the mesh that its configuration asks for."""
    with (
        mesh_of(config, world) as mesh,
        open_session(config, mesh, reset_state=reset_state) as session,
    ):
        yield session


def spoil_gradient(session: Session, steps: set[int], rank: int) -> None:
    """Put NaN into one gradient of one rank in some steps, after it was computed."""
    name, parameter = next((name, p) for name, p in session.model.named_parameters() if p.dim() > 1)
    assert name in session.local_model.parameters
    if session.world.rank == rank:

        def spoil(tensor: Tensor) -> None:
            if session.step + 1 in steps and tensor.grad is not None:
                tensor.grad.view(-1)[0] = torch.nan

        parameter.register_post_accumulate_grad_hook(spoil)


def whole(world: World, value: Any) -> list[Any]:
    """Every rank's value, by rank."""
    values: list[Any] = [None] * world.size
    dist.all_gather_object(values, value, group=world.group)
    return values


def train_case(case: dict[str, Any], world: World) -> dict[str, Any]:
    """Train, and gather what all ranks saw and were left with."""
    config = load_typed(Path(case["config"]), RunConfig)
    spoilt = set(case.get("spoilt_steps", ()))

    def prepare(session: Session) -> None:
        if spoilt:
            spoil_gradient(session, spoilt, world.size - 1)

    watched = train(config, world, prepare)
    session = watched.session
    seen = whole(world, [vars(forward) for forward in watched.forwards])
    return {
        "forwards": [forward for part in seen for forward in part],
        "parameters": whole(world, watched.parameters),
        "optimizer": joined(whole(world, copy_of(session.optimizer.tensors()))),
        "optimizer_elements": whole(world, elements(session)),
        "state": joined(whole(world, copy_of(session.state))),
        "cursors": torch.cat(whole(world, session.cursors)),
        "notes": session.notes,
    }


def joined(parts: list[Tensors]) -> Tensors:
    """Whole tensors from those of ranks along the data axis."""
    return {
        name: torch.cat([part[name] for part in parts]) if tensor.dim() else tensor
        for name, tensor in parts[0].items()
    }


def elements(session: Session) -> dict[str, int]:
    return {name: tensor.numel() for name, tensor in session.optimizer.tensors().items()}


def resume_case(case: dict[str, Any], world: World) -> dict[str, Any]:
    """Train in `run`; in `again`, go on from a copy of what that saved after step 2."""
    config = load_typed(Path(case["config"]), RunConfig)
    again = config.model_copy(update={"run_folder": config.run_folder.with_name("again")})
    train(config, world)
    on_leader(world, lambda: copy_start(config.run_folder, again.run_folder))
    return {"notes": train(again, world).notes}


def copy_start(run: Path, copy: Path) -> None:
    later = shutil.ignore_patterns("step-0000000[3-9]")
    shutil.copytree(run, copy, ignore=later)


def errors_case(_: dict[str, Any], world: World) -> dict[str, Any]:
    """What each rank sees of a mistake that only one rank makes, and how soon."""

    def mistake(rank: int) -> Callable[[], int]:
        def action() -> int:
            if world.rank == rank:
                raise UserError(f"no such file on {rank}")
            return world.rank

        return action

    began = time.monotonic()
    seen = {
        "together_last": told(lambda: together(world, mistake(world.size - 1))),
        "together_first": told(lambda: together(world, mistake(0))),
        "together_none": told(lambda: together(world, mistake(-1))),
        "leader": told(lambda: on_leader(world, mistake(0))),
        "leader_none": told(lambda: on_leader(world, mistake(-1))),
        "seconds": time.monotonic() - began,
    }
    return {"seen": whole(world, seen)}


def mesh_case(case: dict[str, Any], world: World) -> dict[str, Any]:
    """The ranks of each of this process's groups, and where torch's mesh puts it."""
    with open_mesh(world, parse_axes(case["axes"]), case["shared"]) as mesh:
        lines = {name: getattr(mesh, name) for name in ("data", "pipeline", "tensor", "replica")}
        lines |= {
            str(stages): mesh.holders(stages)
            for stages in case["shared"]
            if mesh.place.stage in stages
        }
        found = {name: dist.get_process_group_ranks(line.group) for name, line in lines.items()}
        sums = {
            name: all_sum(torch.tensor(2**world.rank), line).item() for name, line in lines.items()
        }
        place = mesh.devices.get_coordinate()
    return {"groups": whole(world, found), "sums": whole(world, sums), "at": whole(world, place)}


def told(action: Callable[[], object]) -> object:
    try:
        return action()
    except UserError as error:
        return {"message": str(error), "shared": error.shared}


def threads_left() -> list[str]:
    """Names of this process's threads of Python, and of those that serve a process group."""
    names = [task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")]
    python = [thread.name for thread in threading.enumerate() if thread.name != "MainThread"]
    return python + [name for name in names if "gloo" in name]


KINDS = {
    "train": train_case,
    "resume": resume_case,
    "errors": errors_case,
    "mesh": mesh_case,
}


def main(cases: Path, results: Path) -> None:
    with open_world() as world:
        for case in json.loads(cases.read_text()):
            result = KINDS[case["kind"]](case, world)
            if world.leads:
                torch.save(result, results / f"{case['name']}.pt")
    (results / f"left-{world.rank}.json").write_text(json.dumps(threads_left()))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
