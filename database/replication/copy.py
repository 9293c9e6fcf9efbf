"""A database file as a copy: its position, and the log of rows that it has not executed yet.

No SQLAlchemy here: these processes run on every machine of a household. The log is named by the
image, as rows of one must never reach another.
"""

import os
import sqlite3
import struct
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Final
from urllib.parse import quote
from zlib import crc32

import msgspec
from msgspec.msgpack import decode, encode

from database import HEAD
from database.replication.messages import Row
from muster.contracts.position import Position
from muster.host import files

KEPT_ROWS: Final = 2000
"""A follower that is further behind gets an image."""

BUSY_TIMEOUT_SECONDS: Final = 10.0

_HEAD: Final = struct.Struct("<II")
"""Of an entry of the log: its size and its CRC-32."""

_MAJORITY: Final = (
    "coalesce((SELECT number FROM outbox WHERE has_majority ORDER BY number DESC LIMIT 1), 0)"
)
_INSERT: Final = "INSERT INTO outbox (number, epoch, has_majority, statements) VALUES (?, ?, ?, ?)"
_PRUNE: Final = f"DELETE FROM outbox WHERE number <= ? AND number <> {_MAJORITY}"  # noqa: S608
_POSITION: Final = f"""
SELECT coalesce(safe.epoch, 0), {_MAJORITY}, coalesce(newest.epoch, 0),
  coalesce(newest.number, 0), coalesce((SELECT id FROM image), ''), version_num
FROM alembic_version
  LEFT JOIN outbox AS newest ON newest.number = (SELECT max(number) FROM outbox)
  LEFT JOIN outbox AS safe ON safe.number = {_MAJORITY}
"""  # noqa: S608


def connect(path: Path) -> sqlite3.Connection:
    """Open a database that exists; a transaction that was interrupted is rolled back first."""
    place, wait = f"file:{quote(str(path.absolute()))}?mode=rw", BUSY_TIMEOUT_SECONDS
    connection = sqlite3.connect(place, uri=True, isolation_level=None, timeout=wait)
    # A DELETE takes the rows of other tables with it, as it does on the leader.
    connection.executescript("PRAGMA synchronous = FULL; PRAGMA foreign_keys = ON")
    return connection


def position_of(path: Path) -> Position | None:
    """Return what the database holds, once it has executed the rows of its log.

    None if it is missing or damaged. Not for a copy that another process writes now.
    """
    if not path.exists():
        return None
    try:
        with closing(connect(path)) as connection:
            rows = read_log(log_of(path, _position(connection).image))
            if rows:
                execute(connection, rows)
            return _position(connection)
    except sqlite3.OperationalError:
        raise
    except sqlite3.DatabaseError:
        return None  # damaged


def _position(connection: sqlite3.Connection) -> Position:
    if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'outbox'").fetchone():
        return Position()  # of an earlier version, or empty: older than any copy
    position = Position(*connection.execute(_POSITION).fetchone())
    # An older schema is migrated.
    return msgspec.structs.replace(position, may_lead=position.revision <= HEAD)


def store(execute: Callable[[str, tuple[object, ...]], object], row: Row) -> None:
    """Add a row to the outbox, and delete old ones: the same on the leader and on copies."""
    execute(_INSERT, (row.number, row.epoch, row.has_majority, row.statements))
    execute(_PRUNE, (row.number - KEPT_ROWS,))


def execute(connection: sqlite3.Connection, rows: Sequence[Row]) -> None:
    """Do what the rows say, those that the database has left out, in one transaction."""
    with connection:
        connection.execute("BEGIN IMMEDIATE")
        (newest,) = connection.execute("SELECT max(number) FROM outbox").fetchone()
        for row in rows:
            if row.number > newest:
                for sql, values, is_many in decode(row.statements):
                    (connection.executemany if is_many else connection.execute)(sql, values)
                store(connection.execute, row)


def log_of(path: Path, image: str) -> Path:
    """Return the file of rows that are durable, and perhaps not executed."""
    return path.with_name(f"{path.name}.rows-{image}")


def append_log(log: Path, rows: Sequence[Row]) -> None:
    """Make rows durable. Raises OSError."""
    with log.open("ab") as file:
        for payload in map(encode, rows):
            file.write(_HEAD.pack(len(payload), crc32(payload)) + payload)
        file.flush()
        os.fdatasync(file.fileno())


def clear_log(log: Path) -> None:
    """Begin a log, or begin it anew."""
    log.write_bytes(b"")
    _sync_directory(log)


def read_log(log: Path) -> list[Row]:
    """Return the rows of a log up to its end, or to an entry that was not written whole."""
    rows: list[Row] = []
    data = log.read_bytes() if log.exists() else b""
    while len(data) > _HEAD.size:
        size, checksum = _HEAD.unpack_from(data)
        payload, data = data[_HEAD.size :][:size], data[_HEAD.size + size :]
        if not payload or crc32(payload) != checksum:
            break
        rows.append(decode(payload, type=Row))
    return rows


def new_file(path: Path) -> Path:
    """Return where a new database file is written, for `install`."""
    return path.with_name(f"{path.name}.new")


def install(path: Path) -> None:
    """Put the new file, which is durable, in the place of the old one, whose log was executed."""
    with suppress(sqlite3.Error), closing(connect(path)) as old:
        old.execute("SELECT 1 FROM sqlite_master")  # a hot journal is rolled back now
    # What is beside the new file would be taken for its own: a journal puts old pages into it.
    beside = (path.with_name(path.name + end) for end in ("-journal", "-wal", "-shm"))
    for left in (*path.parent.glob(f"{path.name}.rows-*"), *beside):
        left.unlink(missing_ok=True)
    _sync_directory(path)
    new_file(path).replace(path)
    _sync_directory(path)


def _sync_directory(path: Path) -> None:
    with files.closing(files.open_named_directory(path.parent)) as directory:
        os.fsync(directory)
