"""What launch/gpu_check.sh runs: lines of one table, each of which is right, wrong or untested."""

import argparse
import multiprocessing
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from rlt_dist.config.load import load_typed
from rlt_dist.config.run import RunConfig
from rlt_dist.ops.triton.shapes import Shapes, shapes_of
from rlt_dist.util.records import read_records

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel's file is imported

from rlt_dist.bench.kernels import cases  # noqa: E402
from rlt_dist.bench.kernels.case import check  # noqa: E402

REPOSITORY = Path(__file__).parents[2]
CONFIGS = REPOSITORY / "configs"
WHOLE = ("train.precision=bfloat16", "mesh.tensor=1")
SHAPES = {
    "48+48": ("rlt_48x48", 32000, WHOLE),
    "48+48, 2 key/value heads": ("rlt_48x48", 32000, (*WHOLE, "model.kv_heads=2")),
    "48+48, 1 key/value head": ("rlt_48x48", 32000, (*WHOLE, "model.kv_heads=1")),
    "enwik8 large": ("txl_enwik8_large", 257, WHOLE),
    "WikiText-103 large": ("txl_wt103_large", 267735, WHOLE),
}
"""By name: configuration, vocabulary, and what is replaced in it."""
TINY_SIZES = ("model.heads=2", "model.d_head=8", "model.memory_len=4", "data.segment=8")
TINY = ("rlt_48x48", 64, ("train.precision=float32", "train.micro_batch=2", *TINY_SIZES))
TRAINED = ("rlt_stdlib", "transformer_xl_stdlib")
PREPARED = ("--pattern=*.py", f"--tokenizer={REPOSITORY / 'tokenizer' / 'bytes.yaml'}")
RECORDED = "tests/gpu/test_recorded_loop.py"
LOSS_TOLERANCE = 0.03
"""Largest difference of a step's loss, relative: bfloat16's rounding, grown over the steps."""

BEGUN = time.monotonic()
SECONDS = 465
"""After which nothing is begun or waited for: launch/gpu_check.sh ends all at 480."""
KERNEL_SECONDS = 270
"""After which no more cases are begun: the rest is for what comes after them."""
CASE_SECONDS, RECORDED_SECONDS, RUN_SECONDS = 60, 60, 75
"""What one case, the recorded loop, and one training may take."""


@dataclass(frozen=True)
class Row:
    """Attributes:
    error, tolerance: relative; None: nothing was compared.
    kernel, plain, floor: microseconds; None: not timed.
    failed: what went wrong before anything could be compared; "": nothing.
    untested: why nothing is known; "": something is.
    """

    what: str
    where: str
    error: float | None = None
    tolerance: float | None = None
    kernel: float | None = None
    plain: float | None = None
    floor: float | None = None
    failed: str = ""
    untested: str = ""

    @property
    def verdict(self) -> str:
        if self.untested:
            return f"untested: {self.untested}"
        if self.failed:
            return f"WRONG: {self.failed}"
        known = self.error is not None and self.tolerance is not None
        return "WRONG" if known and not self.error <= self.tolerance else "right"

    @property
    def line(self) -> str:
        numbers = [
            *("-" if x is None else f"{x:.1e}" for x in (self.error, self.tolerance)),
            *("-" if x is None else f"{x:,.1f}" for x in (self.kernel, self.plain, self.floor)),
        ]
        return line(self.what, self.where, numbers, self.verdict)


def line(what: str, where: str, numbers: list[str], verdict: str) -> str:
    return f"{what:30} {where:30}" + "".join(f" {x:>9}" for x in numbers) + f"  {verdict}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50, help="of training, with each backend")
    steps = parser.parse_args().steps
    here = torch.cuda.get_device_name(0) if HAS_GPU else "a CPU"
    print(f"On {here}, torch {torch.__version__}; floors are an H200's.")
    print(line("what", "where", ["error", "allowed", "us", "torch us", "floor us"], ""))
    wrong = 0
    for rows in (kernel_rows(), recorded_rows(), training_rows(steps)):
        for row in rows:
            print(row.line, flush=True)  # as it is known: whatever ends this, the others are told
            wrong += row.verdict.startswith("WRONG")
    return int(wrong > 0)


# -- kernels -----------------------------------------------------------------------------------


def kernel_rows() -> Iterator[Row]:
    """A row for each case; without a GPU one tiny kernel is interpreted."""
    worker = Worker()
    try:
        if not HAS_GPU:
            yield from case_rows(worker, "tiny", TINY, only="band_forward")
        for name, made in SHAPES.items():
            yield from case_rows(worker, name, made, untested="" if HAS_GPU else "no GPU")
    finally:
        worker.end()


def case_rows(
    worker: "Worker",
    where: str,
    made: tuple[str, int, tuple[str, ...]],
    only: str = "",
    untested: str = "",
) -> Iterator[Row]:
    config, vocabulary, overrides = made
    shapes = shapes_of(load_typed(CONFIGS / f"{config}.yaml", RunConfig, overrides), vocabulary)
    for case in cases(shapes):
        if only not in ("", case.name):
            continue
        row = Row(case.name, where, floor=case.floor.microseconds, untested=untested)
        if not untested and time.monotonic() - BEGUN > KERNEL_SECONDS:
            row = replace(row, untested=f"{KERNEL_SECONDS} s had passed")
        yield row if row.untested else replace(row, **worker.check(shapes, case.name))


