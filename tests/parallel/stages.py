"""Stages that are watched at work: the program of the ranks of test_executor.py.

    stages.py CASES FOLDER

CASES is a list in JSON of {"name", "config", and perhaps "passes": how many, "learn": false for
losses alone, "extra": an instruction more for the first stage, "fail": the stage that does}. Rank r
writes FOLDER/NAME-r.json of a case's last pass: "planned", its part of the plan; "seen", the work,
sends and receives that really reached it, watched from below the executor; "done", what the
executor says of itself; "held", how many values are left anywhere; "most", how many values that it
had sent were there at a time.
"""

import json
import sys
import weakref
from pathlib import Path
from typing import Any

import torch

from rlt_dist.config.run import RunConfig
from rlt_dist.inference.forward import through_pipeline
from rlt_dist.mesh.world import open_world
from rlt_dist.parallel.execute import step
from rlt_dist.parallel.execute.channel import Channel
from rlt_dist.parallel.execute.stage import BaseStage
from rlt_dist.parallel.execute.step import Passed
from rlt_dist.parallel.mesh import mesh_of
from rlt_dist.parallel.schedule.instructions import Kind, Receive, Send, Work
from rlt_dist.train.rehearsal import Rehearsal

seen: list[str] = []
used: dict[str, Any] = {}
sent: list[weakref.ref[torch.Tensor]] = []
alive: list[int] = []
real_do, real_send, real_receive = BaseStage.do, Channel.send, Channel.receive
real_execute = step.execute


def do(stage: Any, work: Work) -> None:
    used["stage"] = stage
    seen.append(str(work))
    if len(seen) > 20 and stage.number == used["fails"]:
        raise ValueError(f"stage {stage.number} cannot do this")
    real_do(stage, work)


def send(channel: Any, message: Any, value: Any) -> None:
    seen.append(str(Send(message)))
    sent.append(weakref.ref(value))
    alive.append(sum(value() is not None for value in sent))
    real_send(channel, message, value)


def receive(channel: Any, message: Any) -> Any:
    used["channel"] = channel
    seen.append(str(Receive(message)))
    return real_receive(channel, message)


def execute_more(instructions: Any, stage: Any, channel: Any) -> Any:
    """What an executor does that does not keep to its plan: the first stage embeds twice."""
    more = (Work(Kind.EMBED, 0),) if stage.number == 0 else ()
    return real_execute((*more, *instructions), stage, channel)


def left() -> int:
    """Values and graphs that a stage and its channel still hold."""
    stage, channel = used["stage"], used["channel"]
    names = ("_values", "_embedded", "_encoded", "_decoding", "_d_outputs", "_held")
    kept = [getattr(stage, name, ()) for name in names]
    return sum(map(len, [*kept, channel._expected, channel._sent]))


@torch.no_grad()
def losses(rehearsal: Rehearsal) -> Passed:
    """A pass as in validation."""
    batch, config = rehearsal.next_batch(), rehearsal.config
    return through_pipeline(
        rehearsal.local, rehearsal.mesh, batch, rehearsal.state, config, None, lambda *_: None
    )


def run(case: dict[str, Any], world: Any, folder: Path) -> None:
    config = RunConfig.model_validate(case["config"])
    step.execute = execute_more if case.get("extra") else real_execute
    used["fails"] = case.get("fail")
    with mesh_of(config, world) as mesh:
        rehearsal = Rehearsal(config, 61, mesh)
        for _ in range(case.get("passes", 1)):
            for record in (seen, sent, alive):
                record.clear()
            passed = rehearsal.pass_through() if case.get("learn", True) else losses(rehearsal)
    found = {
        "planned": [str(what) for what in passed.planned[world.rank]],
        "seen": seen,
        "done": [str(t.instruction) for t in passed.done],
        "times": [(t.start, t.end) for t in passed.done],
        "held": left(),
        "sent": passed.sent,
        "most": max(alive, default=0),
    }
    (folder / f"{case['name']}-{world.rank}.json").write_text(json.dumps(found))


def main(cases: str, folder: Path) -> None:
    BaseStage.do, Channel.send, Channel.receive = do, send, receive  # type: ignore[method-assign]
    with open_world() as world:
        for case in json.loads(cases):
            run(case, world, folder)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
