"""The command line: one typer application, one file a command."""

import os
import sys
import threading
import traceback

import typer

from rlt_dist.cli.bench import bench_app
from rlt_dist.cli.bench_checkpoint import checkpoint as bench_checkpoint
from rlt_dist.cli.checkpoint import checkpoint_app
from rlt_dist.cli.data import data_app
from rlt_dist.cli.doctor import doctor
from rlt_dist.cli.eval import evaluate
from rlt_dist.cli.exchange import export, import_
from rlt_dist.cli.generate import generate
from rlt_dist.cli.launch import launch_app
from rlt_dist.cli.params import params
from rlt_dist.cli.report import report
from rlt_dist.cli.status import cancel, logs, status
from rlt_dist.cli.submit import PASSED_ON, PassesOn, resume, submit
from rlt_dist.cli.trace import trace
from rlt_dist.cli.train import train
from rlt_dist.cli.verify import verify_app
from rlt_dist.util.errors import disk_trouble, one_line
from rlt_dist.util.log import keep_error, show_error

# Read when torch is first imported, which commands do later. Idle OpenMP threads spin by default:
# where anything else runs on the machine, that made a step up to 50 times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# When a rank fails, the one error is not to drown in the others' stack traces of lost connections.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

app = typer.Typer(
    name="rlt-dist",
    help="Distributed pretraining of models whose state outlives a batch.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    add_completion=False,
)
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
app.command()(params)
checkpoint_app.command()(export)
checkpoint_app.command("import")(import_)
app.add_typer(checkpoint_app, name="checkpoint")
app.add_typer(verify_app, name="verify")
app.command()(trace)
bench_app.command("checkpoint")(bench_checkpoint)
app.add_typer(bench_app, name="bench")
app.command()(report)
app.command()(doctor)


def main() -> None:
    """Run the command line; a person's mistake is one line and exit status 2."""
    threading.excepthook = _leave_disk_trouble_to_main
    try:
        app()
    except Exception as error:
        message = one_line(error)
        if message is None:
            keep_error("".join(traceback.format_exception(error)))
            raise
        show_error(message)
        sys.exit(2)


def _leave_disk_trouble_to_main(args: threading.ExceptHookArgs) -> None:
    """TensorBoard writes in a thread of its own, and raises a full disk again at the next write.

    Shown from the thread as well, it would be a traceback around the one line that says it all.
    """
    if not (isinstance(args.exc_value, OSError) and disk_trouble(args.exc_value)):
        threading.__excepthook__(args)
