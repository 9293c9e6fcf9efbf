"""When each part of a rank's log was written.

A rank writes directly into its log file, so no line passes through the agent. The agent regularly
appends (size, time) to an index. A line's time is that of the first entry that covers it.
"""

import os
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

from muster.contracts.paths import TIME_MARK
from muster.runtime.exit_report import last_lines

_FLAGS: Final = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC


class LogIndex:
    """The log of one attempt and its index, both open. Raises OSError if that is not possible."""

    def __init__(self, log: Path, times: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as opened:
            self._log = os.open(log, _FLAGS, 0o600)
            opened.callback(os.close, self._log)
            self._times = os.open(times, _FLAGS, 0o600)
            opened.callback(os.close, self._times)
            self._indexed_bytes = self._last_size()
            opened.pop_all()

    @property
    def descriptor(self) -> int:
        """The log, for the process's stdout and stderr."""
        return self._log

    def note(self, unix_seconds: float) -> None:
        """Append an entry if the log has grown."""
        size = os.fstat(self._log).st_size
        if size > self._indexed_bytes:
            with suppress(OSError):  # disk full: the next entry covers these lines too
                os.write(self._times, TIME_MARK.pack(size, int(unix_seconds * 1e6)))
                self._indexed_bytes = size

    def last_lines(self) -> tuple[str, ...]:
        """Return the end of the log, bounded in lines and bytes."""
        return last_lines(self._log)

    def close(self) -> None:
        os.close(self._log)
        os.close(self._times)

    def _last_size(self) -> int:
        """Return the size in the last entry, after truncating an incomplete one."""
        size = os.fstat(self._times).st_size
        whole = size - size % TIME_MARK.size
        os.ftruncate(self._times, whole)
        last = os.pread(self._times, TIME_MARK.size, max(0, whole - TIME_MARK.size))
        return int(TIME_MARK.unpack(last)[0]) if last else 0
