"""When which part of a rank's log was written, and how it ended.

A rank writes straight into its file, so nobody sees the lines go by. The agent looks at the size
now and then and notes (size, time): a line's time is that of the first note that covers it.
"""

import os
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final, Protocol

from muster.contracts.layout import TIME_MARK
from muster.log_end import last_lines
from muster.remarks import remark
from muster.sight import FOR_A_LOOK, require_descriptors

_FLAGS: Final = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC

FOR_NOTES: Final = 2
"""Descriptors: the log, and the times."""


class Notes(Protocol):
    """What an agent keeps of the log of one incarnation."""

    def note(self, unix_seconds: float) -> None:
        """Remember how much was written by now."""

    def last_lines(self) -> tuple[str, ...]:
        """Return the end of the log, as far as it is to be had."""

    def close(self) -> None:
        """Keep no more of it."""


class Logbook:
    """The log of one incarnation: the file its process writes to, and the notes beside it."""

    def __init__(self, log: Path, times: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as opened:
            self._log = os.open(log, _FLAGS, 0o600)
            opened.callback(os.close, self._log)
            self._times = os.open(times, _FLAGS, 0o600)
            opened.callback(os.close, self._times)
            self._noted_bytes = self._last_noted()
            opened.pop_all()

    @property
    def descriptor(self) -> int:
        """What the process gets as stdout and stderr."""
        return self._log

    def note(self, unix_seconds: float) -> None:
        """Remember how much was written by now; nothing is written if nothing was."""
        size = os.fstat(self._log).st_size
        if size > self._noted_bytes:
            # On a full disk a time is missing, and the next one is as good.
            with suppress(OSError):
                os.write(self._times, TIME_MARK.pack(size, int(unix_seconds * 1e6)))
                self._noted_bytes = size

    def _last_noted(self) -> int:
        """Return up to where an earlier agent has noted; what it did not finish is cut off."""
        size = os.fstat(self._times).st_size
        whole = size - size % TIME_MARK.size
        os.ftruncate(self._times, whole)
        last = os.pread(self._times, TIME_MARK.size, max(0, whole - TIME_MARK.size))
        return int(TIME_MARK.unpack(last)[0]) if last else 0

    def last_lines(self) -> tuple[str, ...]:
        """Return the end of the log, bounded in lines and bytes."""
        return last_lines(self._log)

    def close(self) -> None:
        os.close(self._log)
        os.close(self._times)


class LateLogbook:
    """The logbook of a rank that runs already, opened with the first note for which that can be.

    The rank writes on meanwhile, and does not depend on anybody who takes notes. So they come
    after everything else that takes descriptors: whoever is to be held, looked at or told.
    """

    def __init__(self, log: Path, times: Path) -> None:
        self._paths = (log, times)
        self._opened: Logbook | None = None
        self._has_failed = False

    def note(self, unix_seconds: float) -> None:
        """Do as `Logbook` does, if it can be opened now."""
        if self._opened is None:
            self._open()
        if self._opened is not None:
            self._opened.note(unix_seconds)

    def _open(self) -> None:
        try:
            require_descriptors(FOR_NOTES + FOR_A_LOOK)
            self._opened = Logbook(*self._paths)
        except OSError as error:
            if not self._has_failed:  # said once, tried again at every note
                remark(f"no times are noted of {self._paths[0]}, until it can be opened: {error}")
            self._has_failed = True

    def last_lines(self) -> tuple[str, ...]:
        """Return the end of the log, nothing of one that was never opened."""
        return () if self._opened is None else self._opened.last_lines()

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()
