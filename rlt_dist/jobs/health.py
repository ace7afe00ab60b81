"""Whether a job's nodes are fit to train, asked before its ranks are started.

    python -m rlt_dist.jobs.health JOB_FOLDER ADDRESS PORT NODES

runs once on each node, does there what training will do, and prints one line of JSON.
"""

import json
import os
import socket
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from shutil import disk_usage

from pydantic import ValidationError

from rlt_dist.checkpoint.manifest import checkpoints, read_manifest
from rlt_dist.checkpoint.run_folder import CHECKPOINTS
from rlt_dist.config.load import Strict
from rlt_dist.jobs.job import JOB, Job, read_record
from rlt_dist.util.errors import UserError

LIMIT = 180.0
"""Seconds in which a node has to answer."""
_MEETING = timedelta(seconds=60)
"""How long nodes wait for each other."""
_SKEW = 10.0
"""Seconds by which a clock may differ: deadlines are read from it."""
_SAMPLE = 1 << 20
"""Bytes written to the disk, and numbers summed over the nodes."""


class Report(Strict):
    """What one node says of itself.

    Attributes:
        devices: GPUs.
        clock: seconds since the epoch, at a moment that is the same for all nodes; None: it has not
            met them.
        own: what is wrong with it.
        meeting: what went wrong between the nodes.
    """

    node: str
    devices: int
    clock: float | None
    own: str | None
    meeting: str | None


def judge(nodes: Sequence[str], reports: Iterable[Report], gpus: int = 0) -> dict[str, str]:
    """The nodes that are not fit, and why; pure.

    Args:
        gpus: that each node was to have.

    What went wrong between nodes counts only where no node has a trouble of its own, of which it
    would be the consequence.
    """
    by_node = {report.node: report for report in reports}
    sick = {node: "gave no answer" for node in nodes if node not in by_node}
    usual = Counter(report.devices for report in by_node.values()).most_common(1)
    clocks = [report.clock for report in by_node.values() if report.clock is not None]
    middle = statistics.median(clocks) if clocks else 0.0
    for node, report in by_node.items():
        if report.own is not None:
            sick[node] = report.own
        elif report.devices < gpus:
            sick[node] = f"has {report.devices} of {gpus} GPUs"
        elif report.devices < usual[0][0]:
            sick[node] = f"has {report.devices} GPUs where others have {usual[0][0]}"
        elif report.clock is not None and abs(report.clock - middle) > _SKEW:
            sick[node] = f"its clock is {report.clock - middle:+.0f} s off the others'"
    met = {report.node: report.meeting for report in by_node.values() if report.meeting is not None}
    return sick or met


def parse_reports(text: str) -> list[Report]:
    """The reports among the lines that nodes printed."""
    found = []
    for line in text.splitlines():
        with suppress(ValidationError):
            found.append(Report.model_validate_json(line))
    return found


def main(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> None:
    """Examine the node that this process runs on."""
    folder, address, port, nodes = arguments
    node = environment.get("SLURMD_NODENAME") or socket.gethostname()
    rank = int(environment.get("SLURM_PROCID", "0"))
    devices, own = 0, None
    try:
        _try_disk(Path(folder), node)
        devices = _try_devices()
    except (UserError, OSError, RuntimeError) as error:
        own = str(error).partition("\n")[0]
    clock, meeting = None, None
    try:
        clock = _meet(rank, int(nodes), address, int(port), devices)
    except (UserError, RuntimeError) as error:
        meeting = str(error).partition("\n")[0]
    report = Report(node=node, devices=devices, clock=clock, own=own, meeting=meeting)
    print(report.model_dump_json(), flush=True)


def _try_disk(folder: Path, node: str) -> None:
    """Write to the run's folder, read it again, and look for room for one more checkpoint."""
    if not (folder / JOB).is_file():
        raise UserError(f"{folder} is not there: not on a disk that all nodes share?")
    run_folder = read_record(folder / JOB, Job).run_folder
    sample, path = os.urandom(_SAMPLE), run_folder / f".health-{node}"
    try:
        with path.open("wb") as file:
            file.write(sample)
            os.fsync(file.fileno())
        if path.read_bytes() != sample:
            raise UserError(f"{run_folder}: what was written there is read as something else")
    finally:
        path.unlink(missing_ok=True)
    kept = checkpoints(run_folder / CHECKPOINTS)
    needed, free = read_manifest(kept[-1]).bytes if kept else 0, disk_usage(run_folder).free
    if free < needed:
        raise UserError(
            f"{run_folder}: a checkpoint takes {needed / 2**30:.1f} GiB, "
            f"and {free / 2**30:.1f} GiB are free"
        )


def _try_devices() -> int:
    """Multiply matrices of known product on every GPU; how many there are."""
    import torch

    for number in range(torch.cuda.device_count()):
        ones = torch.ones(256, 256, device=torch.device("cuda", number))
        if not bool(((ones @ ones) == 256).all()):
            raise UserError(f"GPU {number} computes a wrong product")
    return torch.cuda.device_count()


def _meet(rank: int, size: int, address: str, port: int, devices: int) -> float:
    """Meet the other nodes and sum over all that came; the clock at the moment of meeting.

    Raises:
        UserError: the sum is wrong.
        RuntimeError: the first node, or another one, cannot be reached.
    """
    import torch
    import torch.distributed as dist

    from rlt_dist.mesh.world import choose_interface

    choose_interface(address, port)
    store = dist.TCPStore(
        address, port, is_master=rank == 0, wait_for_workers=False, timeout=_MEETING
    )
    store.set(f"here {rank}", "")
    if rank == 0:
        store.set("present", json.dumps(_present(store, size)))
    present = json.loads(store.get("present"))
    clock = time.time()
    if rank not in present:
        raise UserError("came too late to meet the other nodes")
    backend = "cpu:gloo,cuda:nccl" if devices else "gloo"
    dist.init_process_group(
        backend,
        store=store,
        rank=present.index(rank),
        world_size=len(present),
        timeout=_MEETING,
    )
    for device in ["cpu", "cuda"][: 1 + bool(devices)]:
        ramp = torch.arange(_SAMPLE, device=device)
        total = ramp + rank
        dist.all_reduce(total)
        if not torch.equal(total, len(present) * ramp + sum(present)):
            raise UserError(f"a sum over the nodes ({device}) is wrong")
    # The first node serves the store, and the others may still be speaking to it.
    dist.barrier()
    dist.destroy_process_group()
    return clock


def _present(store: "dist.Store", size: int) -> list[int]:  # type: ignore[name-defined]  # noqa: F821
    """Who has come; nobody is waited for longer than the limit."""
    until = time.monotonic() + _MEETING.total_seconds()
    while True:
        come = [rank for rank in range(size) if store.check([f"here {rank}"])]
        if len(come) == size or time.monotonic() > until:
            return come
        time.sleep(0.05)


if __name__ == "__main__":
    main(sys.argv[1:])
