"""One line that says how far a job is: redrawn in place on a terminal, now and then elsewhere."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Final, TextIO

from muster.client.views import SummaryView
from muster.contracts.job import TERMINAL, JobStatus
from muster.contracts.printable import spelt_out

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
        line = self._line(summary)
        if line == self._drawn or (not self._in_place and self._monotonic() < self._next):
            return
        self._put(line)

    def draw_last(self, summary: SummaryView) -> None:
        """Draw the end, whether it is time or not."""
        self._put(self._line(summary))

    def close(self) -> None:
        """Leave the last drawing where it is; what is written next stands below it."""
        if self._in_place and self._drawn:
            print(file=self._out)

    def _put(self, line: str) -> None:
        self._next = self._monotonic() + QUIET_SECONDS
        self._drawn = line
        self._out.write(f"\r{line}\x1b[K" if self._in_place else f"{line}\n")
        self._out.flush()

    def _line(self, summary: SummaryView) -> str:
        # A line that is broken in two cannot be drawn over.
        width = _columns(self._out) - 1 if self._in_place else None
        return line_of(summary, width)


def _columns(out: TextIO) -> int:
    # What is asked for the size unasked is standard output, which may go elsewhere.
    with suppress(OSError, ValueError):
        if columns := os.get_terminal_size(out.fileno()).columns:
            return columns
    return shutil.get_terminal_size().columns


def line_of(summary: SummaryView, width: int | None = None) -> str:
    """Return what there is to say of a job in one line, at most `width` characters long."""
    facts = "  ".join([summary.status, *_facts(summary)])
    # Who watches a job knows its name; how far it is he does not know.
    forms = f"{summary.job_id}  {facts}", facts, facts.replace("step ", "", 1)
    if width is None:
        return forms[0]
    return next((form for form in forms if len(form) <= width), _cut(forms[-1], width))


def _facts(summary: SummaryView) -> Iterator[str]:
    total = "" if summary.total_steps is None else f"/{summary.total_steps}"
    if summary.step or total:
        yield f"step {summary.step}{total}"
    is_over = summary.status in TERMINAL
    if summary.status == JobStatus.RUNNING or is_over:
        yield from _speed(summary)
    if not is_over:
        yield f"{summary.living}/{summary.world_size} ranks"
    if summary.restarts:
        yield f"{summary.restarts} restart{'' if summary.restarts == 1 else 's'}"
    # While it runs there is nothing to explain, and of its end somebody else tells.
    if summary.message and summary.status != JobStatus.RUNNING and not is_over:
        yield spelt_out(summary.message.partition("\n")[0])


def _speed(summary: SummaryView) -> Iterator[str]:
    if summary.loss is not None:
        yield f"loss {summary.loss:.4f}"
    if summary.throughput_steps_per_sec:
        yield f"{summary.throughput_steps_per_sec:.1f}/s"
    if summary.eta_seconds is not None:
        yield f"ETA {duration(summary.eta_seconds)}"


def _cut(line: str, width: int) -> str:
    return f"{line[: width - 1]}…"


def duration(seconds: float) -> str:
    """Return a time in the two largest units that it has: ``1m15s``.

    Two clocks differ: what began in the future by ours has taken no time yet.
    """
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours}h"
    if hours:
        return f"{hours}h{minutes}m"
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
