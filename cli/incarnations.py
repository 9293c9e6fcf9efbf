"""``muster incarnations``: every process that a job's ranks have had, and how it ended."""

import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from cli.connected import Job, connected
from cli.output import Output, OutputOption, show
from cli.tables import UNKNOWN, table
from muster.client.paths import path_of
from muster.contracts.job import TERMINAL

if TYPE_CHECKING:
    from muster.client.views import SummaryView

INDENT: Final = "      "
WIDTH_MIN: Final = 40
"""A narrower terminal breaks the lines itself."""

LIVES: Final = "lives"
"""In place of the class of an end."""

_HEADER: Final = ("rank", "process", "pid", "started (UTC)", "seconds", "steps", "class")

Last = Annotated[int, typer.Option("--last", min=1, max=1000, help="Most processes to show.")]


def incarnations(job: Job, last: Last = 20, output: OutputOption = Output.TABLE) -> None:
    """Show every process of a job's ranks and how it ended, the newest first."""
    with connected() as client:
        whole = client.job(job)
        found = client.connection.get(path_of(whole.id, "incarnations"), {"limit": last})
        summary = whole.summary()
    each = found["incarnations"]
    names = (f"{one['rank']}.{one['incarnation']}" for one in each)
    show(output, found, lines(summary, each, _width()), names)


def _width() -> int | None:
    """Return how wide the terminal is; what goes elsewhere is not broken into lines."""
    return max(WIDTH_MIN, shutil.get_terminal_size().columns) if sys.stdout.isatty() else None


def lines(
    job: "SummaryView", found: Sequence[Mapping[str, Any]], width: int | None
) -> Iterator[str]:
    """Yield what the job says of itself, a row for each process, and below it why it ended."""
    reason = f" ({job.reason})" if job.reason else ""
    said = f": {job.message}" if job.message else ""
    yield from _broken(f"{job.job_id} is {job.status}{reason}{said}", width)
    if not found:
        yield "it had no process" if job.status in TERMINAL else "none yet"
        return
    steps = {worker.worker_id: worker.step for worker in job.workers}
    header, *rows = table(_HEADER, (_row(one, steps) for one in found))
    yield header
    for row, one in zip(rows, found, strict=True):
        yield row
        if one["message"]:
            yield from _broken(one["message"], width, INDENT)


def _broken(text: str, width: int | None, indent: str = "") -> Iterator[str]:
    """Yield the lines of `text`, none wider than `width`; nothing of it is left out."""
    for line in text.splitlines():
        if width is None or len(indent) + len(line) <= width:
            yield f"{indent}{line}"
        else:
            yield from textwrap.wrap(
                line, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
            )


def _row(one: Mapping[str, Any], steps: Mapping[str, int]) -> tuple[str | int | None, ...]:
    began, ended = (_time(one[name]) for name in ("started_at", "ended_at"))
    return (
        one["rank"],
        one["incarnation"],
        one["pid"],
        None if began is None else f"{began:%m-%d %H:%M:%S}",
        None if began is None or ended is None else round((ended - began).total_seconds()),
        _way(one["step_at_start"], _last_step(one, steps)),
        LIVES if ended is None else one["retry_class"],
    )


def _last_step(one: Mapping[str, Any], steps: Mapping[str, int]) -> int | None:
    """Return how far a process has come, as far as it has said."""
    # Until a process has said where it began, its rank's step is that of the one before it.
    is_placed = one["ended_at"] is None and one["step_at_start"] is not None
    live_step = steps.get(f"{one['rank']}.{one['incarnation']}") if is_placed else None
    ended_step: int | None = one["step_at_end"]
    return ended_step if live_step is None else live_step


def _time(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)


def _way(first: int | None, last: int | None) -> str | None:
    """Return from which step a process has come to which; None if it has said nothing."""
    if first is None and last is None:
        return None
    return " to ".join(UNKNOWN if step is None else str(step) for step in (first, last))
