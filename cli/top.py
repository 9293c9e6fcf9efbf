"""``muster top``: all jobs on one screen, redrawn as they change."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

import click

from cli.connection import connected, status_option
from cli.jobs import HEADER, row
from cli.output import cropped, table
from muster.contracts.job import TERMINAL, JobStatus

if TYPE_CHECKING:
    from rich.console import ConsoleDimensions, Group
    from rich.text import Text

    from muster import Client
    from muster.client.http import Query
    from muster.contracts.views import SummaryView

JOBS_LIMIT: Final = 100
"""More than a terminal has lines; each of them costs the server time."""

NAME_WIDTH_MIN: Final = 8
"""An id is cut in its middle, but not further than this."""

_FRAME_LINES: Final = 3  # the summary, the header and the footer

_STYLES: Final[Mapping[str, str]] = {
    JobStatus.RUNNING: "green",
    JobStatus.RECOVERING: "yellow",
    JobStatus.FAILED: "red",
    JobStatus.COMPLETED: "dim",
    JobStatus.STOPPED: "dim",
}


@click.command()
@status_option
@click.option(
    "-i",
    "--interval",
    type=click.FloatRange(0.2, 3600),
    default=1.0,
    help="Seconds between updates.",
)
@click.option("--once", is_flag=True, help="Print the table once, as without a terminal.")
def top(status: Sequence[str], interval: float, *, once: bool) -> None:
    """Watch all jobs live.

    Active jobs come first. Ctrl-C ends this and no job.
    """
    with connected() as client:
        jobs = JobList(client, status)
        jobs.refresh()
        if once or not sys.stdout.isatty():
            now = datetime.now(UTC)
            for line in table(HEADER, [row(job, now) for job in jobs.active_first()]):
                click.echo(line)
            return
        try:
            _watch(jobs, client.url, interval)
        except KeyboardInterrupt:
            return


class JobList:
    """The newest jobs; the server sends them again only after a change."""

    def __init__(self, client: Client, statuses: Sequence[str]) -> None:
        self._connection = client.connection
        self._query: Query = {"status": statuses, "limit": JOBS_LIMIT}
        self._tag: str | None = None
        self._jobs: Sequence[SummaryView] = ()
        self.total = 0
        """All matching jobs, including those beyond `JOBS_LIMIT`."""

    def refresh(self) -> None:
        """Ask for changes. Raises `ClientError`; the jobs then stay as they were."""
        from muster.contracts.views import SummaryList  # noqa: PLC0415  not needed for --help

        answer = self._connection.ask(
            "GET", "/jobs/summaries", query=self._query, known_tag=self._tag
        )
        if not answer.is_unchanged:
            self._jobs = answer.read_as(SummaryList).jobs
            self._tag, self.total = answer.tag, answer.total or len(self._jobs)

    def active_first(self) -> list[SummaryView]:
        """Return jobs that have not ended before the others, each newest first."""
        return sorted(self._jobs, key=lambda job: job.status in TERMINAL)


@dataclass(frozen=True, slots=True)
class Outage:
    """Why the jobs on the screen are out of date."""

    error: Exception
    since: datetime


def _watch(jobs: JobList, url: str, interval_seconds: float) -> None:
    from rich.console import Console  # noqa: PLC0415  60 ms
    from rich.live import Live  # noqa: PLC0415

    from muster.client.errors import Busy, Unreachable  # noqa: PLC0415  not needed for --help

    console = Console()
    with Live(console=console, screen=True, auto_refresh=False) as live:
        outage: Outage | None = None
        while True:
            shown = screen(jobs.active_first(), jobs.total, url, console.size, outage)
            live.update(shown, refresh=True)
            time.sleep(interval_seconds)
            try:
                jobs.refresh()
                outage = None
            except (Unreachable, Busy) as error:
                outage = outage or Outage(error, datetime.now(UTC))


def screen(
    jobs: Sequence[SummaryView],
    total: int,
    url: str,
    size: ConsoleDimensions,
    outage: Outage | None,
) -> Group:
    """Return what to draw on a terminal of this size; `total` counts all jobs."""
    from rich.console import Group  # noqa: PLC0415  as above

    now = datetime.now(UTC)
    shown = jobs[: max(1, size.height - _FRAME_LINES)]
    counts = Counter(job.status.lower() for job in jobs)
    summary = ", ".join(f"{count} {status}" for status, count in counts.items())
    summary = summary or "no jobs; submit one: muster submit --help"
    rows = [row(job, now)[:-1] for job in shown]  # without the age, 80 columns are enough
    others = max(map(len, table(HEADER[1:-1], [cells[1:] for cells in rows])))
    name_width = max(NAME_WIDTH_MIN, size.width - others - len("  "))
    header, *lines = table(
        HEADER[:-1], [(cropped(str(name), name_width), *rest) for name, *rest in rows]
    )
    return Group(
        _line(f"{url}  {now:%H:%M:%S} UTC  {summary}"),
        _line(header, "bold"),
        *(_line(it, _STYLES.get(job.status, "")) for job, it in zip(shown, lines, strict=True)),
        _line(_footer(total - len(shown), outage, now), "yellow" if outage else "dim"),
    )


def _footer(hidden: int, outage: Outage | None, now: datetime) -> str:
    from muster.client.progress import duration  # noqa: PLC0415  not needed for --help

    if outage is not None:
        return f"as of {duration((now - outage.since).total_seconds())} ago: {outage.error}"
    more = f"{hidden} more: select with --status.  " if hidden > 0 else ""
    return f"{more}Ctrl-C ends this and no job"


def _line(text: str, style: str = "") -> Text:
    from rich.text import Text  # noqa: PLC0415  as above

    return Text(text, style=style, no_wrap=True, overflow="ellipsis")
