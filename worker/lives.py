"""What an agent can do with a rank's process: signal it, see its end, learn how it ended.

As its parent it can do all of that; the end stays there to be looked at until it is reaped. So it
is looked at first, and reaped when it is on record: who dies in between has lost nothing.
"""

import os
import signal
from dataclasses import dataclass
from typing import Final, Protocol

from muster.contracts.process import ProcessRecord
from muster.processes import identify
from worker.starting import Started


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitStatus:
    """How a process ended; at most one is set, and neither for an end that nobody saw."""

    exit_code: int | None
    signal: int | None

    @classmethod
    def of_status(cls, status: int) -> "ExitStatus":
        """Return what the kernel's exit status means."""
        code = os.waitstatus_to_exitcode(status)
        return cls(exit_code=code if code >= 0 else None, signal=-code if code < 0 else None)

    @classmethod
    def of_zombie(cls, zombie: os.waitid_result) -> "ExitStatus":
        """Return what a look at a process that nobody has reaped says."""
        is_exit = zombie.si_code == os.CLD_EXITED
        return cls(
            exit_code=zombie.si_status if is_exit else None,
            signal=None if is_exit else zombie.si_status,
        )


UNSEEN: Final = ExitStatus(exit_code=None, signal=None)


class Life(Protocol):
    """One process that leads a session of its own."""

    @property
    def pid(self) -> int: ...

    @property
    def identity(self) -> ProcessRecord | None:
        """None if it was over before it could be looked at."""

    def signal_group(self, number: signal.Signals) -> None:
        """Signal the process and its group; never another that has got its number."""

    def has_exited(self) -> bool: ...

    def ending(self) -> ExitStatus:
        """Return how it ended, once it has; it can still be asked again."""

    def let_go(self) -> None:
        """Have nothing more to do with it, once it has ended."""


class OwnChild:
    """The life of a process that this agent has started."""

    def __init__(self, started: Started) -> None:
        self.pid: Final = started.pid
        self.identity: Final = identify(started.pid)
        self._handle = started.handle
        self._is_reaped = False

    def signal_group(self, number: signal.Signals) -> None:
        if not self._is_reaped:
            # Not reaped yet, so neither the pid nor the group's number can mean another.
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:
                return

    def has_exited(self) -> bool:
        return self._is_reaped or self._look(os.WNOHANG) is not None

    def ending(self) -> ExitStatus:
        zombie = self._look()
        return UNSEEN if zombie is None else ExitStatus.of_zombie(zombie)

    def _look(self, options: int = 0) -> os.waitid_result | None:
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | options)

    def let_go(self) -> None:
        _, status = os.waitpid(self.pid, 0)
        self._is_reaped = True
        if self._handle is not None:
            # Told, it does not wait itself for a pid that may be somebody else's by then.
            self._handle.returncode = os.waitstatus_to_exitcode(status)
