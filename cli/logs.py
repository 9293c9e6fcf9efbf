"""``muster logs`` and ``events``: what a job's ranks print, and what happened to the job."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

import click

from cli.connection import attached, connected, job_argument
from cli.output import Output, moment, moment_of, output_option, show
from muster.client import job_path
from muster.contracts.errors import printable
from muster.contracts.job import JobStatus

if TYPE_CHECKING:
    from muster.contracts.views import LogLineView

LINES_LIMIT: Final = 10_000
"""The API returns no more lines at once."""


class _Time(click.ParamType[datetime]):
    """A time: how long ago, or ISO 8601."""

    name = "time"

    def convert(
        self, value: str | datetime, param: click.Parameter | None, ctx: click.Context | None
    ) -> datetime:
        if isinstance(value, datetime):
            return value
        time = moment_of(value, datetime.now(UTC))
        if time is None:
            self.fail(f"{value!r} is not a time such as 10m, 2h or 2026-03-01T12:00", param, ctx)
        return time


@click.command()
@job_argument
@click.option("-f", "--follow", is_flag=True, help="Also print new lines until the job ends.")
@click.option("--rank", type=click.IntRange(min=0), help="Only the lines of this rank.")
@click.option(
    "--tail",
    type=click.IntRange(0, LINES_LIMIT),
    help="Print only the last lines. Default: 200, with -f all, with --since 10000.",
)
@click.option("--since", type=_Time(), help="Only newer lines: 10m, 2h, or a time.")
@click.option("--grep", metavar="TEXT", help="Only lines that contain this text.")
@click.option(
    "-o", "--output", type=click.Choice(["json"]), help="json: one object per line. Default: text."
)
def logs(
    job: str,
    *,
    follow: bool,
    rank: int | None,
    tail: int | None,
    since: datetime | None,
    grep: str | None,
    output: str | None,
) -> None:
    """Show what the ranks of a job have printed.

    Without -f, --tail counts the lines that --grep selects. With -f, it counts
    lines before --grep looks at them.
    """
    if follow and since is not None:
        raise click.UsageError("--since cannot be used with -f: followed lines have no times")
    if since is not None and tail is None:
        tail = LINES_LIMIT
    with attached(job) as found:
        if follow and found.status == JobStatus.QUEUED:
            why = f": {found.view.message}" if found.view.reason and found.view.message else ""
            click.echo(printable(f"{found.id} is {found.status}{why}"), err=True)
        for line in found.logs(rank, tail, since=since, grep=grep, follow=follow):
            click.echo(_json(line) if output else _text(line, rank))


def _json(line: LogLineView) -> str:
    import msgspec  # noqa: PLC0415  not needed for --help

    return msgspec.json.encode(line).decode()


def _text(line: LogLineView, rank: int | None) -> str:
    return f"[rank {line.rank}] {line.line}" if rank is None else line.line


@click.command()
@job_argument
@click.option("-f", "--follow", is_flag=True, help="Also print new events until the job ends.")
@click.option(
    "-n", "--limit", type=click.IntRange(1, 1000), default=1000, help="Most events to show."
)
@output_option
def events(job: str, *, follow: bool, limit: int, output: Output) -> None:
    """Show what happened to a job, and why."""
    if follow:
        if output is not Output.TABLE:
            raise click.UsageError("-o cannot be used with -f: followed events are sentences")
        with attached(job) as found:
            for event in found.follow_events(limit):
                click.echo(printable(f"{moment(event.at)}  {event.message}"))
        return
    with connected() as client:
        body = client.connection.get(job_path(client.job(job).id, "events"), {"limit": limit})
    lines = (f"{moment(event['at'])}  {event['message']}" for event in body["events"])
    show(output, body, lines, (event["kind"] for event in body["events"]))
