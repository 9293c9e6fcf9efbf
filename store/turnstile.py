"""Whose turn it is to begin a write, among the processes of one machine.

SQLite lets a writer that has to wait look again now and then, at last ten times a second, and
whoever looks in the right moment is next: a process whose threads write one after the other leaves
no such moment, and another, with a lease to renew, waits for seconds. So whoever wants to write
takes a lock beside the database first and gives it back when its transaction has begun: who
waits for SQLite holds the turn meanwhile, and whoever has just written is behind it.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

TURN_PATIENCE_SECONDS: Final = 0.5
"""The longest wait for a turn. Turns take milliseconds; one that takes longer is that of a process
that is stuck or stopped, and SQLite's own lock is the one that counts."""

_POLL_SECONDS: Final = 0.001


class Turnstile:
    """A courtesy among writers, and no condition: who waits too long for a turn goes without.

    So does everybody where there are no locks. For one thread at a time: each `Database` on a file
    has one, and two of them are two writers, even in one process.
    """

    def __init__(self, path: Path, patience_seconds: float) -> None:
        self._path = path
        self._patience_seconds = patience_seconds
        self._descriptor: int | None = None

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait for one's turn to begin, as long as patience lasts, and keep it meanwhile."""
        descriptor = self._opened()
        if descriptor is None or not self._comes(descriptor):
            yield
            return
        try:
            yield
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _opened(self) -> int | None:
        if self._descriptor is None:
            # Where no file can be made, the database says what is wrong with the place.
            with suppress(OSError):
                self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        return self._descriptor

    def _comes(self, descriptor: int) -> bool:
        deadline = time.monotonic() + self._patience_seconds
        try:
            while not try_lock(descriptor):
                if time.monotonic() > deadline:
                    return False
                time.sleep(_POLL_SECONDS)
        except OSError:  # some network and user-space file systems have no locks, or none left
            return False
        return True


def try_lock(descriptor: int) -> bool:
    """Take the lock of an open file, unless another one has it. Raises OSError without locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
