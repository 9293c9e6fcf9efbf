"""The copy of a database that another machine leads, kept by a process of its own."""

import os
from collections.abc import Callable, Sequence
from contextlib import closing
from hashlib import file_digest
from io import BufferedRandom
from pathlib import Path
from select import select
from typing import Final

from database.replication.copy import (
    append_log,
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
    Follow,
    Image,
    Row,
    ToLeader,
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
        self, path: Path, send: Callable[[ToLeader], None], report: Callable[[Position], None]
    ) -> None:
        """`report` gets the position at first, with each image, and at the end."""
        self._path = path
        self._send = send
        self._report = report
        self._pending: list[Row] = []
        self._image: tuple[Image, BufferedRandom] | None = None
        self._introduce()

    @property
    def pending(self) -> int:
        """How many rows are acknowledged, and not executed yet."""
        return len(self._pending)

    def take(self, messages: Sequence[ToOthers]) -> None:
        rows = [message for message in messages if isinstance(message, Row)]
        if rows:
            append_log(self._log, rows)
            self._pending += rows
            self._send(Acknowledge(rows[-1].number))
        for message in messages:
            match message:
                case Image():
                    self.execute()
                    self._image = message, new_file(self._path).open("w+b")
                case Chunk() if self._image is not None:
                    self._add(*self._image, message.content)
                case _:
                    pass

    def execute(self) -> None:
        """Execute the rows of the log."""
        if self._pending:
            with closing(connect(self._path)) as connection:
                execute(connection, self._pending)
            self._pending.clear()
            os.truncate(self._log, 0)

    def end(self) -> None:
        """Execute all; to be called when the leader is gone."""
        self.execute()
        self._report(position_of(self._path) or Position())

    def _introduce(self) -> None:
        position = position_of(self._path) or Position()
        self._log = log_of(self._path, position.image)
        if self._log.exists():
            os.truncate(self._log, 0)
        self._report(position)
        own = Follow(position.image, position.number, position.epoch, position.revision)
        self._send(own)

    def _add(self, image: Image, file: BufferedRandom, content: bytes) -> None:
        file.write(content)
        if file.tell() < image.size_bytes:
            return
        self._image = None
        with file:
            file.seek(0)
            digest = file_digest(file, "sha256")
            os.fsync(file.fileno())
        if digest.hexdigest() == image.sha256:
            install(self._path)
        self._introduce()  # the leader sends another image to a copy that it cannot continue


def follow(path: Path, source: int, target: int, report: Callable[[Position], None]) -> None:
    """Keep a copy at `path` from the stream of two descriptors, until that ends.

    Raises as `Follower`, and `WireError` and `MsgspecError` for what is no message.
    """

    def send(message: ToLeader) -> None:
        data = pack(message)
        while data:
            data = data[os.write(target, data) :]

    follower, unpacker = Follower(path, send, report), Unpacker(ToOthers)
    while True:
        is_quiet = follower.pending and not select([source], [], [], QUIET_SECONDS)[0]
        if is_quiet or follower.pending >= PENDING_ROWS:
            follower.execute()
        if not (data := os.read(source, CHUNK_BYTES)):
            break
        follower.take(unpacker.feed(data))
    follower.end()
