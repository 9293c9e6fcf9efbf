"""What a transaction has done, as a row of the same transaction; and waiting for its copies."""

import asyncio
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Self

import msgspec
from msgspec.msgpack import encode
from sqlalchemy import Connection, Select, Update, event, func, select

from database.replication.copy import store
from database.replication.messages import (
    CHUNK_BYTES,
    Row,
    ToOthers,
    Unpacker,
    Wait,
    pack,
)
from database.tables import LEASES, OUTBOX
from muster.cluster.members import Members, read_members
from muster.contracts.errors import WireError
from muster.contracts.settings.paths import DataDir
from muster.contracts.settings.services import ServiceSettings
from muster.host.peers import short_socket_path

ANSWER_SECONDS: Final = 1.0
"""A process that leads answers in a tenth of that."""

_NUMBER: Final = select(func.coalesce(func.max(OUTBOX.c.number), 0))
_NEWEST: Final = select(OUTBOX).order_by(OUTBOX.c.number.desc()).limit(1)


class Replication:
    """The outbox of a database in this process, and whether followers have what it has written."""

    def __init__(self, members: Path, socket: Path) -> None:
        """`members` is the file of members, which has the epoch of this leader.

        `socket` is that of ``database.replication lead``.
        """
        self._members = members
        self._socket = socket
        self._written = self.newest = Row(0, 0, False, b"")  # noqa: FBT003  as of a table
        """`newest` is durable."""
        self._reign = Members(has_majority=False, has_copies=True)
        """As read last: a file that cannot be read acknowledges nothing."""
        self._acknowledged = 0
        self._turn = asyncio.Lock()

    @classmethod
    def of(cls, settings: ServiceSettings) -> Self | None:
        """Return that of a service; None if it is not one of `muster node`."""
        if settings.nodes is None:
            return None
        return cls(settings.nodes, DataDir(settings.data_dir).replication_socket)

    def start(self, connection: Connection) -> None:
        """Begin at the newest row, which an earlier process may have written."""
        self.newest = Row(**connection.execute(_NEWEST).one()._asdict())

    @contextmanager
    def recording(self, connection: Connection) -> Iterator[None]:
        """Write what the block executes as a row, at its end; one transaction at a time."""
        statements: list[tuple[str, Any, bool]] = []

        def record(*of_statement: Any) -> None:  # noqa: ANN401  as the event has them
            _, _, sql, values, context, is_many = of_statement
            done = context.invoked_statement
            # A copy has to know who held the lease last, and does without its beats.
            is_beat = isinstance(done, Update) and done.table is LEASES
            if not (isinstance(done, Select) or is_beat):
                statements.append((sql, values, is_many))

        # After, not before: a statement that fails may be caught by its caller.
        event.listen(connection, "after_cursor_execute", record)
        yield
        self._written = self.newest
        if statements:
            number = connection.scalars(_NUMBER).one() + 1
            self._reign = read_members(self._members) or self._reign
            done = encode(statements)
            self._written = Row(number, self._reign.term, self._reign.has_majority, done)
            store(connection.exec_driver_sql, self._written)

    def note_commit(self) -> None:
        """Take the row of the last block as durable."""
        self.newest = self._written

    async def acknowledge(self) -> bool:
        """Return whether enough followers have all that this process has committed.

        It waits for them a tenth of a second at most. Never raises.
        """
        async with self._turn:  # the answer to one is that to all who came before
            newest = self.newest
            if newest.number <= self._acknowledged or not self._reign.has_copies:
                return True
            if not (newest.has_majority and await self._ask(newest.number)):
                return False
            self._acknowledged = newest.number
            return True

    async def _ask(self, number: int) -> bool:
        with suppress(OSError, WireError, msgspec.MsgspecError):
            async with asyncio.timeout(ANSWER_SECONDS):
                with short_socket_path(self._socket) as address:
                    reader, writer = await asyncio.open_unix_connection(address)
                with closing(writer):
                    writer.write(pack(Wait(number)))
                    unpacker = Unpacker(ToOthers)
                    while data := await reader.read(CHUNK_BYTES):
                        for answer in unpacker.feed(data):
                            return bool(answer.is_acknowledged)
        return False
