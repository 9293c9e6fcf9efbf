"""``muster leaderboard``: which of several jobs is the best."""

import sys

import click
import msgspec

from cli.connection import connected
from cli.errors import ExitCode
from cli.jobs.show import progress_of
from cli.output import Output, output_option, shortened, show, table
from muster.contracts.errors import printable
from muster.contracts.leaderboard import which_sweep

NO_LOSS = "none has reported a loss: run.report(val_loss=...)"
VALUE_WIDTH = 24  # of a value in which jobs differ: several columns fit a terminal


@click.command()
@click.argument("sweep", metavar="[NAME]", required=False, help="Value of the label `sweep`.")
@output_option
def leaderboard(*, sweep: str | None, output: Output) -> None:
    """Compare the jobs of a sweep, and name the best.

    A sweep is all jobs with one label: muster submit --label sweep=NAME. The metric
    of their keep_best decides, else the lowest validation loss (metric val_loss). If
    a job does not report it, training loss decides for all. NAME is not needed if
    there is only one sweep.
    """
    with connected() as client:
        found = client.leaderboard(sweep)
    if found.sweep is None:
        click.echo(f"muster: {printable(which_sweep(found.sweeps))}", err=True)
        sys.exit(ExitCode.NOT_FOUND)
    kind = found.metric or f"{found.loss_kind} loss"
    names = list(dict.fromkeys(name for job in found.jobs for name in job.differences))
    losses = {job.job_id: f"{job.loss:.6g}" for job in found.jobs if job.loss is not None}
    unlike = [{name: str(value) for name, value in job.differences.items()} for job in found.jobs]
    rows = [
        (
            *(place, job.job_id, job.status, losses.get(job.job_id), progress_of(job)),
            *(shortened(differs.get(name), VALUE_WIDTH) for name in names),
        )
        for place, (job, differs) in enumerate(zip(found.jobs, unlike, strict=True), 1)
    ]
    best = f"{found.best} ({kind} {losses[found.best]})" if found.best else NO_LOSS
    lines = [*table(("place", "job", "status", kind, "step", *names), rows), f"best: {best}"]
    show(output, msgspec.to_builtins(found), lines, (job.job_id for job in found.jobs))
