"""Databases for tests: each test of `database` runs on SQLite and on PostgreSQL."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from sqlalchemy import delete

from database.engine import Database
from database.jobs import Jobs
from database.tables import METADATA
from tests.support.database_samples import SteppingClock
from tests.support.postgres_server import PostgresServer, running_server


@pytest.fixture(scope="session")
def migrated_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database file with tables; copying it is faster than a migration."""
    path = tmp_path_factory.mktemp("database") / "template.db"
    Database.open(f"sqlite:///{path}").close()
    return path


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    with running_server() as server:
        yield server


@pytest.fixture(scope="session")
def migrated_postgres(postgres: PostgresServer) -> Iterator[str]:
    """A database with tables; emptying them is faster than a migration."""
    with postgres.database(f"muster_{uuid4().hex}") as url:
        Database.open(url).close()
        yield url


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """The URL of a file that does not exist yet."""
    return f"sqlite:///{tmp_path}/muster.db"


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def fresh_url(request: pytest.FixtureRequest, sqlite_url: str) -> Iterator[str]:
    """A database without tables."""
    if request.param == "sqlite":
        yield sqlite_url
        return
    server: PostgresServer = request.getfixturevalue("postgres")
    with server.database(f"fresh_{uuid4().hex}") as url:
        yield url


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A database with empty tables."""
    if request.param == "sqlite":
        path = tmp_path / "muster.db"
        shutil.copy(request.getfixturevalue("migrated_file"), path)
        yield f"sqlite:///{path}"
        return
    postgres_url: str = request.getfixturevalue("migrated_postgres")
    _empty(postgres_url)
    yield postgres_url


@pytest.fixture
def database(url: str) -> Iterator[Database]:
    opened = Database.open(url)
    yield opened
    opened.close()


@pytest.fixture
def clock() -> SteppingClock:
    return SteppingClock()


@pytest.fixture
def jobs(database: Database, clock: SteppingClock) -> Jobs:
    return Jobs(database, clock)


def _empty(url: str) -> None:
    database = Database.open(url)
    with database.writing() as connection:
        for table in reversed(METADATA.sorted_tables):
            connection.execute(delete(table))
    database.close()
