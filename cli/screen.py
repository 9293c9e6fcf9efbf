"""A terminal full of jobs."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from rich.console import Console, ConsoleDimensions, ConsoleOptions, Group, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from cli.job_rows import HEADER, SPARE, row
from cli.tables import cropped, narrowed
from muster.client.progress import duration
from muster.client.views import SummaryView
from muster.contracts.job import JobStatus

COLUMNS: Final = HEADER[:-1]
"""All but the age, so that 80 columns are enough."""

SPARED: Final = (*(name for name in SPARE if name in COLUMNS), "step")
"""What a narrow terminal is drawn without, the first of it first."""

WORDS: Final = frozenset({"job", "status"})
"""Columns of words; the others are numbers."""

NAME_WIDTH_MIN: Final = 8
"""As much of an id as is always shown: other columns go before it does."""

FRAME_LINES: Final = 3
"""Above and below the jobs: how many, the names of the columns, and what else is to be said."""

STYLES: Final[Mapping[str, str]] = {
    JobStatus.RUNNING: "green",
    JobStatus.RECOVERING: "yellow",
    JobStatus.FAILED: "red",
    JobStatus.COMPLETED: "dim",
    JobStatus.STOPPED: "dim",
}


@dataclass(frozen=True, slots=True)
class _Name:
    """An id, as much of it as there is room for: its end tells it from others as its begin does."""

    text: str

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(cropped(self.text, options.max_width), no_wrap=True)

    def __rich_measure__(self, _: Console, options: ConsoleOptions) -> Measurement:
        longest = min(len(self.text), options.max_width)
        return Measurement(min(longest, NAME_WIDTH_MIN), longest)


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why what is shown is old."""

    error: Exception
    since: datetime


def screen(
    jobs: Sequence[SummaryView],
    total: int,
    url: str,
    size: ConsoleDimensions,
    trouble: Trouble | None,
) -> Group:
    """Return what to draw on a terminal of this `size`; `total` counts all jobs there are."""
    now = datetime.now(UTC)
    shown = jobs[: max(1, size.height - FRAME_LINES)]
    counts = Counter(job.status.lower() for job in jobs)
    said = ", ".join(f"{count} {status}" for status, count in counts.items())
    return Group(
        _line(f"{url}  {now:%H:%M:%S} UTC  {said or 'no job; submit one: muster submit --help'}"),
        _table(shown, now, size.width),
        _line(_footer(total - len(shown), trouble, now), "yellow" if trouble else "dim"),
    )


def _table(jobs: Sequence[SummaryView], now: datetime, width: int) -> Table:
    whole = [
        (cropped(job.job_id, NAME_WIDTH_MIN), *row(job, now)[1 : len(COLUMNS)]) for job in jobs
    ]
    columns, rows = narrowed(COLUMNS, whole, width, SPARED)
    drawn = Table(box=None, expand=True, pad_edge=False, padding=(0, 2, 0, 0))
    first, *rest = columns
    drawn.add_column(first, no_wrap=True, overflow="ellipsis", ratio=1, min_width=NAME_WIDTH_MIN)
    for name in rest:
        drawn.add_column(name, no_wrap=True, justify="left" if name in WORDS else "right")
    for job, (_, *others) in zip(jobs, rows, strict=True):
        # As text: a name may hold what Rich takes for markup.
        cells = [Text("-" if cell is None else str(cell)) for cell in others]
        drawn.add_row(_Name(job.job_id), *cells, style=STYLES.get(job.status, ""))
    return drawn


def _footer(hidden: int, trouble: Trouble | None, now: datetime) -> str:
    if trouble is not None:
        return f"as of {duration((now - trouble.since).total_seconds())} ago: {trouble.error}"
    more = f"{hidden} more: --status chooses.  " if hidden > 0 else ""
    return f"{more}Ctrl-C ends this, and no job"


def _line(text: str, style: str = "") -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")
