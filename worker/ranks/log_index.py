"""When each part of a rank's log was written, and whether its program has truncated it.

A rank writes directly into its log file, so no line passes through the agent. The agent regularly
appends (size, time) to an index. A line's time is that of the first entry that covers it.

``echo x > /dev/stderr`` opens the log anew and truncates it. Nothing that leaves the program intact
prevents that, so it is detected by a block far beyond the end, which every truncation frees.
"""

import fcntl
import os
import re
import struct
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

from muster.contracts.settings.paths import LOG_EPOCH_BYTES, TIME_MARK, LogName
from muster.host.files import KEEP_SIZE, PUNCH_HOLE, closing, fallocate
from muster.runtime.exit_report import LAST_BYTES, last_lines

TRUNCATED: Final = (
    "truncates its own log, so earlier lines are lost: in a shell script, write `>&2` instead of "
    "`> /dev/stderr`"
)

LOGS_FULL: Final = (
    "writes into logs that have reached the job's max_log_bytes: their oldest lines are discarded "
    "from now on"
)

_FLAGS: Final = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC

_ERROR: Final = re.compile(
    rb"Traceback \(most recent call last\)|\b\w+(Error|Exception)\b|::Error\b"
)

_FIEMAP: Final = struct.Struct("=QQLLLL")
"""struct fiemap: start, length, flags, number of extents there, room for extents, reserved."""
_FS_IOC_FIEMAP: Final = 0xC020660B

_BLOCK_BYTES: Final = 4096
_SENTINEL: Final = LOG_EPOCH_BYTES // 2, _BLOCK_BYTES  # offset and length of the block


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
            self._set_sentinel()
            opened.pop_all()

    @property
    def descriptor(self) -> int:
        """The log, for the process's stdout and stderr."""
        return self._log

    def note(self, unix_seconds: float) -> bool:
        """Append an entry if the log has changed; return True at its first truncation."""
        epoch, known = divmod(self._indexed_bytes, LOG_EPOCH_BYTES)
        # In this order: the next checks see a truncation that comes between these two.
        is_freed = self._has_sentinel and not self._is_sentinel_there()
        size = os.fstat(self._log).st_size
        is_truncated = is_freed or size < known
        if size == known and not is_truncated:
            return False
        end = ((epoch + is_truncated) * LOG_EPOCH_BYTES + size) % (1 << 64)
        try:
            os.write(self._times, TIME_MARK.pack(end, int(unix_seconds * 1e6)))
        except OSError:  # disk full: the next entry covers these lines too
            return False
        self._indexed_bytes = end
        if is_truncated:
            self._set_sentinel()
        return is_truncated and epoch == 0

    def last_lines(self) -> tuple[str, ...]:
        """Return the end of the log, bounded in lines and bytes."""
        return last_lines(self._log)

    def error_end(self) -> int | None:
        """Return where the first error in the end of the log ends, as the index counts."""
        size = os.fstat(self._log).st_size
        start = max(0, size - LAST_BYTES)
        found = _ERROR.search(os.pread(self._log, LAST_BYTES, start))
        return None if found is None else self._indexed_bytes - size + start + found.end()

    def close(self) -> None:
        os.close(self._log)
        os.close(self._times)

    def _set_sentinel(self) -> None:
        with suppress(OSError):  # not on this file system: only a log that shrinks is noticed
            fallocate(self._log, KEEP_SIZE, *_SENTINEL)
        self._has_sentinel = self._is_sentinel_there()

    def _is_sentinel_there(self) -> bool:
        try:
            found = fcntl.ioctl(self._log, _FS_IOC_FIEMAP, _FIEMAP.pack(*_SENTINEL, 0, 0, 0, 0))
        except OSError:
            return False
        return bool(_FIEMAP.unpack(found)[3])

    def _last_size(self) -> int:
        """Return the size in the last entry, after truncating an incomplete one."""
        size = os.fstat(self._times).st_size
        whole = size - size % TIME_MARK.size
        os.ftruncate(self._times, whole)
        last = os.pread(self._times, TIME_MARK.size, max(0, whole - TIME_MARK.size))
        return int(TIME_MARK.unpack(last)[0]) if last else 0


def discard_oldest_lines(logs: Path, limit_bytes: int, running: AbstractSet[LogName]) -> bool:
    """If the logs of a job take more disk space, leave holes where their oldest lines were.

    Ended attempts lose all their lines first, then each running one the same share. Returns whether
    something was discarded.
    """
    found = {
        name: entry.stat(follow_symlinks=False)
        for entry in os.scandir(logs)
        if (name := LogName.parse(entry.name)) is not None
    }
    used = {name: max(0, 512 * status.st_blocks - _BLOCK_BYTES) for name, status in found.items()}
    excess = sum(used.values()) - limit_bytes
    if excess <= 0:
        return False
    excess += limit_bytes // 8  # make room for more than a moment
    share = excess / sum(used.values())
    is_discarded = False
    for name in sorted(found, key=lambda name: (name in running, found[name].st_mtime)):
        if excess > 0 and used[name]:
            part = int(used[name] * share) if name in running else used[name]
            is_discarded |= _discard(logs / f"{name.stem}.log", part + _BLOCK_BYTES)
            excess -= part
    return is_discarded


def _discard(log: Path, count: int) -> bool:
    """Discard about so many bytes at the beginning of what is left; return False if impossible."""
    try:
        with closing(os.open(log, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)) as descriptor:
            end = os.lseek(descriptor, 0, os.SEEK_DATA) + count
            fallocate(descriptor, KEEP_SIZE | PUNCH_HOLE, 0, end - end % _BLOCK_BYTES)
    except OSError:
        return False
    return True
