"""Copies of a database: the rows that a transaction leaves, and what a follower does with them."""

import asyncio
import shutil
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, closing
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from database import HEAD
from database.engine import Database
from database.jobs import Jobs
from database.replication.copy import (
    KEPT_ROWS,
    append_log,
    connect,
    execute,
    install,
    log_of,
    new_file,
    position_of,
    read_log,
    store,
)
from database.replication.follower import Follower
from database.replication.leader import Leader
from database.replication.messages import (
    Acknowledge,
    Chunk,
    Current,
    Follow,
    Image,
    Row,
    ToLeader,
    ToOthers,
    Unpacker,
    pack,
)
from muster.cluster.members import term_of
from muster.contracts.job.spec import JobSpec
from muster.contracts.job.status import JobId
from muster.contracts.position import Position
from tests.support.copies import (
    WRITES,
    Writers,
    back_up,
    content,
    leading,
    open_leading,
    outbox,
)
from tests.support.database_samples import submit

EMPTY = b"\x90"
"""No statement."""


@pytest.fixture
def path(tmp_path: Path, migrated_file: Path) -> Path:
    """The database of a leader; nothing is written."""
    leading(tmp_path)
    shutil.copy(migrated_file, tmp_path / "muster.db")
    return tmp_path / "muster.db"


@pytest.fixture
def database(path: Path) -> Iterator[Database]:
    with closing(open_leading(path)) as opened:
        yield opened


@settings(max_examples=20)
@given(st.lists(st.tuples(st.sampled_from(sorted(WRITES)), st.integers(1, 3)), max_size=30))
def test_a_copy_equals_its_leader(migrated_file: Path, writes: Sequence[tuple[str, int]]) -> None:
    with TemporaryDirectory() as directory:
        path, copy = Path(directory, "muster.db"), Path(directory, "copy.db")
        leading(path.parent)
        shutil.copy(migrated_file, path)
        with closing(open_leading(path)) as database:
            back_up(path, copy)
            writers = Writers(database)
            for what, number in writes:
                writers.write(what, number)
        with closing(connect(copy)) as connection:
            execute(connection, outbox(path, after=1))
        assert content(copy) == content(path)
        assert position_of(copy) == position_of(path)


def test_a_beat_of_the_lease_leaves_no_row(database: Database, path: Path) -> None:
    writers, before = Writers(database), len(outbox(path))
    writers.write("beat", 0)
    assert len(outbox(path)) == before


def test_old_rows_go_but_for_the_newest_with_a_majority(database: Database, path: Path) -> None:
    del database
    with closing(connect(path)) as connection, connection:
        connection.execute("BEGIN")
        for number in range(2, KEPT_ROWS + 6):
            store(connection.execute, Row(number, 1, number == 3, EMPTY))
    numbers = [row.number for row in outbox(path)]
    assert numbers == [3, *range(6, KEPT_ROWS + 6)]


def image_of(path: Path) -> str:
    position = position_of(path)
    assert position is not None
    return position.image


def test_a_start_without_copies_ends_the_image(database: Database, path: Path) -> None:
    first = image_of(path)
    database.close()
    Database.open(path).close()
    assert (first != "", image_of(path)) == (True, "")
    open_leading(path).close()
    assert image_of(path) not in {"", first}
    open_leading(path).close()  # its successor goes on
    assert outbox(path)[-1].number == 2


def test_a_backup_is_of_no_image(database: Database, path: Path) -> None:
    backup = path.with_name("backup.db")
    database.back_up(backup)
    assert image_of(backup) == ""


def test_a_majority_counts_before_epoch_and_number() -> None:
    ascending = [
        Position(),
        Position(majority_epoch=1, majority_number=9, epoch=3, number=9),
        Position(majority_epoch=2, majority_number=5, epoch=3, number=9),
        Position(majority_epoch=2, majority_number=6, epoch=2, number=6),
        Position(majority_epoch=2, majority_number=6, epoch=2, number=7),
        Position(majority_epoch=2, majority_number=6, epoch=3, number=6),
    ]
    assert all(older < newer for older, newer in pairwise(ascending))


def test_another_schema_may_not_lead(database: Database, path: Path) -> None:
    del database
    with closing(connect(path)) as connection:
        connection.execute("UPDATE alembic_version SET version_num = 'r9999'")
    position = position_of(path)
    assert position is not None
    assert (position.revision, position.may_lead, HEAD < "r9999") == ("r9999", False, True)


TERM = term_of(1, "0")


