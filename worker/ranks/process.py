"""What an agent does with a rank's process: signal it, see its exit, learn its exit status.

The exit status of a child is read without reaping (WNOWAIT). It is reaped only after its exit
record is durable, so an agent that dies in between loses nothing.

A process that an earlier agent has started, or a program of the rank, is not our child. It is held
by a pidfd, which becomes readable at its exit. The exit status is available to other processes of
the same user while it is a zombie (/proc/PID/stat), and from Linux 6.15 on also after it has been
reaped (PIDFD_GET_INFO). Its parent, init or a subreaper reaps it at any moment.
"""

import fcntl
import os
import select
import signal
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self, TypeAlias

from muster.contracts.rank import ProcessRecord
from muster.host.processes import boot_id, identify, read_stat

_INFO: Final = struct.Struct("<QQ11Ii")
"""First version of struct pidfd_info: mask, cgroup, eleven ids, exit status."""
_PIDFD_GET_INFO: Final = 0b11 << 30 | _INFO.size << 16 | 0xFF << 8 | 11
_PIDFD_INFO_EXIT: Final = 1 << 3

_STATUS_FIELD: Final = 49
"""exit_code in /proc/PID/stat, counted after the command name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitStatus:
    """How a process ended: by exit code, by signal, or unknown if both are None."""

    exit_code: int | None
    signal: int | None

    @classmethod
    def of(cls, code: int) -> Self:
        """Return that of an exit code; a negative one is a signal's number."""
        is_exit = code >= 0
        return cls(exit_code=code if is_exit else None, signal=None if is_exit else -code)

    @property
    def is_failure(self) -> bool:
        """False also if it is unknown."""
        return self.signal is not None or bool(self.exit_code)


UNKNOWN_EXIT: Final = ExitStatus(exit_code=None, signal=None)


class ChildProcess:
    """A process that this agent has started, and that leads its own session."""

    pidfd: Final = None  # SIGCHLD reports its exit

    def __init__(self, pid: int) -> None:
        self.pid: Final = pid
        self.identity: Final = identify(pid, or_zombie=True)  # a short command has ended already
        """None if it exited before it could be identified."""
        self._is_reaped = False

    def signal_group(self, number: signal.Signals) -> None:
        """Signal the process and its group, and never a process that reuses its pid."""
        if not self._is_reaped:
            # Until it is reaped, neither its pid nor its group id is reused.
            with suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def has_exited(self) -> bool:
        return self._is_reaped or self._wait(os.WNOHANG) is not None

    def exit_status(self) -> ExitStatus:
        """Return how it ended, once it has; may be called again."""
        found = self._wait()
        if found is None:
            return UNKNOWN_EXIT
        is_exit = found.si_code == os.CLD_EXITED
        return ExitStatus.of(found.si_status if is_exit else -found.si_status)

    def release(self) -> None:
        """Reap it, once it has ended."""
        os.waitpid(self.pid, 0)
        self._is_reaped = True

    def _wait(self, options: int = 0) -> os.waitid_result | None:
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | options)


class AdoptedProcess:
    """The same, of another parent: it runs, is a zombie, or has gone without an exit record."""

    def __init__(self, record: ProcessRecord) -> None:
        """Raises OSError without a descriptor."""
        self.pid: Final = record.pid
        self.pidfd = _pidfd_of(record)
        """None once it is gone."""
        self.identity: Final = None if self.pidfd is None else record

    def signal_group(self, number: signal.Signals) -> None:
        # While the leader exists, the group id is not reused. Containment finds what it leaves.
        if not self.has_exited():
            with suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def has_exited(self) -> bool:
        if self.pidfd is None:
            return True
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def exit_status(self) -> ExitStatus:
        # It may be reaped between the first two attempts; the third one then works.
        for read in (self._status_from_pidfd, self._status_of_zombie, self._status_from_pidfd):
            status = read()
            if status is not None:
                return ExitStatus.of(os.waitstatus_to_exitcode(status))
        return UNKNOWN_EXIT

    def release(self) -> None:
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None

    def _status_of_zombie(self) -> int | None:
        fields = None if self.identity is None else read_stat(self.identity)
        try:
            # /proc shows status 0 to everyone else if the process has changed its user.
            is_shown = Path(f"/proc/{self.pid}").stat().st_uid == os.geteuid()
        except OSError:
            return None
        return int(fields[_STATUS_FIELD]) if fields is not None and is_shown else None

    def _status_from_pidfd(self) -> int | None:
        if self.pidfd is None:
            return None
        content = bytearray(_INFO.pack(_PIDFD_INFO_EXIT, *[0] * 13))
        try:
            fcntl.ioctl(self.pidfd, _PIDFD_GET_INFO, content)
        except OSError:
            return None
        mask, *_, status = _INFO.unpack(content)
        return status if mask & _PIDFD_INFO_EXIT else None


ProcessHandle: TypeAlias = ChildProcess | AdoptedProcess


def _pidfd_of(record: ProcessRecord) -> int | None:
    """Return a descriptor of exactly this process; None if it is gone."""
    if record.boot_id != boot_id():
        return None
    try:
        pidfd = os.pidfd_open(record.pid)
    except ProcessLookupError:
        return None
    # The pidfd pins one process. Check after opening it that this is the right one.
    if read_stat(record) is None:
        os.close(pidfd)
        return None
    return pidfd
