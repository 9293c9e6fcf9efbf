"""A job's progress as one line, redrawn in place on a terminal."""

import shutil
from collections.abc import Callable, Iterator
from typing import Final, TextIO

from muster.contracts.errors import printable
from muster.contracts.job.status import TERMINAL, JobStatus
from muster.contracts.views.job import SummaryView

QUIET_SECONDS: Final = 5.0  # between two lines that are not redrawn


class Progress:
    """Draws the summaries of one job."""

    def __init__(self, out: TextIO, monotonic: Callable[[], float]) -> None:
        self._out = out
        self._monotonic = monotonic
        self._in_place = out.isatty()
        self._drawn = ""
        self._next = 0.0

    def draw(self, summary: SummaryView, *, is_last: bool = False) -> None:
        """Draw the line if it has changed and, off a terminal, enough time has passed.

        The last line is drawn in any case.
        """
        line = self._line(summary)
        is_early = not self._in_place and self._monotonic() < self._next
        if not is_last and (line == self._drawn or is_early):
            return
        self._next = self._monotonic() + QUIET_SECONDS
        self._drawn = line
        self._out.write(f"\r{line}\x1b[K" if self._in_place else f"{line}\n")
        self._out.flush()

    def close(self) -> None:
        """End the line, so that later output starts below it."""
        if self._in_place and self._drawn:
            print(file=self._out)

    def _line(self, summary: SummaryView) -> str:
        # A wrapped line cannot be redrawn.
        if not self._in_place:
            return line_of(summary)
        return line_of(summary, shutil.get_terminal_size().columns - 1)


def line_of(summary: SummaryView, width: int | None = None) -> str:
    """Return a job's progress in one line of at most `width` characters."""
    facts = "  ".join([summary.status, *_facts(summary)])
    # If space is short the job's name goes first: the reader knows it.
    forms = f"{summary.job_id}  {facts}", facts, facts.replace("step ", "", 1)
    if width is None:
        return forms[0]
    cut = f"{forms[-1][: width - 1]}…"
    return next((form for form in forms if len(form) <= width), cut)


def _facts(summary: SummaryView) -> Iterator[str]:
    total = "" if summary.total_steps is None else f"/{summary.total_steps}"
    if summary.step or total:
        yield f"step {summary.step}{total}"
    is_over = summary.status in TERMINAL
    if summary.status == JobStatus.RUNNING or is_over:
        if summary.loss is not None:
            yield f"loss {summary.loss:.4f}"
        if summary.throughput_steps_per_sec:
            yield f"{summary.throughput_steps_per_sec:.1f}/s"
        if summary.eta_seconds is not None:
            yield f"ETA {duration(summary.eta_seconds)}"
    if not is_over:
        yield f"{summary.living}/{summary.world_size} ranks"
    if summary.restarts:
        yield f"{summary.restarts} restart{'' if summary.restarts == 1 else 's'}"
    # A running job needs no explanation, and the caller reports how it ended.
    if summary.message and summary.status != JobStatus.RUNNING and not is_over:
        yield printable(summary.message.partition("\n")[0])


def duration(seconds: float) -> str:
    """Return a duration in its two largest units, such as ``1m15s``; 0 if it is negative."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours}h"
    if hours:
        return f"{hours}h{minutes}m"
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
