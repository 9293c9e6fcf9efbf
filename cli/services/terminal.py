"""What `muster run` prints: what ranks print, what happens to them, what its services warn of."""

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from cli.output import ROUTINE_EVENTS, Tracebacks, say
from muster.contracts.job.status import JobStatus
from muster.contracts.settings.paths import JobFiles
from muster.contracts.views.history import EventView
from muster.contracts.views.job import JobView
from muster.logs.local import LocalLogs
from muster.logs.source import decode

OWN_MESSAGES: Final = {"job_stopping": "interrupted; ranks checkpoint and exit", "job_queued": ""}
"""In place of messages that speak of a service."""

CHUNK_BYTES: Final = 16 << 20
"""Shown at once, so that a rank that prints without end does not hold up the messages."""

FINISHED: Final = (JobStatus.COMPLETED, JobStatus.FAILED)
"""Not STOPPED, which a second Ctrl-C leads to, nor QUEUED, as after the first one."""


def print_lines(lines: str) -> None:
    """Print what ranks wrote.

    If the reader goes away (``muster run … | head``), the job goes on and one message says so.
    """
    try:
        print(lines, flush=True)
    except OSError as error:
        # As Python's documentation advises: what is still buffered, and all to come, goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        say(f"what ranks print is only in their logs from now on ({error})")


class Terminal:
    """Shows what ranks print and what happens to them.

    Ranks write to files, so no rank waits for a slow terminal.
    """

    def __init__(self, files: JobFiles, write: Callable[[str], None] = print_lines) -> None:
        """`write` receives one or several lines. Lines that the logs hold already are skipped."""
        self._files = files
        self._write = write
        self._tracebacks = Tracebacks()
        logs = LocalLogs(files)
        self._follower = logs.follow(None, logs.tail_position(None, 0))

    def show_output(self) -> None:
        """Write the lines that have ended."""
        self._pass_on(is_over=False)

    def show_rest(self) -> None:
        """Write everything, also unfinished lines. The ranks must have ended."""
        while self._pass_on(is_over=True):
            pass
        for rank, line in self._tracebacks.rest():
            self._write(f"[{rank}] {line}")

    def _pass_on(self, *, is_over: bool) -> bool:
        size = 0
        while size < CHUNK_BYTES and (batch := self._follower.next_batch(lambda _: is_over)):
            for lines in batch:
                size += len(lines.raw) + 1
                shown = []
                for line in decode(lines.raw).split("\n"):
                    shown += self._tracebacks.pass_on(lines.name.rank, line)
                if shown:
                    self._write("\n".join(f"[{lines.name.rank}] {line}" for line in shown))
        return size > 0

    def show_event(self, event: EventView) -> None:
        message = OWN_MESSAGES.get(event.kind, event.message)
        if message and event.kind not in ROUTINE_EVENTS:
            say(self._tracebacks.shorten(message))

    def show_end(self, job: JobView) -> None:
        say(f"logs: {self._files.logs}")
        if job.status not in FINISHED:
            say(f"interrupted; the same command with --job-id {job.job_id} goes on")


class ServiceWarnings:
    """Prints what the services warn of, each once: a full disk lets no event be written."""

    def __init__(self, log: Path) -> None:
        """What the log holds already is from an earlier run."""
        self._log = log
        self._offset = log.stat().st_size if log.exists() else 0
        self._shown: set[str] = set()

    def show(self) -> None:
        with self._log.open("rb") as log:
            log.seek(self._offset)
            lines, end, _ = log.read(CHUNK_BYTES).rpartition(b"\n")
        self._offset += len(lines + end)
        for line in lines.splitlines():
            with suppress(ValueError):  # a traceback
                entry = json.loads(line)
                text = ": ".join(part for part in (entry["event"], entry.get("error")) if part)
                if entry["level"] != "info" and text not in self._shown:
                    self._shown.add(text)
                    say(text)
