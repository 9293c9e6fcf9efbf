"""``muster purge``: delete all jobs that match, once a person has seen how many those are."""

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.connected import Statuses, connected
from cli.ending import Force, KeepLogs, StopFirst
from cli.exit_codes import ExitCode
from cli.sizes import size
from cli.waits import said_if_it_lasts
from muster.contracts.printable import spelt_out

if TYPE_CHECKING:
    from muster import Client
    from muster.client.views import Purged

Hours = Annotated[
    float | None, typer.Option("--older-than-hours", min=0, help="Only jobs that ended before.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say which jobs that would be.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


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
    wanted: dict[str, Any] = {
        "status": status,
        "older_than_hours": older_than_hours,
        "delete_logs": not keep_logs,
        "stop_running": stop,
        "force": force,
    }
    is_asked = not (yes or dry_run)
    if is_asked and not sys.stdin.isatty():
        typer.echo("muster: nobody is there to be asked: say --yes", err=True)
        raise typer.Exit(ExitCode.USAGE)
    what_lasts = (
        "what is not over saves and ends first, and is killed after its grace"
        if stop and not force
        else "what matches is being deleted"
    )
    with connected() as client:
        if is_asked:
            _make_sure(client, wanted)
        with said_if_it_lasts(what_lasts):
            found = client.purge(**wanted, dry_run=dry_run)
    _tell(found, is_done=not dry_run)
    if found.failed:
        raise typer.Exit(ExitCode.FAILED)


def _make_sure(client: "Client", wanted: dict[str, Any]) -> None:
    """Ask a person, who is told what goes; exits if that is nothing, or is to stay."""
    found = client.purge(**wanted, dry_run=True)
    if not found.job_ids:
        typer.echo(f"nothing to delete: no job that matches is over{_left(found)}", err=True)
        raise typer.Exit
    agreed: set[str] = set()
    while not agreed.issuperset(found.job_ids):
        if agreed:
            typer.echo("meanwhile others match, too", err=True)
        _ask(client, wanted, found)
        agreed = set(found.job_ids)
        # While a person read, others have submitted jobs, or jobs have ended.
        found = client.purge(**wanted, dry_run=True)


def _ask(client: "Client", wanted: dict[str, Any], found: "Purged") -> None:
    """Ask whether what was found is to go; exits if it is to stay."""
    not_over = 0
    if wanted["stop_running"] or wanted["force"]:
        only_over = {**wanted, "stop_running": False, "force": False}
        not_over = len(client.purge(**only_over, dry_run=True).skipped)
    try:
        is_meant = typer.confirm(question(found, not_over, force=wanted["force"]), err=True)
    except typer.Abort:
        typer.echo(err=True)  # what comes next does not begin in the line of the question
        raise
    if not is_meant:
        typer.echo("nothing is deleted", err=True)
        raise typer.Exit(ExitCode.FAILED)


def question(found: "Purged", not_over: int, *, force: bool) -> str:
    """Return what to ask about `found`, of which so many jobs are `not_over` yet."""
    count = len(found.job_ids)
    jobs = "1 job" if count == 1 else f"{count} jobs"
    if not not_over:
        which = " that is over" if count == 1 else " that are over"
    else:
        still = "not over" if not_over == count else f"{not_over} of them not over"
        which = f", {still} and {'ended at once' if force else 'stopped first'}"
    too = ", checkpoints, too" if force else ""
    return f"Delete {jobs}{which}, {size(found.freed_bytes)}{too}?"


def _tell(found: "Purged", *, is_done: bool) -> None:
    for job_id in found.job_ids:
        typer.echo(job_id)
    done = f"{found.deleted} deleted" if is_done else f"{len(found.job_ids)} would be deleted"
    typer.echo(f"{done}, {size(found.freed_bytes)}{_left(found)}", err=True)
    for one in found.failed:
        typer.echo(f"{one.job_id} is over and was not deleted: {spelt_out(one.detail)}", err=True)


def _left(found: "Purged") -> str:
    """Return what is to be said of jobs that match and stay."""
    if not found.skipped:
        return ""
    return f", {len(found.skipped)} not over and left (--stop ends and deletes those, too)"
