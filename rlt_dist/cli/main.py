"""The command line: one typer application, one file a command."""

import os
import sys
import threading
import traceback
from typing import Annotated

import typer

from rlt_dist import __version__
from rlt_dist.cli.bench import bench_app
from rlt_dist.cli.bench_checkpoint import checkpoint as bench_checkpoint
from rlt_dist.cli.bench_generation import generation as bench_generation
from rlt_dist.cli.chat import chat
from rlt_dist.cli.checkpoint import checkpoint_app
from rlt_dist.cli.data import data_app
from rlt_dist.cli.doctor import doctor
from rlt_dist.cli.estimate import estimate
from rlt_dist.cli.eval import evaluate
from rlt_dist.cli.exchange import export, import_
from rlt_dist.cli.experiment import experiment_app
from rlt_dist.cli.experiment_context import context as context_experiment
from rlt_dist.cli.experiment_state_tracking import state_tracking
from rlt_dist.cli.generate import generate
from rlt_dist.cli.kernels import kernels_app
from rlt_dist.cli.launch import launch_app
from rlt_dist.cli.params import params
from rlt_dist.cli.report import report
from rlt_dist.cli.scale import scale_app
from rlt_dist.cli.scale_report import report as report_study
from rlt_dist.cli.scale_run import run as run_study
from rlt_dist.cli.status import cancel, logs, status
from rlt_dist.cli.submit import PASSED_ON, PassesOn, resume, submit
from rlt_dist.cli.trace import trace
from rlt_dist.cli.train import train
from rlt_dist.cli.verify import verify_app
from rlt_dist.util.ending import STATUS, how_of
from rlt_dist.util.errors import disk_trouble, one_line
from rlt_dist.util.log import keep_error, show_error

# Read when torch is first imported, which commands do later. Idle OpenMP threads spin by default:
# where anything else runs on the machine, that made a step up to 50 times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# When a rank fails, the one error is not to drown in the others' stack traces of lost connections.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"rlt-dist {__version__}")
        raise typer.Exit


app = typer.Typer(
    name="rlt-dist",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    add_completion=False,
)


@app.callback()
def options(
    _: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Distributed pretraining of models whose state outlives a batch."""


app.add_typer(data_app, name="data")
app.command()(train)
app.command(cls=PassesOn, context_settings=PASSED_ON)(submit)
app.command()(status)
app.command()(logs)
app.command()(cancel)
app.command(cls=PassesOn, context_settings=PASSED_ON)(resume)
app.add_typer(launch_app, name="launch")
app.command("eval")(evaluate)
app.command()(generate)
app.command()(chat)
app.command()(params)
app.command()(estimate)
checkpoint_app.command()(export)
checkpoint_app.command("import")(import_)
app.add_typer(checkpoint_app, name="checkpoint")
app.add_typer(verify_app, name="verify")
scale_app.command("run", cls=PassesOn, context_settings=PASSED_ON)(run_study)
scale_app.command("report")(report_study)
app.add_typer(scale_app, name="scale")
app.command()(trace)
bench_app.command("checkpoint")(bench_checkpoint)
bench_app.command("generation")(bench_generation)
app.add_typer(bench_app, name="bench")
app.add_typer(kernels_app, name="kernels")
experiment_app.command("state-tracking")(state_tracking)
experiment_app.command("context")(context_experiment)
app.add_typer(experiment_app, name="experiment")
app.command()(report)
app.command()(doctor)


def main() -> None:
    """Run the command line.

    What a person can act on is one line. Exit status: 2 after a mistake, 1 after what may pass,
    such as a full disk.
    """
    threading.excepthook = _leave_disk_trouble_to_main
    try:
        app()
    except Exception as error:
        message = one_line(error)
        if message is None:
            keep_error("".join(traceback.format_exception(error)))
            raise
        show_error(message)
        sys.exit(STATUS[how_of(error)])


def _leave_disk_trouble_to_main(args: threading.ExceptHookArgs) -> None:
    """TensorBoard writes in a thread of its own, and raises a full disk again at the next write.

    Shown from the thread as well, it would be a traceback around the one line that says it all.
    """
    if not (isinstance(args.exc_value, OSError) and disk_trouble(args.exc_value)):
        threading.__excepthook__(args)
