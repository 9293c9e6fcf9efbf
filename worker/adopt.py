"""Processes that an earlier agent has started, held by a pidfd because they are not our children.

A pidfd becomes readable at the process's exit. The exit status is available to other processes of
the same user while it is a zombie (/proc/PID/stat), and from Linux 6.15 on also after it has been
reaped (PIDFD_GET_INFO). Init or a subreaper in between reaps it at any moment.
"""

import fcntl
import os
import select
import signal
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from muster.contracts.rank import ProcessRecord
from muster.host.processes import boot_id, read_stat
from worker.process import UNKNOWN_EXIT, ExitStatus

_PIDFD_SIGNAL_PROCESS_GROUP: Final = 1 << 2  # from Linux 6.9 on

_INFO: Final = struct.Struct("<QQ11Ii")
"""First version of struct pidfd_info: mask, cgroup, eleven ids, exit status."""
_PIDFD_GET_INFO: Final = 0b11 << 30 | _INFO.size << 16 | 0xFF << 8 | 11
_PIDFD_INFO_EXIT: Final = 1 << 3

_STATUS_FIELD: Final = 49
"""exit_code in /proc/PID/stat, counted after the command name."""

Send = Callable[[int, int, None, int], None]


class AdoptedProcess:
    """A running process, or a zombie, that is not our child."""

    def __init__(self, record: ProcessRecord, send: Send = signal.pidfd_send_signal) -> None:
        """Raises ProcessLookupError if this process is gone; OSError without a descriptor.

        Kernels before 6.9 refuse the system call `send` for a whole group.
        """
        if record.boot_id != boot_id():
            raise ProcessLookupError(f"process {record.pid} ran before this machine was booted")
        self.pid: Final = record.pid
        self.identity: Final = record
        self._send = send
        self.pidfd: Final = os.pidfd_open(record.pid)
        self._is_released = False
        # The pidfd pins one process. Check after opening it that this is the right one.
        if read_stat(record) is None:
            os.close(self.pidfd)
            raise ProcessLookupError(f"pid {record.pid} belongs to another process now")

    def signal_group(self, number: signal.Signals) -> None:
        if self._is_released:
            return
        try:
            self._send(self.pidfd, number, None, _PIDFD_SIGNAL_PROCESS_GROUP)
        except ProcessLookupError:
            return
        except OSError:
            # Older kernel. While the leader exists, the group id is not reused.
            if not self.has_exited():
                with suppress(ProcessLookupError):
                    os.killpg(self.pid, number)

    def has_exited(self) -> bool:
        if self._is_released:
            return True
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def exit_status(self) -> ExitStatus:
        # It may be reaped between the first two looks; the third one then works.
        for look in (self._status_from_pidfd, self._status_of_zombie, self._status_from_pidfd):
            status = look()
            if status is not None:
                return ExitStatus.of_status(status)
        return UNKNOWN_EXIT

    def release(self) -> None:
        self._is_released = True
        os.close(self.pidfd)

    def _status_of_zombie(self) -> int | None:
        fields = read_stat(self.identity)
        try:
            # /proc shows status 0 to everyone else if the process has changed its user.
            is_shown = Path(f"/proc/{self.pid}").stat().st_uid == os.geteuid()
        except OSError:
            return None
        return int(fields[_STATUS_FIELD]) if fields is not None and is_shown else None

    def _status_from_pidfd(self) -> int | None:
        content = bytearray(_INFO.pack(_PIDFD_INFO_EXIT, *[0] * 13))
        try:
            fcntl.ioctl(self.pidfd, _PIDFD_GET_INFO, content)
        except OSError:
            return None
        mask, *_, status = _INFO.unpack(content)
        return status if mask & _PIDFD_INFO_EXIT else None


class GoneProcess:
    """A process that exited before it could be adopted, without an exit record."""

    def __init__(self, pid: int) -> None:
        self.pid: Final = pid
        self.identity: Final = None

    def signal_group(self, number: signal.Signals) -> None:
        """Do nothing."""

    def has_exited(self) -> bool:
        return True

    def exit_status(self) -> ExitStatus:
        return UNKNOWN_EXIT

    def release(self) -> None:
        """Do nothing."""


def adopt_process(record: ProcessRecord) -> AdoptedProcess | GoneProcess:
    """Return the handle of a process to adopt; raises OSError as `AdoptedProcess` does."""
    try:
        return AdoptedProcess(record)
    except ProcessLookupError:
        return GoneProcess(record.pid)
