"""``muster incarnations``: every process that a job's ranks have had, and how it ended."""

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Final

import typer

from cli.pool import Job, connected, path_of
from cli.tables import UNKNOWN, shortened, table

MESSAGE_WIDTH: Final = 80

_HEADER: Final = (
    "rank",
    "incarnation",
    "pid",
    "started at (UTC)",
    "seconds",
    "steps",
    "class",
    "how it ended",
)

Last = Annotated[int, typer.Option("--last", min=1, max=1000, help="Most processes to show.")]


def incarnations(job: Job, last: Last = 20) -> None:
    """Show every process of a job's ranks and how it ended, the newest first."""
    with connected() as server:
        found = server.get(f"{path_of(job, 'incarnations')}?limit={last}")
    for line in table(_HEADER, map(_row, found["incarnations"])):
        typer.echo(line)


def _row(one: Mapping[str, Any]) -> tuple[str | int | None, ...]:
    return (
        one["rank"],
        one["incarnation"],
        one["pid"],
        one["started_at"][:19].replace("T", " "),
        _seconds(one),
        _steps(one),
        one["retry_class"],
        shortened(one["message"], MESSAGE_WIDTH),
    )


def _seconds(one: Mapping[str, Any]) -> str | None:
    if one["ended_at"] is None:
        return None
    began, ended = (datetime.fromisoformat(one[name]) for name in ("started_at", "ended_at"))
    return f"{(ended - began).total_seconds():.1f}"


def _steps(one: Mapping[str, Any]) -> str:
    """Return where it began and where it ended, as far as that is known."""
    begin, end = (
        UNKNOWN if one[name] is None else one[name] for name in ("step_at_start", "step_at_end")
    )
    return f"{begin} to {end}"
