"""Starts the storage process: on behalf of an agent's ranks, or of one rank without an agent."""

import math
import subprocess
import time
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Final

import msgspec

from muster.contracts.storage import StorageAssignment
from muster.host.processes import module_command
from muster.runtime.stderr_messages import print_stderr

HEALTHY_SECONDS: Final = 60.0
PAUSE_SECONDS: Final = 30.0
"""The longest pause before a process that has lived shorter than that is started again."""


class StorageProcess:
    """A child that ends some time after this process does."""

    def __init__(
        self, assignment: StorageAssignment, environ: Mapping[str, str], log: Path | None = None
    ) -> None:
        self._assignment: Final = assignment
        self._environ: Final = environ
        self._log: Final = log
        self._process: subprocess.Popen[bytes] | None = None
        self._next_start = -math.inf
        self._pause_seconds = 0.0

    def revive(self) -> None:
        """Start it if it does not run: after its first death at once, then ever later."""
        now = time.monotonic()
        if now < self._next_start or (self._process and self._process.poll() is None):
            return
        is_healthy = now >= self._next_start + HEALTHY_SECONDS
        doubled = min(PAUSE_SECONDS, max(0.5, 2 * self._pause_seconds))
        self._pause_seconds = 0.0 if is_healthy else doubled
        self._next_start = now + self._pause_seconds
        try:
            self._start()
        except OSError as error:  # no process, descriptor or disk space at the moment
            print_stderr(f"the storage process cannot be started, it is tried again: {error}")

    def stop(self) -> None:
        """Let it finish what it was handed over, within the stop grace."""
        if self._process is not None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.communicate(timeout=self._assignment.stop_grace_seconds)

    def _start(self) -> None:
        if self._process is not None:
            self._process.communicate()  # closes the pipe
        with nullcontext() if self._log is None else self._log.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603  our own module
                module_command("worker.storage"),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=self._environ,
                start_new_session=True,  # Ctrl-C is for the rank, whose last save it finishes
            )
        assert self._process.stdin is not None  # noqa: S101  it is a pipe, which stays open
        with suppress(BrokenPipeError):
            self._process.stdin.write(msgspec.json.encode(self._assignment) + b"\n")
            self._process.stdin.flush()
