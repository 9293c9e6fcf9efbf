"""``muster logs`` and ``events``: what a job's ranks say, and what happened to it."""

from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Final

import typer

from cli.connected import Job, attached, connected
from cli.output import Output, OutputOption, show
from cli.times import moment_of, shown
from muster.client.paths import path_of
from muster.contracts.job import JobStatus
from muster.contracts.printable import spelt_out

if TYPE_CHECKING:
    from muster.client import Job as JobHeld
    from muster.client.views import LogLineView


class LogFormat(StrEnum):
    """What ``-o`` takes where lines come one by one, perhaps for ever."""

    JSON = "json"


LINES_LIMIT: Final = 10_000
"""Of one answer."""


def _moment(text: str) -> datetime:
    moment = moment_of(text, datetime.now(UTC))
    if moment is None:
        raise typer.BadParameter(f"{text!r} is no time: say 10m, 2h or 2026-03-01T12:00")
    return moment


Follow = Annotated[
    bool, typer.Option("--follow", "-f", help="Go on with what is written, until the job is over.")
]
FollowEvents = Annotated[
    bool, typer.Option("--follow", "-f", help="Go on with what happens, until the job is over.")
]
Rank = Annotated[int | None, typer.Option("--rank", min=0, help="Only this rank's lines.")]
Tail = Annotated[
    int | None,
    typer.Option(
        "--tail",
        min=0,
        max=LINES_LIMIT,
        help="So many last lines first. Default: 200, with -f all, with --since 10000.",
    ),
]
Since = Annotated[
    datetime | None,
    typer.Option(parser=_moment, metavar="TIME", help="Only what is younger: 10m, 2h, or a date."),
]
Grep = Annotated[str | None, typer.Option(metavar="TEXT", help="Only lines that hold this text.")]
LogOutput = Annotated[
    LogFormat | None,
    typer.Option("--output", "-o", help="json: an object for each line. Default: the lines."),
]
Last = Annotated[int, typer.Option("--limit", "-n", min=1, max=1000, help="Most events to show.")]


def logs(
    job: Job,
    *,
    follow: Follow = False,
    rank: Rank = None,
    tail: Tail = None,
    since: Since = None,
    grep: Grep = None,
    output: LogOutput = None,
) -> None:
    """Show the lines that a job's ranks have written, all of them or one's.

    Without -f --tail counts lines that hold the text of --grep; with it, lines
    that are looked at.
    """
    if follow and since is not None:
        raise typer.BadParameter("a stream carries no times: say --tail, or leave out -f")
    if since is not None and tail is None:
        tail = LINES_LIMIT
    said = _as_json if output else _as_text if rank is None else _as_text_of_one
    with attached(job) as found:
        if follow and found.status == JobStatus.QUEUED:
            _say_why_it_waits(found)
        for line in found.logs(rank, tail, since=since, grep=grep, follow=follow):
            typer.echo(said(line))


def _say_why_it_waits(job: "JobHeld") -> None:
    """Tell who follows a job of which no line can come yet."""
    why = f": {job.view.message}" if job.view.reason and job.view.message else ""
    typer.echo(spelt_out(f"{job.id} is {job.status}{why}"), err=True)


def _as_json(line: "LogLineView") -> str:
    import msgspec  # noqa: PLC0415  --help

    return msgspec.json.encode(line).decode()


def _as_text(line: "LogLineView") -> str:
    return f"[rank {line.rank}] {line.line}"


def _as_text_of_one(line: "LogLineView") -> str:
    return line.line


def events(
    job: Job,
    *,
    follow: FollowEvents = False,
    limit: Last = 1000,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show what happened to a job, oldest first."""
    if follow:
        if output is not Output.TABLE:
            raise typer.BadParameter("-f shows what happens in sentences: leave out -o")
        with attached(job) as found:
            for event in found.follow_events(limit):
                typer.echo(spelt_out(f"{shown(event.at)}  {event.message}"))
        return
    with connected() as client:
        body = client.connection.get(path_of(client.job(job).id, "events"), {"limit": limit})
    said = body["events"]
    lines = (f"{shown(event['at'])}  {event['message']}" for event in said)
    show(output, body, lines, (event["kind"] for event in said))
