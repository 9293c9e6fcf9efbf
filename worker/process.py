"""What an agent does with a rank's process: signal it, see its exit, learn its exit status.

The exit status is read without reaping (WNOWAIT). The process is reaped only after its exit record
is durable, so an agent that dies in between loses nothing.
"""

import os
import signal
from dataclasses import dataclass
from typing import Final, Protocol

from muster.contracts.rank import ProcessRecord
from muster.host.processes import identify
from worker.start import Started


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitStatus:
    """How a process ended: by exit code, by signal, or unknown if both are None."""

    exit_code: int | None
    signal: int | None

    @classmethod
    def of_status(cls, status: int) -> "ExitStatus":
        """Return the meaning of a wait status."""
        code = os.waitstatus_to_exitcode(status)
        return cls(exit_code=code if code >= 0 else None, signal=-code if code < 0 else None)


UNKNOWN_EXIT: Final = ExitStatus(exit_code=None, signal=None)


class ProcessHandle(Protocol):
    """One process that leads its own session."""

    @property
    def pid(self) -> int: ...

    @property
    def identity(self) -> ProcessRecord | None:
        """None if it exited before it could be identified."""

    def signal_group(self, number: signal.Signals) -> None:
        """Signal the process and its group, and never a process that reuses its pid."""

    def has_exited(self) -> bool: ...

    def exit_status(self) -> ExitStatus:
        """Return how it ended, once it has; may be called again."""

    def release(self) -> None:
        """Reap it or close its descriptor, once it has ended."""


class ChildProcess:
    """A process that this agent has started."""

    def __init__(self, started: Started) -> None:
        self.pid: Final = started.pid
        self.identity: Final = identify(started.pid)
        self._popen = started.handle
        self._is_reaped = False

    def signal_group(self, number: signal.Signals) -> None:
        if not self._is_reaped:
            # Until it is reaped, neither its pid nor its group id is reused.
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:
                return

    def has_exited(self) -> bool:
        return self._is_reaped or self._wait(os.WNOHANG) is not None

    def exit_status(self) -> ExitStatus:
        found = self._wait()
        if found is None:
            return UNKNOWN_EXIT
        is_exit = found.si_code == os.CLD_EXITED
        return ExitStatus(
            exit_code=found.si_status if is_exit else None,
            signal=None if is_exit else found.si_status,
        )

    def release(self) -> None:
        _, status = os.waitpid(self.pid, 0)
        self._is_reaped = True
        if self._popen is not None:
            # So that Popen does not wait for a pid that may be reused by then.
            self._popen.returncode = os.waitstatus_to_exitcode(status)

    def _wait(self, options: int = 0) -> os.waitid_result | None:
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | options)