class Worker:
    """A process that checks cases, begun anew after one that failed: an error on a GPU ends all
    that follows in its process, and may end the process."""

    def __init__(self) -> None:
        self._process: multiprocessing.Process | None = None
        self._pipe: Connection

    def check(self, shapes: Shapes, name: str) -> dict[str, float | str]:
        """What is to stand in the case's row."""
        if self._process is None:
            spawn = multiprocessing.get_context("spawn")
            self._pipe, other = spawn.Pipe()
            self._process = spawn.Process(target=serve, args=(other,), daemon=True)
            self._process.start()
            other.close()
        try:
            self._pipe.send((shapes, name))
            told = {"failed": f"it took more than {CASE_SECONDS} s"}
            if self._pipe.poll(CASE_SECONDS):
                told = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join()
            told = {"failed": f"its process ended with {self._process.exitcode}"}
        if "failed" in told:
            self.end()
        return told

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None


def serve(pipe: Connection) -> None:
    while True:
        shapes, name = pipe.recv()
        pipe.send(found(shapes, name))


def found(shapes: Shapes, name: str) -> dict[str, float | str | None]:
    """Of a case, in this process."""
    case = next(case for case in cases(shapes) if case.name == name)
    try:
        got = check(case, shapes, torch.device("cuda" if HAS_GPU else "cpu"), timed=HAS_GPU)
    except Exception as error:  # the table has a line for all that can go wrong
        return {"failed": said(error)}
    names = ("error", "tolerance", "kernel", "plain")
    return {name: getattr(got, name) for name in names}


def said(error: Exception) -> str:
    """An error on a line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


# -- what kernels do together ------------------------------------------------------------------


def recorded_rows() -> Iterator[Row]:
    """The loop recorded as CUDA graphs, which its test holds to the loop in torch."""
    row = Row("recorded loop", "against the loop in torch")
    if not HAS_GPU:
        yield replace(row, untested="no GPU")
        return
    yield tried(row, lambda: run("-m", "pytest", "-q", RECORDED, limit=RECORDED_SECONDS))


def training_rows(steps: int) -> Iterator[Row]:
    """Both models, with plain torch and with kernels: the losses of every step are alike."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = Path(sysconfig.get_paths()["stdlib"]) / "asyncio"
        made = ("data", "prepare", f"--input={text}", f"--output={folder / 'corpus'}", *PREPARED)
        row = tried(Row("corpus", "for training"), lambda: rlt_dist(*made))
        if row.failed or row.untested:
            yield row
            return
        for model in TRAINED:
            row = Row(model, f"{steps} steps, without, with")
            yield tried(row, lambda model=model: compared(model, steps, folder))


def compared(model: str, steps: int, folder: Path) -> dict[str, float | str]:
    plain = losses(model, "reference", steps, folder)
    if not HAS_GPU:
        return {"untested": f"no GPU; reference alone ended at loss {plain[-1]:.3f}"}
    pairs = zip(plain, losses(model, "triton", steps, folder), strict=True)
    worst = max((abs(b / a - 1) for a, b in pairs), key=lambda x: float("inf") if x != x else x)
    return {"error": worst, "tolerance": LOSS_TOLERANCE}


def losses(model: str, backend: str, steps: int, folder: Path) -> list[float]:
    """Of every step in bfloat16, on a corpus in `folder`."""
    to = folder / f"{model}-{backend}"
    wished = {"run_folder": to, "data.path": folder / "corpus", "train.steps": steps}
    wished |= {"train.precision": "bfloat16", "schedule.warmup": 1, "validation.every": "null"}
    wished |= {"data.lanes": 16}
    overrides = [f"{key}={value}" for key, value in wished.items()]
    rlt_dist("train", str(CONFIGS / f"{model}.yaml"), *overrides, RLT_DIST_OPS=backend)
    return [record["loss"] for record in read_records(to / "metrics.jsonl")]


def tried(row: Row, do: Callable[[], dict[str, float | str] | None]) -> Row:
    """The row with what was found, or with what went wrong."""
    if time.monotonic() - BEGUN > SECONDS:
        return replace(row, untested=f"{SECONDS} s had passed")
    try:
        return replace(row, **(do() or {}))
    except subprocess.TimeoutExpired as error:
        return replace(row, failed=f"it took more than {error.timeout:.0f} s")
    except Exception as error:  # the table has a line for all that can go wrong
        return replace(row, failed=said(error))


def rlt_dist(*words: str, **environment: str) -> None:
    run("-m", "rlt_dist", *words, limit=RUN_SECONDS, **environment)


def run(*words: str, limit: float, **environment: str) -> None:
    """Run Python; where it fails, what it said is shown.

    Raises:
        TimeoutExpired: it took too long.
        RuntimeError: it failed.
    """
    left = max(1.0, min(limit, BEGUN + SECONDS - time.monotonic()))
    inherited = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, *words],
        cwd=REPOSITORY,
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=left,
        check=False,
    )
    if done.returncode:
        told = done.stdout + done.stderr
        print(told, file=sys.stderr, flush=True)
        raise RuntimeError(f"exit status {done.returncode}: {' '.join(told.splitlines()[-1:])}")


if __name__ == "__main__":
    sys.exit(main())
