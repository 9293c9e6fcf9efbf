"""The process that an agent keeps running beside its ranks: for storage, and to send logs."""

import os
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from muster.contracts.messages.assignment import AgentAssignment
from muster.contracts.messages.storage import StorageAssignment
from muster.contracts.settings.names import PROCESS_TAG
from muster.contracts.settings.paths import JobFiles
from muster.host.processes import module_command
from muster.runtime.stderr_messages import print_stderr

HELPER_PAUSE_SECONDS: Final = 1.0
"""At least, between two starts of a helper process."""

SENDER_GRACE_SECONDS: Final = 3.0
"""For the last lines of a host that its job leaves; a dismissed agent is killed after 5 s."""


@dataclass(slots=True)
class HelperProcess:
    """A child that runs one of our modules, and ends some time after this process does."""

    module: str
    assignment: msgspec.Struct
    """The first line of its standard input, which then stays open."""
    environ: Mapping[str, str]
    log: Path
    grace_seconds: float
    _process: subprocess.Popen[bytes] | None = None
    _next_start: float = 0.0

    def ensure_running(self) -> None:
        """Start it if it does not run, but not too often."""
        now = time.monotonic()
        if now < self._next_start or (self._process and self._process.poll() is None):
            return
        self._next_start = now + HELPER_PAUSE_SECONDS
        try:
            self._start()
        except OSError as error:  # no process, descriptor or disk space at the moment
            print_stderr(f"{self.module} cannot be started, it is tried again: {error}")

    def stop(self) -> bool:
        """Let it finish its work within its grace; return whether it has."""
        if self._process is None:
            return False
        # One that has ended before may have been reaped by another: its exit code is lost.
        is_running = self._process.poll() is None
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(self.grace_seconds)
        if self._process.stdin is not None:  # only now: it takes that for the end of its agent
            self._process.stdin.close()
        return is_running and self._process.returncode == 0

    def _start(self) -> None:
        if self._process is not None:
            self._process.communicate()  # closes the pipe
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603  our own module
                module_command(self.module),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=self.environ,
                start_new_session=True,
            )
        assert self._process.stdin is not None  # noqa: S101  it is a pipe, which stays open
        with suppress(BrokenPipeError):
            self._process.stdin.write(msgspec.json.encode(self.assignment) + b"\n")
            self._process.stdin.flush()


def helper_tag(assignment: AgentAssignment) -> str:
    return f"{assignment.job_uid}/storage"


def helper_process(assignment: AgentAssignment, files: JobFiles) -> HelperProcess | None:
    """Return what keeps the job's storage process alive; that of an earlier agent goes on."""
    if not (assignment.has_storage or assignment.is_remote):
        return None
    without_secrets = msgspec.structs.replace(assignment, shared_env={}, store_keys=None)
    order = StorageAssignment(
        socket=str(files.storage_socket) if assignment.has_storage else "",
        stop_grace_seconds=assignment.stop_grace_seconds,
        keys=assignment.store_keys or {},
        agent=without_secrets if assignment.is_remote else None,
    )
    return HelperProcess(
        "worker.storage",
        order,
        environ={**os.environ, PROCESS_TAG: helper_tag(assignment)},
        log=files.storage_log,
        grace_seconds=assignment.stop_grace_seconds * assignment.has_storage
        + SENDER_GRACE_SECONDS * assignment.is_remote,
    )
