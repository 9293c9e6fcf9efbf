"""``muster wait``, ``scale``, ``pause``, ``resume``, ``stop``, ``rm``, ``purge`` and ``gc``."""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from cli.connection import attached, connected, exact_jobs_argument, job_argument, status_option
from cli.errors import ExitCode, Misuse, WrongState, exit_code_of
from cli.output import notice_if_slow, plural
from cli.services.record import find_own_services, service_lock, service_settings
from muster.client.errors import Ambiguous, Refused, Replaced
from muster.contracts.agent import is_node_id
from muster.contracts.errors import MusterError, printable
from muster.contracts.job.status import EXIT_CODES, OPEN, JobStatus
from muster.contracts.location import Location
from muster.contracts.settings.paths import DataDir, size_text
from muster.contracts.views.job import Purged
from muster.runtime.stderr_messages import print_stderr

if TYPE_CHECKING:
    from muster import Client
    from muster.client import Job

_Verb = TypeVar("_Verb", bound=Callable[..., Any])


@click.command()
@job_argument
@click.option(
    "--until",
    type=click.Choice(["terminal", *JobStatus], case_sensitive=False),
    metavar="STATUS",
    default="terminal",
    help="The status to wait for, such as RUNNING. Default: any end.",
)
@click.option("--timeout", type=click.FloatRange(min=0), help="Seconds to wait. Default: no limit.")
def wait(job: str, until: str, timeout: float | None) -> None:
    """Wait until a job ends.

    Exit code 0 if the job completed or reached the status of --until, 1 if it
    failed, 7 if the timeout expired, 8 if it was stopped.
    """
    with attached(job) as found:
        code = watch_to_end(found, lambda: found.wait(until, timeout, progress=True))
        sys.exit(ExitCode.OK if found.status == until else code)


def watch_to_end(
    job: Job, watch: Callable[[], object], shorten: Callable[[str], str] = str
) -> ExitCode:
    """Call `watch`, which waits for the job, and return the exit code of the command.

    `shorten` leaves out of the job's message what `watch` has printed.
    Ctrl-C and SIGTERM detach and leave the job running. Raises `ClientError`.
    """
    sigterm = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        watch()
    except KeyboardInterrupt:
        click.echo(f"detached: {job.id} continues", err=True)
        click.echo(f"attach again:  muster wait {job.id}", err=True)
        click.echo(f"its logs:      muster logs -f {job.id}", err=True)
        click.echo(f"stop it:       muster stop {job.id}", err=True)
        return ExitCode.INTERRUPTED  # not 0: the job has not ended
    finally:
        signal.signal(signal.SIGTERM, sigterm)
    return say_end(job, shorten)


def say_end(job: Job, shorten: Callable[[str], str] = str) -> ExitCode:
    """Print how a job has ended, if it has, and return the exit code of the command."""
    if not job.is_terminal:
        return ExitCode.OK
    # The message of a completed job was printed when it was submitted.
    message = None if job.status == JobStatus.COMPLETED else job.view.message
    reason = f": {shorten(message)}" if message else ""
    click.echo(printable(f"{job.id} is {job.status}{reason}"), err=True)
    return ExitCode(EXIT_CODES[JobStatus(job.status)])


@click.command()
@job_argument
@click.argument("ranks", metavar="N", type=click.IntRange(min=1), help="Number of ranks.")
def scale(job: str, ranks: int) -> None:
    """Change the number of ranks of a job.

    The job has to be synchronous; it keeps training meanwhile.
    """
    with connected() as client:
        found = client.job(job).scale(ranks)
    wanted = plural(found.view.world_size, "rank")
    click.echo(f"{found.id} will continue with {wanted}; see: muster workers {found.id}")


@click.command()
@job_argument
def pause(job: str) -> None:
    """Pause a job; its ranks stay.

    The job has to be synchronous. It takes no further step until it is resumed.
    """
    with connected() as client:
        found = client.job(job).pause()
    click.echo(f"{found.id} will pause; resume it with: muster resume {found.id}")


@click.command()
@job_argument
def resume(job: str) -> None:
    """Resume a paused job."""
    with connected() as client:
        found = client.job(job)
        was_paused = found.view.pause_requested
        found.resume()
    result = "resumes" if was_paused else f"is not paused: it is {found.status}"
    click.echo(f"{found.id} {result}")