def rows_of(*numbers: int, epoch: int = 1) -> list[Row]:
    return [Row(number, epoch, True, EMPTY) for number in numbers]  # noqa: FBT003


@given(st.integers(0, 400), st.binary(max_size=20))
def test_a_torn_end_of_the_log_is_left_out(size_bytes: int, torn: bytes) -> None:
    with TemporaryDirectory() as directory:
        log, rows = Path(directory, "log"), rows_of(*range(1, 9))
        append_log(log, rows)
        log.write_bytes(log.read_bytes()[:size_bytes] + torn)
        found = read_log(log)
        assert found == rows[: len(found)]


class Stage:
    """A follower that is fed by hand."""

    def __init__(self, path: Path) -> None:
        self.sent: list[ToLeader] = []
        self.positions: list[Position] = []
        self._unpacker = Unpacker(ToLeader)
        self.follower = Follower(path, self._send, self.positions.append)

    def _send(self, data: bytes) -> None:
        self.sent += self._unpacker.feed(data)

    def take_image(self, data: bytes, digest: str | None = None) -> None:
        image = Image(len(data), digest or sha256(data).hexdigest())
        self.follower.take([image, Chunk(data[:1000]), Chunk(data[1000:])])


@pytest.fixture
def image(database: Database, path: Path) -> bytes:
    """A database of four rows as bytes."""
    Writers(database).write("submit", 1)
    whole = path.with_name("whole.db")
    back_up(path, whole)
    return whole.read_bytes()


def test_rows_are_executed_once_they_are_acknowledged(image: bytes, tmp_path: Path) -> None:
    stage = Stage(tmp_path / "copy.db")
    stage.take_image(image)
    stage.follower.take(rows_of(3, 4))
    assert stage.sent[-1] == Acknowledge(4)
    assert [row.number for row in outbox(tmp_path / "copy.db")] == [1, 2, 3, 4]


@pytest.mark.parametrize("start", [Stage, open_leading, position_of])
def test_a_start_executes_what_is_in_the_log(
    image: bytes, tmp_path: Path, start: Callable[[Path], Any]
) -> None:
    copy = tmp_path / "copy.db"
    copy.write_bytes(image)
    append_log(log_of(copy, image_of(copy)), rows_of(2, 3))
    start(copy)
    assert [row.number for row in outbox(copy)] == [1, 2, 3]


def test_an_image_with_a_wrong_hash_is_refused(image: bytes, tmp_path: Path) -> None:
    stage = Stage(tmp_path / "copy.db")
    stage.take_image(image)
    before = (tmp_path / "copy.db").read_bytes()
    stage.take_image(image[:-1] + b"?", sha256(image).hexdigest())
    assert (tmp_path / "copy.db").read_bytes() == before
    assert stage.sent[-1] == stage.sent[-2]  # where it is, from which the leader goes on


def test_a_hot_journal_does_not_reach_a_new_image(image: bytes, tmp_path: Path) -> None:
    copy = tmp_path / "copy.db"
    old = tmp_path / "old.db"
    old.write_bytes(image)
    with closing(sqlite3.connect(old, isolation_level=None)) as writing:
        writing.execute("PRAGMA cache_size = 1")
        writing.execute("BEGIN")
        writing.execute("CREATE TABLE much AS SELECT zeroblob(100000) AS x")
        for end in ("", "-journal"):  # as a power cut leaves them
            shutil.copy(f"{old}{end}", f"{copy}{end}")
    assert Path(f"{copy}-journal").stat().st_size > 512
    new_file(copy).write_bytes(image)
    install(copy)
    with closing(connect(copy)):
        assert copy.read_bytes() == image


# The side of the leader


