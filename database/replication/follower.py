"""The copy of a database that another machine leads, kept by a process of its own."""

import os
from collections.abc import Callable, Sequence
from contextlib import closing
from hashlib import file_digest
from io import BufferedRandom
from pathlib import Path
from select import select
from typing import Final

import msgspec

from database.replication.copy import (
    append_log,
    clear_log,
    connect,
    execute,
    install,
    log_of,
    new_file,
    position_of,
)
from database.replication.messages import (
    CHUNK_BYTES,
    Acknowledge,
    Chunk,
    Current,
    Follow,
    Image,
    Row,
    ToOthers,
    Unpacker,
    pack,
)
from muster.contracts.position import Position

QUIET_SECONDS: Final = 0.02
"""Without a message for so long, what is in the log is executed: acknowledgements go first."""

PENDING_ROWS: Final = 256


class Follower:
    """Takes what the leader sends. Raises OSError and `sqlite3.Error`, as for a full disk."""

    def __init__(
        self, path: Path, send: Callable[[bytes], object], report: Callable[[Position], None]
    ) -> None:
        """`report` gets the position at first, and whenever the copy has become another one."""
        self._path = path
        self._send = send
        self._report = report
        self.pending: list[Row] = []
        """Acknowledged, and not executed yet."""
        self._image: tuple[Image, BufferedRandom] | None = None
        self._introduce()

    def take(self, messages: Sequence[ToOthers]) -> None:
        if rows := [message for message in messages if isinstance(message, Row)]:
            append_log(self._log, rows)
            self.pending += rows
            self._send(pack(Acknowledge(rows[-1].number)))
        for message in messages:
            if isinstance(message, Image):
                self._image = message, new_file(self._path).open("w+b")
            elif isinstance(message, Current):
                self.execute()
                self.report(is_current=True)
            elif isinstance(message, Chunk) and self._image:
                self._add(*self._image, message.content)

    def execute(self) -> None:
        """Execute the rows of the log."""
        if self.pending:
            with closing(connect(self._path)) as connection:
                execute(connection, self.pending)
            self.pending.clear()
            os.truncate(self._log, 0)

    def report(self, *, is_current: bool = False) -> Position:
        """Report where the copy is, and return that."""
        position = position_of(self._path) or Position()
        position = msgspec.structs.replace(position, is_current=is_current)
        self._report(position)
        return position

    def _introduce(self) -> None:
        position = self.report()
        self._log = log_of(self._path, position.image)
        clear_log(self._log)
        self._send(pack(Follow(position.image, position.number, position.epoch)))

    def _add(self, image: Image, file: BufferedRandom, content: bytes) -> None:
        file.write(content)
        if file.tell() < image.size_bytes:
            return
        self._image = None
        with file:
            file.seek(0)
            is_whole = file_digest(file, "sha256").hexdigest() == image.sha256
            os.fsync(file.fileno())
        self.execute()
        if is_whole:
            install(self._path)
        self._introduce()  # the leader sends another image to a copy that it cannot continue


def follow(path: Path, source: int, target: int, report: Callable[[Position], None]) -> None:
    """Keep a copy at `path` from the stream of two descriptors, until that ends.

    Raises as `Follower`, and `WireError` and `MsgspecError` for what is no message.
    """
    with open(
        target, "wb", buffering=0, closefd=False
    ) as out:  # writes whole messages: they are short
        follower, unpacker = Follower(path, out.write, report), Unpacker(ToOthers)
        while True:
            is_quiet = follower.pending and not select([source], [], [], QUIET_SECONDS)[0]
            if is_quiet or len(follower.pending) >= PENDING_ROWS:
                follower.execute()
            if not (data := os.read(source, CHUNK_BYTES)):
                break
            follower.take(unpacker.feed(data))
    follower.execute()
    follower.report()