@click.command()
@exact_jobs_argument
@click.option(
    "--grace",
    type=click.FloatRange(min=0),
    help="Seconds from SIGTERM to SIGKILL. Default: the job's stop_grace_seconds.",
)
@click.option("--reason", metavar="TEXT", help="Why; the job's events show it.")
def stop(jobs: Sequence[str], grace: float | None, reason: str | None) -> None:
    """Save a last checkpoint and stop jobs."""
    with connected() as client:

        def stop_one(word: str) -> None:
            job = client.named(word).stop(grace, reason)
            result = f"is already {job.status}" if job.is_terminal else "is stopping"
            click.echo(f"{job.id} {result}")

        _for_each(jobs, stop_one)


def _deletion_options(verb: _Verb) -> _Verb:
    """Add the options that ``rm`` and ``purge`` share."""
    for option in (
        click.option("--keep-logs", is_flag=True, help="Move the files to JOB.UID beside them."),
        click.option("--delete-checkpoints", is_flag=True, help="Delete checkpoints, too."),
        click.option("--force", is_flag=True, help="Kill what has not ended; checkpoints stay."),
        click.option("--stop", is_flag=True, help="Stop what has not ended, gracefully."),
    ):
        verb = option(verb)
    return verb


@click.command()
@exact_jobs_argument
@_deletion_options
def rm(
    jobs: Sequence[str], *, stop: bool, force: bool, delete_checkpoints: bool, keep_logs: bool
) -> None:
    """Delete jobs that have ended, with their logs."""
    how = {"stop_first": stop, "force": force, "delete_checkpoints": delete_checkpoints}
    with connected() as client:

        def delete_one(word: str) -> None:
            job = client.named(word)
            grace_seconds = job.view.spec["stop_grace_seconds"]
            notice = f"{job.id} saves and stops first; it is killed after {grace_seconds:g} s"
            must_stop = stop and not force and not job.is_terminal
            with notice_if_slow(notice) if must_stop else nullcontext():
                found = job.delete(delete_logs=not keep_logs, **how)
            too = ", with its checkpoints" if found.checkpoints_deleted else ""
            click.echo(f"{job.id} is deleted{too}")
            if keep_logs:
                logs = f"jobs/{job.id}.{job.view.job_uid}"
                click.echo(f"its logs: {logs} in the service's data directory", err=True)
            if found.checkpoints_left:
                saved_to = job.view.spec["checkpoint_dir"]
                click.echo(f"its checkpoints stay in {saved_to}/{job.id}", err=True)

        _for_each(jobs, delete_one)


def _for_each(words: Sequence[str], act: Callable[[str], None]) -> None:
    """Act on every job like rm(1) on files: print a refusal and continue with the next.

    Exits with the code of the first refusal. Raises `ClientError` if the API cannot be asked.
    """
    codes = []
    for word in words:
        try:
            act(word)
        except (Refused, Ambiguous, Replaced) as error:
            print_stderr(printable(f"muster: {error}"))
            codes.append(exit_code_of(error))
    if codes:
        sys.exit(codes[0])


