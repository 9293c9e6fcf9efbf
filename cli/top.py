"""``muster top``: every job at a glance, drawn over as it changes."""

import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Final

import typer

from cli.connected import Statuses, connected
from cli.job_rows import fitting, row
from cli.tables import table
from muster.contracts.job import TERMINAL

if TYPE_CHECKING:
    from muster import Client
    from muster.client.connection import Query
    from muster.client.views import SummaryView

JOBS_LIMIT: Final = 100
"""More than a terminal has lines; what it costs the server grows with it."""

Once = Annotated[bool, typer.Option("--once", help="Print it once, as off a terminal.")]
Interval = Annotated[
    float, typer.Option("--interval", "-i", min=0.2, max=3600, help="Seconds between looks.")
]


def top(status: Statuses = None, interval: Interval = 1.0, *, once: Once = False) -> None:
    """Watch all jobs, those that are not over first, until Ctrl-C."""
    with connected() as client:
        jobs = Overview(client, status or [])
        jobs.look()
        if once or not sys.stdout.isatty():
            for line in table(*fitting([row(job, datetime.now(UTC)) for job in jobs.in_order()])):
                typer.echo(line)
            return
        try:
            _watch(jobs, client.url, interval)
        except KeyboardInterrupt:
            return


class Overview:
    """The newest jobs, which are asked for again and given again only when they have changed."""

    def __init__(self, client: "Client", statuses: Sequence[str]) -> None:
        self._connection = client.connection
        self._query: Query = {"status": statuses, "limit": JOBS_LIMIT}
        self._tag: str | None = None
        self._jobs: Sequence[SummaryView] = ()
        self.total = 0
        """How many there are, also beyond those that are shown."""

    def look(self) -> None:
        """See what has changed. Raises `ClientError`, and what was seen before stays."""
        from muster.client.views import SummaryList  # noqa: PLC0415  --help

        answer = self._connection.ask(
            "GET", "/jobs/summaries", query=self._query, known_tag=self._tag
        )
        if not answer.is_unchanged:
            self._jobs = answer.read_as(SummaryList).jobs
            self._tag, self.total = answer.tag, answer.total or len(self._jobs)

    def in_order(self) -> "list[SummaryView]":
        """Return those that go on before those that are over, the newest first."""
        return sorted(self._jobs, key=lambda job: job.status in TERMINAL)


def _watch(jobs: Overview, url: str, interval_seconds: float) -> None:
    from rich.console import Console  # noqa: PLC0415  --help
    from rich.live import Live  # noqa: PLC0415  --help

    from cli.screen import Trouble, screen  # noqa: PLC0415  brings in rich
    from muster.client.errors import Busy, Unreachable  # noqa: PLC0415  as above

    console = Console()
    with Live(console=console, screen=True, auto_refresh=False) as live:
        trouble: Trouble | None = None
        while True:
            drawn = screen(jobs.in_order(), jobs.total, url, console.size, trouble)
            live.update(drawn, refresh=True)
            time.sleep(interval_seconds)
            try:
                jobs.look()
                trouble = None
            except (Unreachable, Busy) as error:
                trouble = trouble or Trouble(error, datetime.now(UTC))
