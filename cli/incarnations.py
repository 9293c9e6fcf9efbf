"""``muster incarnations``: every process that a job's ranks have had, and how it ended."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, Final

import typer

from cli.pool import Job, connected, path_of
from cli.tables import UNKNOWN, shortened, table

INDENT: Final = "      "
MESSAGE_WIDTH: Final = 74
"""With the indent a line of a terminal."""

_HEADER: Final = ("rank", "process", "pid", "started (UTC)", "seconds", "steps", "class")

Last = Annotated[int, typer.Option("--last", min=1, max=1000, help="Most processes to show.")]


def incarnations(job: Job, last: Last = 20) -> None:
    """Show every process of a job's ranks and how it ended, the newest first."""
    with connected() as server:
        found = server.get(f"{path_of(job, 'incarnations')}?limit={last}")
    for line in _lines(found["incarnations"]):
        typer.echo(line)


def _lines(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a row for each, and below it why it ended."""
    header, *rows = table(_HEADER, map(_row, found))
    yield header
    for row, one in zip(rows, found, strict=True):
        yield row
        if one["message"]:
            yield f"{INDENT}{shortened(one['message'], MESSAGE_WIDTH)}"


def _row(one: Mapping[str, Any]) -> tuple[str | int | None, ...]:
    began, ended = (_time(one[name]) for name in ("started_at", "ended_at"))
    return (
        one["rank"],
        one["incarnation"],
        one["pid"],
        None if began is None else f"{began:%m-%d %H:%M:%S}",
        None if began is None or ended is None else round((ended - began).total_seconds()),
        f"{_step(one['step_at_start'])} to {_step(one['step_at_end'])}",
        one["retry_class"],
    )


def _time(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)


def _step(step: int | None) -> str:
    return UNKNOWN if step is None else str(step)