@click.command()
@status_option
@click.option(
    "--older-than-hours", type=click.FloatRange(min=0), help="Only jobs that ended longer ago."
)
@_deletion_options
@click.option("--dry-run", is_flag=True, help="Only list the jobs.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
def purge(
    *,
    status: Sequence[str],
    older_than_hours: float | None,
    stop: bool,
    keep_logs: bool,
    dry_run: bool,
    yes: bool,
    **how: bool,
) -> None:
    """Delete every job that matches a filter.

    Without a filter, delete all jobs that have ended.
    """
    wanted: dict[str, Any] = {
        "status": status or None,
        "older_than_hours": older_than_hours,
        "delete_logs": not keep_logs,
        "stop_running": stop,
        **how,  # force, delete_checkpoints
    }
    if not (yes or dry_run or sys.stdin.isatty()):
        raise Misuse("cannot ask for confirmation without a terminal: add --yes")
    notice = "deleting the jobs"
    if stop and not how["force"]:
        notice = "running jobs save and stop first, and are killed after their grace period"
    with connected() as client:
        if not (yes or dry_run):
            _confirm_purge(client, wanted)
        with notice_if_slow(notice):
            found = client.purge(**wanted, dry_run=dry_run)
    for job_id in found.job_ids:
        click.echo(job_id)
    done = f"{len(found.job_ids)} would be deleted" if dry_run else f"{found.deleted} deleted"
    click.echo(f"{done}, {size_text(found.freed_bytes)}{_skipped(found)}", err=True)
    for one in found.failed:
        click.echo(printable(f"{one.job_id} was not deleted: {one.detail}"), err=True)
    if found.failed:
        sys.exit(ExitCode.FAILED)


def _confirm_purge(client: Client, wanted: dict[str, Any]) -> None:
    """Ask until the person has agreed to every job that matches; exit if there is none."""
    found = client.purge(**wanted, dry_run=True)
    if not found.job_ids:
        click.echo(f"nothing to delete: no matching job has ended{_skipped(found)}", err=True)
        sys.exit()
    how = ", with their checkpoints" if wanted["delete_checkpoints"] else ""
    if wanted["force"]:
        how += ", and kill those that still run"
    elif wanted["stop_running"]:
        how += ", and stop those that still run first"
    agreed: set[str] = set()
    while not agreed.issuperset(found.job_ids):
        if agreed:
            click.echo("more jobs match now", err=True)
        jobs = plural(len(found.job_ids), "job")
        question = f"Delete {jobs}, {size_text(found.freed_bytes)}{how}?"
        if not click.confirm(question, err=True):
            click.echo("nothing is deleted", err=True)
            sys.exit(ExitCode.FAILED)
        agreed = set(found.job_ids)
        # Jobs may have been submitted, or have ended, while the person read.
        found = client.purge(**wanted, dry_run=True)


def _skipped(found: Purged) -> str:
    if not found.skipped:
        return ""
    return f", {plural(len(found.skipped), 'job')} skipped that are running (--stop includes them)"


@click.command()
@click.option("--delete", is_flag=True, help="Delete what is listed.")
def gc(*, delete: bool) -> None:
    """List what deleted jobs have left, and delete it.

    That is in the data directory of these services: checkpoints of deleted jobs, and
    directories of each muster run that is over, with its logs. What a job that is not over,
    or a muster run, can resume from is not listed.
    """
    files = _own_files()
    # Listed before the jobs: what a job makes from now on is none of it.
    # A directory of a node has what scripts at home have saved, which no service knows.
    saved = (place for place in files.checkpoints.glob("*/") if not is_node_id(place.name))
    places = sorted([*saved, *files.runs.glob("*/")])
    with connected() as client:
        kept = _kept(client.jobs(), files)
    litter = [place for place in places if place.name not in kept]
    for place in litter:
        size = size_text(sum(path.lstat().st_size for path in place.rglob("*")))
        click.echo(f"{size:>9}  {place}")
        if delete and place.parent != files.runs:
            _delete_saved(place)
        elif delete:
            # Its command may have been started again since: then it holds the lock.
            with suppress(MusterError), service_lock(DataDir(place)):
                if DataDir(place).ended.exists():
                    shutil.rmtree(place)
    if litter and not delete:
        click.echo("to delete this: muster gc --delete", err=True)


def delete_checkpoints(location: Location) -> None:
    """Delete what a job has saved; raises `WrongState` if it is needed."""
    files = DataDir(service_settings().data_dir)
    if isinstance(location, Path):
        files, location = _own_files(), location.resolve()
    with connected() as client:
        kept = _kept(client.jobs(sorted(OPEN)), files)
    if location.name in kept:
        raise WrongState(f"{location} stays: a job that is not over, or a muster run, needs it")
    click.echo(f"{plural(_delete_saved(location), 'file')} of {location} deleted")


def _own_files() -> DataDir:
    """Return the data directory of our services; raises `Misuse` if they cannot be asked."""
    files, record = DataDir(service_settings().data_dir), find_own_services()
    if record is None:
        why = "only its own services know what their jobs need"
        raise Misuse(f"nothing in {files.root} is deleted: {why}. Start muster up -d")
    if record.node_port is not None and not files.nodes.exists():
        raise Misuse(
            f"nothing in {files.root} is deleted: the machine that founded the cluster has the "
            "checkpoints of its jobs, so type this there"
        )
    return files


def _kept(jobs: Iterable[Job], files: DataDir) -> set[str]:
    """Return the ids of jobs whose checkpoints these jobs, or a `muster run`, can resume from.

    A run that is over could still resume from what it has saved in the data directory.
    """
    kept = {run.name for run in files.runs.glob("*") if not DataDir(run).ended.exists()}
    saved = (place.name for place in files.checkpoints.glob("*"))
    kept |= {name for name in saved if (files.runs / name).exists()}
    for job in jobs:
        kept |= {job.id, str(job.view.spec["resume_from"]).partition(":")[0]}
    return kept


def _delete_saved(location: Location) -> int:
    """Delete what the job of this name has saved, nothing beside it; return how many files."""
    from muster.checkpoints.deletion import entries, remove  # noqa: PLC0415  not for --help
    from muster.checkpoints.manifest import Owner  # noqa: PLC0415  as above

    owner = Owner(job_id=location.name, job_uid=None, rank=0, world_size=1, generation=None)
    found = entries(location, owner)
    remove(found)
    return sum(not entry.is_directory for entry in found)
