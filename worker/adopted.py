"""The life of a process that an earlier agent has started, and of one that is over.

Nobody becomes the parent of a process that exists: whoever adopts it holds it by a pidfd, which
means this process for ever and becomes readable at its end. How it ended the kernel tells anybody
of our user while the process is a zombie, and from Linux 6.15 on, after it was reaped, whoever had
a pidfd before. Who reaps it is not known: init, or a subreaper in between.
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

from muster.contracts.process import ProcessRecord
from muster.processes import boot_id, stat_of
from muster.sight import require_descriptors
from worker.lives import UNSEEN, ExitStatus

_GROUP: Final = 1 << 2
"""PIDFD_SIGNAL_PROCESS_GROUP, from Linux 6.9 on."""

_INFO: Final = struct.Struct("<QQ11Ii")
"""struct pidfd_info in its first version, which every later kernel takes: mask, control group,
eleven ids, exit status."""

_GET_INFO: Final = 0b11 << 30 | _INFO.size << 16 | 0xFF << 8 | 11
"""PIDFD_GET_INFO."""

_INFO_EXIT: Final = 1 << 3

_STATUS_FIELD: Final = 49
"""Of /proc/PID/stat, counted after the command name."""

_FOR_HOLDING: Final = 2
"""Descriptors: one that stays, and one for a look at whom it holds."""


Send = Callable[[int, int, None, int], None]


class Held:
    """A living process, or a zombie, that is not our child."""

    def __init__(self, record: ProcessRecord, send: Send = signal.pidfd_send_signal) -> None:
        """Raises ProcessLookupError if this process is gone, OSError if there is no descriptor.

        Then nothing is held.
        `send` is the system call, which kernels before 6.9 refuse for a whole group.
        """
        if record.boot_id != boot_id():
            raise ProcessLookupError(f"process {record.pid} ran before this machine was started")
        self.pid: Final = record.pid
        self.identity: Final = record
        self._send = send
        require_descriptors(_FOR_HOLDING)
        self.pidfd: Final = os.pidfd_open(record.pid)
        self._is_over = False
        # The descriptor now holds one process; only if that is the one that is meant is it ours.
        if stat_of(record) is None:
            os.close(self.pidfd)
            raise ProcessLookupError(f"process {record.pid} is another one by now")

    def signal_group(self, number: signal.Signals) -> None:
        if self._is_over:
            return
        try:
            self._send(self.pidfd, number, None, _GROUP)
        except ProcessLookupError:
            return
        except OSError:  # an older kernel: while its leader lives, the group's number is no other's
            if not self.has_exited():
                with suppress(ProcessLookupError):  # it may be reaped by anybody, at any moment
                    os.killpg(self.pid, number)

    def has_exited(self) -> bool:
        if self._is_over:
            return True
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def ending(self) -> ExitStatus:
        # Whoever reaps it does so at any moment: a zombie before, and perhaps the other way after.
        statuses = (look() for look in (self._told, self._as_zombie, self._told))
        status = next((status for status in statuses if status is not None), None)
        return UNSEEN if status is None else ExitStatus.of_status(status)

    def let_go(self) -> None:
        self._is_over = True
        os.close(self.pidfd)

    def _as_zombie(self) -> int | None:
        fields = stat_of(self.identity)
        # Of a process that has changed its user /proc shows 0 to anybody else.
        is_shown = _owner_of(self.pid) == os.geteuid()
        return int(fields[_STATUS_FIELD]) if fields is not None and is_shown else None

    def _told(self) -> int | None:
        content = bytearray(_INFO.pack(_INFO_EXIT, *[0] * 13))
        try:
            fcntl.ioctl(self.pidfd, _GET_INFO, content)
        except OSError:
            return None
        mask, *_, status = _INFO.unpack(content)
        return status if mask & _INFO_EXIT else None


class Departed:
    """A process that was gone before it could be adopted, and of whose end nothing is on record."""

    def __init__(self, pid: int) -> None:
        self.pid: Final = pid
        self.identity: Final = None

    def signal_group(self, number: signal.Signals) -> None:
        """Nobody is there."""

    def has_exited(self) -> bool:
        return True

    def ending(self) -> ExitStatus:
        return UNSEEN

    def let_go(self) -> None:
        """Nothing is held."""


def adopted_life(process: ProcessRecord) -> Held | Departed:
    """Return the life of a process that is to be adopted; raises OSError as `Held` does."""
    try:
        return Held(process)
    except ProcessLookupError:
        return Departed(process.pid)


def _owner_of(pid: int) -> int | None:
    try:
        return Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return None
