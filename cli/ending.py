"""``muster wait``, ``stop``, ``rm`` and ``purge``: to the end of jobs, and beyond it."""

import sys
from typing import Annotated

import typer

from cli.attached import see_to_the_end
from cli.connected import Job, NamedJobs, Statuses, attached, connected
from cli.exit_codes import ExitCode
from cli.sizes import size
from muster.contracts.job import JobStatus

Until = Annotated[
    str, typer.Option("--until", help="A status to wait for, such as RUNNING.", metavar="STATUS")
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
    typer.Option("--keep-logs", help="Move its files to JOB.UID, beside where they were."),
]
StopFirst = Annotated[bool, typer.Option("--stop", help="Stop it gracefully if it is not over.")]
Force = Annotated[
    bool, typer.Option("--force", help="End it at once, and delete its checkpoints, too.")
]
Hours = Annotated[
    float | None, typer.Option("--older-than-hours", min=0, help="Only jobs that ended before.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say which jobs that would be.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


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
        for word in jobs:
            job = client.named(word).stop(grace, reason)
            sentence = f"is {job.status} already" if job.is_terminal else "is to stop"
            typer.echo(f"{job.id} {sentence}")


def rm(
    jobs: NamedJobs, *, stop: StopFirst = False, force: Force = False, keep_logs: KeepLogs = False
) -> None:
    """Delete jobs that are over, with their logs."""
    with connected() as client:
        for word in jobs:
            job = client.named(word)
            found = job.delete(delete_logs=not keep_logs, stop_first=stop, force=force)
            too = ", with its checkpoints" if found.checkpoints_deleted else ""
            typer.echo(f"{job.id} is deleted{too}")
            if keep_logs:
                typer.echo(f"its logs: jobs/{job.id}.{job.view.job_uid} of the service", err=True)


def purge(
    *,
    status: Statuses = None,
    older_than_hours: Hours = None,
    stop: StopFirst = False,
    force: Force = False,
    keep_logs: KeepLogs = False,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """Delete every job that matches; without a filter all that are over."""
    _make_sure("Delete every job that matches?", yes=yes or dry_run)
    with connected() as client:
        found = client.purge(
            status=status,
            older_than_hours=older_than_hours,
            delete_logs=not keep_logs,
            stop_running=stop,
            force=force,
            dry_run=dry_run,
        )
    for job_id in found.job_ids:
        typer.echo(job_id)
    done = f"{len(found.job_ids)} would be deleted" if dry_run else f"{found.deleted} deleted"
    left = (
        f", {len(found.skipped)} not over and left (--stop ends and deletes those, too)"
        if found.skipped
        else ""
    )
    typer.echo(f"{done}, {size(found.freed_bytes)}{left}", err=True)
    for one in found.failed:
        typer.echo(f"{one.job_id} is over and was not deleted: {one.detail}", err=True)
    if found.failed:
        raise typer.Exit(ExitCode.FAILED)


def _make_sure(question: str, *, yes: bool) -> None:
    """Ask a person; a script has to say it."""
    if yes:
        return
    if not sys.stdin.isatty():
        typer.echo("muster: nobody is there to be asked: say --yes", err=True)
        raise typer.Exit(ExitCode.USAGE)
    typer.confirm(question, abort=True, err=True)
