"""Finds moments inside a checkpoint, by watching its writer with inotify.

A save writes into a temporary directory, renames it, and moves `LATEST` last. It is unfinished from
its first write until `LATEST` has moved, and a kill in between must not be visible.
"""

import ctypes
import os
import select
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from types import TracebackType
from typing import Self

from muster.checkpoints.manifest import LATEST, MANIFEST, STATE
from tests.support.faulty_store import FaultyStore

MODIFY, MOVED_FROM, MOVED_TO, CREATE = 0x2, 0x40, 0x80, 0x100
IS_DIRECTORY = 0x40000000
WATCHED = MODIFY | MOVED_FROM | MOVED_TO | CREATE
EVENT = struct.Struct("iIII")
READ_BYTES = 1 << 16

HOLD_SECONDS = 2.0

_LIBC = ctypes.CDLL(None, use_errno=True)


class Saves:
    """The saves into one checkpoint directory, from now on."""

    def __init__(self, directory: Path) -> None:
        """Raises OSError if the directory does not exist."""
        self._directory = directory
        self._descriptor = _checked(_LIBC.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        self._top = self._watch(directory)
        for path in directory.iterdir():
            # Those kept to be written over are written into without a word in the directory above.
            self._watch_if_there(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._descriptor)

    def reach(self, calls: int, timeout_seconds: float) -> bool:
        """Wait for event number `calls` of a save; return False if there was none in time.

        Of a shorter one the last call before its end is taken, at the next save.
        """
        deadline = time.monotonic() + timeout_seconds
        seen, target = 0, calls + 1
        while (left := deadline - time.monotonic()) > 0:
            select.select([self._descriptor], [], [], left)
            for is_end, is_work in self._events():
                if is_end:
                    target = min(target, seen) if seen else target
                    seen = 0
                elif is_work:
                    seen += 1
            if seen >= target:
                return True
        return False

    def is_unfinished(self) -> bool:
        """True if `LATEST` has not moved since `reach`."""
        return not any(is_end for is_end, _ in self._events())

    def _events(self) -> Iterator[tuple[bool, bool]]:
        """Yield for each event whether it ends a save and whether it belongs to one."""
        try:
            content = os.read(self._descriptor, READ_BYTES)
        except BlockingIOError:
            return
        offset = 0
        while offset < len(content):
            watch, mask, _, length = EVENT.unpack_from(content, offset)
            offset += EVENT.size
            name = content[offset : offset + length].rstrip(b"\0").decode()
            offset += length
            if mask & CREATE and mask & IS_DIRECTORY:
                self._watch_if_there(self._directory / name)
            yield bool(mask & MOVED_TO) and name == LATEST, self._is_work(watch, mask, name)

    def _is_work(self, watch: int, mask: int, name: str) -> bool:
        """What follows the move of `LATEST`, old checkpoints put away, is no part of a save."""
        if watch != self._top:
            return bool(mask & (MODIFY | CREATE))
        is_published = bool(mask & MOVED_TO) and name.startswith("step_")
        return is_published or bool(mask & (CREATE | MODIFY))

    def _watch_if_there(self, path: Path) -> None:
        if path.is_dir():
            _LIBC.inotify_add_watch(self._descriptor, os.fsencode(path), WATCHED)

    def _watch(self, path: Path) -> int:
        return _checked(_LIBC.inotify_add_watch(self._descriptor, os.fsencode(path), WATCHED))


class StoreSaves:
    """The same in an object store: its proxy holds one request of any save until `close`."""

    def __init__(self, store: FaultyStore) -> None:
        self._store = store
        self._is_held, self._is_closed = Event(), Event()
        self._is_late = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._store.fault = lambda _operation: None
        self._is_closed.set()

    def reach(self, calls: int, timeout_seconds: float) -> bool:
        """Wait until a save puts its state, its manifest or `LATEST`, as `calls` says."""
        wanted = f"PUT {(STATE, MANIFEST, LATEST)[calls % 3]}"

        def hold(operation: str) -> None:
            if operation == wanted and not self._is_held.is_set():
                self._is_held.set()
                self._is_late = not self._is_closed.wait(HOLD_SECONDS)

        self._store.fault = hold
        return self._is_held.wait(timeout_seconds)

    def is_unfinished(self) -> bool:
        return not self._is_late


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
