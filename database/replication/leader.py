"""The database that leads: its rows go to followers, and who waits for them gets an answer.

A process of its own, which only reads the database. See `database.replication.messages`.
"""

import asyncio
from contextlib import closing, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Final

import msgspec

from database.replication.copy import connect, position_of
from database.replication.messages import (
    CHUNK_BYTES,
    Answer,
    Chunk,
    Current,
    Follow,
    Image,
    Row,
    ToLeader,
    Unpacker,
    Wait,
    pack,
)
from muster.contracts.errors import WireError
from muster.host.peers import short_socket_path

POLL_SECONDS: Final = 0.1
"""Between looks for rows that no one waits for."""

WAIT_SECONDS: Final = 0.1
"""Longest wait for followers; one that misses it does not count until it has caught up."""

BATCH_ROWS: Final = 64

LARGE_CLUSTER: Final = 5
"""With so many members one follower is not enough: it may be off while the others elect."""

_NOWHERE: Final = Follow("", 0, 0)

_NEWEST: Final = "SELECT max(number) FROM outbox"

_ROWS: Final = """
SELECT number, epoch, has_majority, statements FROM outbox
WHERE number >= ? AND (SELECT id FROM image) = ? ORDER BY number LIMIT ?
"""


def followers_needed(members: Path) -> int:
    """Return how many followers make a row safe, from the file of members; none for one alone.

    Its type, `muster.cluster.members.Members`, needs more modules than this process has.
    """
    with suppress(OSError, msgspec.MsgspecError, LookupError):
        size = len(msgspec.json.decode(members.read_bytes())["nodes"])
        return (size > 1) + (size >= LARGE_CLUSTER)
    return 1


@dataclass(slots=True, eq=False)
class _Follower:
    writer: asyncio.StreamWriter
    at: Follow | None = None
    """The newest row that was sent; None while an image is on its way, and of one that waits."""
    acknowledged: int = 0
    is_current: bool = False


class Leader:
    """Serves the connections to one database, in one event loop."""

    def __init__(self, path: Path, members: Path) -> None:
        self._path = path
        self._members = members
        self._database = connect(path)
        self._followers: set[_Follower] = set()
        self._changed = asyncio.Event()
        (self._newest,) = self._database.execute(_NEWEST).fetchone()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection, of a follower or of a process that waits, to its end."""
        follower, unpacker = _Follower(writer), Unpacker(ToLeader)
        self._followers.add(follower)
        feeding = asyncio.create_task(self._feed(follower))
        try:
            with closing(writer), suppress(OSError, WireError, msgspec.MsgspecError):
                while data := await reader.read(CHUNK_BYTES):
                    for message in unpacker.feed(data):
                        await self._take(follower, message)
        finally:
            self._followers.discard(follower)
            feeding.cancel()

    async def _take(self, follower: _Follower, message: ToLeader) -> None:
        match message:
            case Wait():
                answer = Answer(await self._wait(message.number))
                follower.writer.write(pack(answer))
            case Follow():
                follower.at = message if self._rows_from(message) else _NOWHERE
                self._mark(follower, follower.at.number)
            case _:
                self._mark(follower, message.number)

    async def poll(self) -> None:
        """Notice rows that no one waits for, until cancelled. Raises `sqlite3.Error`."""
        while True:
            self._note(*self._database.execute(_NEWEST).fetchone())
            await asyncio.sleep(POLL_SECONDS)

    def _note(self, newest: int) -> None:
        if newest > self._newest:
            self._newest = newest
            self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _mark(self, follower: _Follower, number: int) -> None:
        """Take that a follower has the rows up to this one."""
        follower.acknowledged = number
        if number >= self._newest and not follower.is_current:
            follower.is_current = True
            follower.writer.write(pack(Current()))
        self._notify()

    async def _wait(self, number: int) -> bool:
        """Return whether enough followers have a row, if need be after a while."""
        self._note(number)
        needed = followers_needed(self._members)

        def has_enough() -> bool:
            return sum(one.acknowledged >= number for one in self._followers) >= needed

        with suppress(TimeoutError):
            async with asyncio.timeout(WAIT_SECONDS):
                while not has_enough() and sum(one.is_current for one in self._followers) >= needed:
                    await self._changed.wait()
        for one in self._followers:
            one.is_current &= one.acknowledged >= number
        return has_enough()

    async def _feed(self, follower: _Follower) -> None:
        """Send what a follower lacks, for as long as it is connected."""
        writer = follower.writer
        with closing(writer), suppress(OSError):
            while True:
                changed, at = self._changed, follower.at
                if at is None or at.number == self._newest:  # None: the answer to an image comes
                    await changed.wait()
                elif not (rows := self._rows_from(at)):
                    follower.at = None
                    await self._send_image(writer)
                elif len(rows) == 1:
                    await changed.wait()
                else:
                    follower.at = Follow(at.image, rows[-1].number, rows[-1].epoch)
                    writer.writelines(map(pack, rows[1:]))
                    await writer.drain()

    def _rows_from(self, at: Follow) -> list[Row]:
        """Return the row at which a copy is and those behind it; nothing if one is missing."""
        found = self._database.execute(_ROWS, (at.number, at.image, BATCH_ROWS)).fetchall()
        rows = [Row(number, epoch, bool(majority), done) for number, epoch, majority, done in found]
        if not rows or (rows[0].number, rows[0].epoch) != (at.number, at.epoch):
            return []
        # The newest row with a majority is kept, when those behind it are old and deleted.
        has_gap = rows[-1].number - at.number >= len(rows)
        return [] if has_gap else rows

    async def _send_image(self, writer: asyncio.StreamWriter) -> None:
        data, image = await asyncio.to_thread(self._read_image)
        writer.write(pack(image))
        for start in range(0, len(data), CHUNK_BYTES):
            writer.write(pack(Chunk(data[start : start + CHUNK_BYTES])))
            await writer.drain()

    def _read_image(self) -> tuple[bytes, Image]:
        """Return one state of the database as a file has it."""
        with closing(connect(self._path)) as source:
            data = source.serialize()
        return data, Image(len(data), sha256(data).hexdigest())


async def lead(path: Path, socket: Path, members: Path) -> None:
    """Serve the database at `path` on a Unix socket until cancelled.

    It waits for the services to make the database. Raises OSError and `sqlite3.Error`.
    """
    # The work of other processes: there is no event to wait for.
    while not ((position := position_of(path)) and position.image):  # noqa: ASYNC110
        await asyncio.sleep(POLL_SECONDS)
    leader = Leader(path, members)
    with short_socket_path(socket) as address:
        server = await asyncio.start_unix_server(leader.serve, address)
    async with server:
        await leader.poll()
