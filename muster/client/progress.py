"""One line that says how far a job is: redrawn in place on a terminal, now and then elsewhere."""

import shutil
from collections.abc import Callable, Iterator
from typing import Final, TextIO

from muster.client.views import SummaryView
from muster.contracts.job import TERMINAL

QUIET_SECONDS: Final = 5.0
"""Off a terminal every line stays, so there are fewer of them."""


class Progress:
    """Draws the summaries of one job."""

    def __init__(self, out: TextIO, monotonic: Callable[[], float]) -> None:
        self._out = out
        self._monotonic = monotonic
        self._in_place = out.isatty()
        self._drawn = ""
        self._next = 0.0

    def draw(self, summary: SummaryView) -> None:
        """Draw, if there is anything new and it is time."""
        line = line_of(summary)
        if line == self._drawn or (not self._in_place and self._monotonic() < self._next):
            return
        self._put(line)

    def close(self, summary: SummaryView) -> None:
        """Draw the end, and leave it there."""
        self._put(line_of(summary))
        if self._in_place:
            print(file=self._out)

    def _put(self, line: str) -> None:
        self._next = self._monotonic() + QUIET_SECONDS
        self._drawn = line
        # A line that is broken in two cannot be drawn over.
        shown = line[: shutil.get_terminal_size().columns - 1]
        self._out.write(f"\r{shown}\x1b[K" if self._in_place else f"{line}\n")
        self._out.flush()


def line_of(summary: SummaryView) -> str:
    """Return what there is to say of a job in one line."""
    return "  ".join([summary.job_id, summary.status, *_facts(summary)])


def _facts(summary: SummaryView) -> Iterator[str]:
    total = "" if summary.total_steps is None else f"/{summary.total_steps}"
    if summary.step or total:
        yield f"step {summary.step}{total}"
    if summary.loss is not None:
        yield f"loss {summary.loss:.4f}"
    if summary.throughput_steps_per_sec:
        yield f"{summary.throughput_steps_per_sec:.1f} steps/s"
    if summary.eta_seconds is not None:
        yield f"ETA {duration(summary.eta_seconds)}"
    if summary.status not in TERMINAL:
        living = sum(worker.pid is not None for worker in summary.workers)
        yield f"{living} of {summary.world_size} ranks"
    if summary.restarts:
        yield f"{summary.restarts} restart{'' if summary.restarts == 1 else 's'}"


def duration(seconds: float) -> str:
    """Return a time in the two largest units that it has."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
