"""Watching a job to its end, and going away before it."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from cli.exit_codes import ExitCode, code_of_end
from muster.contracts.job import JobStatus
from muster.contracts.printable import spelt_out

if TYPE_CHECKING:
    from muster.client import Job


def see_to_the_end(
    job: "Job", until: str = "terminal", timeout_seconds: float | None = None
) -> ExitCode:
    """Wait, show how far the job is, and return what a command is to exit with.

    Ctrl-C goes away and leaves the job as it is, and so does SIGTERM, such as timeout(1) sends.
    Raises `ClientError`.
    """
    try:
        with _termination_as_interrupt():
            job.wait(until, timeout_seconds, progress=True)
    except KeyboardInterrupt:
        typer.echo(f"detached: {job.id} goes on", err=True)
        typer.echo(f"come back:  muster wait {job.id}", err=True)
        typer.echo(f"its lines:  muster logs -f {job.id}", err=True)
        typer.echo(f"its end:    muster stop {job.id}", err=True)
        return ExitCode.INTERRUPTED  # a script must not take it for an end
    if not job.is_terminal:
        return ExitCode.OK
    # That of a job that went well was said when it was submitted, and is no reason.
    is_why = job.view.message and job.status != JobStatus.COMPLETED
    said = f": {job.view.message}" if is_why else ""
    typer.echo(spelt_out(f"{job.id} is {job.status}{said}"), err=True)
    return code_of_end(job.status)


@contextmanager
def _termination_as_interrupt() -> Iterator[None]:
    """Take SIGTERM for Ctrl-C meanwhile: who is sent away, too, has something to say."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
