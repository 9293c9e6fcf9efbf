"""``muster wait``, ``stop`` and ``rm``: to the end of jobs, and beyond it."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Annotated

import typer

from cli.attached import see_to_the_end
from cli.completion import awaited
from cli.connected import Job, NamedJobs, attached, connected
from cli.exit_codes import code_of_error
from cli.waits import said_if_it_lasts
from muster.client.errors import Ambiguous, Refused, Replaced
from muster.contracts.job import JobStatus
from muster.contracts.printable import spelt_out
from muster.remarks import remark

if TYPE_CHECKING:
    from muster.client.views import JobView

Until = Annotated[
    str,
    typer.Option(
        "--until",
        help="A status to wait for, such as RUNNING.",
        metavar="STATUS",
        autocompletion=awaited,
    ),
]
Timeout = Annotated[
    float | None, typer.Option("--timeout", min=0, help="Seconds to wait. Default: for ever.")
]
Grace = Annotated[
    float | None,
    typer.Option("--grace", min=0, help="Seconds from SIGTERM to SIGKILL. Default: the job's."),
]
Reason = Annotated[
    str | None, typer.Option("--reason", metavar="TEXT", help="Why: the job's events tell it.")
]
KeepLogs = Annotated[
    bool,
    typer.Option("--keep-logs", help="Move files to JOB.UID, beside where they were."),
]
StopFirst = Annotated[bool, typer.Option("--stop", help="Stop gracefully what is not over.")]
Force = Annotated[
    bool, typer.Option("--force", help="End at once what is not over; checkpoints go, too.")
]


def wait(job: Job, until: Until = "terminal", timeout: Timeout = None) -> None:
    """Wait until a job is over, or has another status.

    Exit code 0 if it completed or has that status, 1 if it failed, 8 if it was
    stopped, 7 if the time is over before.
    """
    if until != "terminal" and until.upper() not in JobStatus.__members__:
        raise typer.BadParameter(f"{until!r} is none of {', '.join(JobStatus)}")
    with attached(job) as found:
        raise typer.Exit(see_to_the_end(found, until, timeout))


def stop(jobs: NamedJobs, grace: Grace = None, reason: Reason = None) -> None:
    """Let jobs save a last checkpoint and end."""
    with connected() as client:

        def stop_one(word: str) -> None:
            job = client.named(word).stop(grace, reason)
            sentence = f"is {job.status} already" if job.is_terminal else "is to stop"
            typer.echo(f"{job.id} {sentence}")

        _each(jobs, stop_one)


def rm(
    jobs: NamedJobs, *, stop: StopFirst = False, force: Force = False, keep_logs: KeepLogs = False
) -> None:
    """Delete jobs that are over, with their logs."""
    with connected() as client:

        def delete_one(word: str) -> None:
            job = client.named(word)
            with _end_awaited(job.view) if stop and not force else nullcontext():
                found = job.delete(delete_logs=not keep_logs, stop_first=stop, force=force)
            too = ", with its checkpoints" if found.checkpoints_deleted else ""
            typer.echo(f"{job.id} is deleted{too}")
            if keep_logs:
                typer.echo(f"its logs: jobs/{job.id}.{job.view.job_uid} of the service", err=True)

        _each(jobs, delete_one)


def _each(words: Sequence[str], act: Callable[[str], None]) -> None:
    """Do it to every job, as rm(1) does to files: a refusal is told, and ends none of the others.

    Exits with the code of the first refusal. Raises the `ClientError` of whoever cannot be asked.
    """
    codes = []
    for word in words:
        try:
            act(word)
        except (Refused, Ambiguous, Replaced) as error:
            remark(spelt_out(f"muster: {error}"))
            codes.append(code_of_error(error))
    if codes:
        raise typer.Exit(codes[0])


def _end_awaited(job: "JobView") -> AbstractContextManager[None]:
    """Tell a person who waits for the end of a job that this may take as long as its grace."""
    if job.is_terminal:
        return nullcontext()
    grace_seconds = job.spec["stop_grace_seconds"]
    return said_if_it_lasts(
        f"{job.job_id} saves and ends first; what has not ended after {grace_seconds:g} s is killed"
    )
