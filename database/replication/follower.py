"""The copy of a database that another machine leads, kept by a process of its own."""

import fcntl
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import file_digest
from io import BufferedRandom, FileIO
from pathlib import Path

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


class Follower:
    """Takes what the leader sends. Raises OSError and `sqlite3.Error`, as for a full disk."""

    def __init__(
        self, path: Path, send: Callable[[bytes], object], report: Callable[[Position], None]
    ) -> None:
        """`report` gets the position at first, and whenever the copy has become another one."""
        self._path = path
        self._send = send
        self._report = report
        self._image: tuple[Image, BufferedRandom] | None = None
        self._introduce()

    def take(self, messages: Sequence[ToOthers]) -> None:
        rows = [message for message in messages if isinstance(message, Row)]
        if rows and self._database:
            append_log(self._log, rows)
            self._send(pack(Acknowledge(rows[-1].number)))
            execute(self._database, rows)
            os.truncate(self._log, 0)
        for message in messages:
            if isinstance(message, Image):
                self._image = message, new_file(self._path).open("w+b")
            elif isinstance(message, Current):
                self.report(is_current=True)
            elif isinstance(message, Chunk) and self._image:
                self._add(*self._image, message.content)

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
        self._database = connect(self._path) if position.image else None
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
        if self._database:
            self._database.close()
        if is_whole:
            install(self._path)
        self._introduce()  # the leader sends another image to a copy that it cannot continue


def follow(path: Path, source: FileIO, target: FileIO, report: Callable[[Position], None]) -> None:
    """Keep a copy at `path` from the stream of two files, until that ends.

    Raises as `Follower`, and `WireError` and `MsgspecError` for what is no message.
    """
    with path.with_name(f"{path.name}.follow").open("w") as lock:
        # The process of a node that was killed may still execute what it has.
        fcntl.flock(lock, fcntl.LOCK_EX)
        follower, unpacker = Follower(path, target.write, report), Unpacker(ToOthers)
        with suppress(ConnectionError):  # an end as well
            while data := source.read(CHUNK_BYTES):
                follower.take(unpacker.feed(data))
        follower.report()