class Client:
    """One end of a connection to a leader."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._unpacker = Unpacker(ToOthers)
        self._waiting: list[ToOthers] = []

    def send(self, message: ToLeader) -> None:
        self._writer.write(pack(message))

    def close(self) -> None:
        self._writer.close()

    async def receive(self) -> ToOthers:
        while not self._waiting:
            messages = self._unpacker.feed(await self._reader.read(1 << 18))
            self._waiting += [each for each in messages if not isinstance(each, Current)]
        return self._waiting.pop(0)


@asynccontextmanager
async def serving(path: Path) -> AsyncIterator[Callable[[], Awaitable[Client]]]:
    """Run a leader; yield what connects a client."""
    socket = path.with_name("replication.sock")
    leader = Leader(path, path.with_name("nodes.json"))

    served: list[Awaitable[None]] = []
    clients: list[Client] = []

    async def connect_client() -> Client:
        clients.append(Client(*await asyncio.open_unix_connection(socket)))
        return clients[-1]

    async def serve(*stream: Any) -> None:  # noqa: ANN401  reader and writer
        served.append(asyncio.create_task(leader.serve(*stream)))

    async with await asyncio.start_unix_server(serve, socket):
        polling = asyncio.create_task(leader.poll())
        yield connect_client
        polling.cancel()
        for client in clients:
            client.close()
        await asyncio.gather(*served)


def at_row(path: Path, number: int, epoch: int = TERM) -> Follow:
    return Follow(image_of(path), number, epoch)


@pytest.mark.parametrize(
    ("nodes", "followers", "has_majority", "expected"),
    [
        (2, 0, True, False),
        (2, 1, True, True),
        (4, 1, True, True),
        (5, 1, True, False),
        (5, 2, True, True),
        (2, 1, False, False),
    ],
)
def test_enough_followers_acknowledge(
    path: Path,
    nodes: int,
    followers: int,
    has_majority: bool,  # noqa: FBT001
    expected: bool,  # noqa: FBT001
) -> None:
    leading(path.parent, nodes=nodes, has_majority=has_majority)

    async def play(database: Database) -> bool:
        async with serving(path) as connect_client:
            clients = [await connect_client() for _ in range(followers)]
            for client in clients:
                client.send(at_row(path, 1))
            submit(Jobs(database), "a")
            for client in clients:
                assert await client.receive() == outbox(path)[1]
                client.send(Acknowledge(2))
            return await database.acknowledge()

    with closing(open_leading(path)) as database:
        assert asyncio.run(play(database)) is expected


def test_a_silent_follower_is_waited_for_once(database: Database, path: Path) -> None:
    async def play() -> None:
        async with serving(path) as connect_client:
            client = await connect_client()
            client.send(at_row(path, 1))
            for number in (2, 3):
                submit(Jobs(database), f"job-{number}")
                assert not await database.acknowledge()
            client.send(Acknowledge(2))
            assert not await database.acknowledge()
            client.send(Acknowledge(3))
            assert [await client.receive() for _ in range(2)] == outbox(path, after=1)
            while not await database.acknowledge():
                pass

    asyncio.run(play())


@pytest.mark.parametrize(
    "at",
    [
        pytest.param(lambda path: at_row(path, 2, epoch=7), id="diverged"),
        pytest.param(lambda path: at_row(path, 9), id="ahead"),
        pytest.param(lambda path: at_row(path, 0), id="behind"),
        pytest.param(lambda _: Follow("f00d", 2, 1), id="another image"),
    ],
)
def test_what_cannot_be_continued_gets_an_image(
    database: Database, path: Path, at: Callable[[Path], Follow]
) -> None:
    submit(Jobs(database), "a")

    async def play() -> None:
        async with serving(path) as connect_client:
            client = await connect_client()
            client.send(at(path))
            image = await client.receive()
            assert isinstance(image, Image)
            data = b""
            while len(data) < image.size_bytes:
                data += (await client.receive()).content
            assert sha256(data).hexdigest() == image.sha256
            client.send(at_row(path, 2))
            submit(Jobs(database), "b")
            assert await client.receive() == outbox(path)[-1]

    asyncio.run(play())


def test_paths_are_those_of_the_node_that_leads(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/anna")
    spec = JobSpec(working_dir="/home/anna/work", command=("/home/anna/run", "/home/annabel"))
    assert submit(Jobs(database), "a", spec=spec).spec == spec
    monkeypatch.setenv("HOME", "/home/ben")
    moved = Jobs(database).get(JobId("a")).spec
    assert moved.working_dir == "/home/ben/work"
    assert moved.command == ("/home/ben/run", "/home/annabel")


def test_rows_behind_a_gap_are_not_sent(database: Database, path: Path) -> None:
    del database
    with closing(connect(path)) as connection, connection:
        connection.execute("BEGIN")
        for number in range(2, KEPT_ROWS + 6):
            store(connection.execute, Row(number, TERM, False, EMPTY))  # noqa: FBT003  of a table

    async def play() -> ToOthers:
        async with serving(path) as connect_client:
            client = await connect_client()
            client.send(at_row(path, 1))  # the newest with a majority
            return await client.receive()

    assert isinstance(asyncio.run(play()), Image)


def test_an_unreadable_file_of_members_acknowledges_nothing(path: Path) -> None:
    path.with_name("nodes.json").write_text("torn")
    with closing(open_leading(path)) as database:
        submit(Jobs(database), "a")
        assert not asyncio.run(database.acknowledge())
