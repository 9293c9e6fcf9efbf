"""A fresh database of each kind."""

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from tests.support.postgres_server import PostgresServer, running_server


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    with running_server() as server:
        yield server


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def fresh_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/muster.db"
        return
    server: PostgresServer = request.getfixturevalue("postgres")
    with server.database(f"fresh_{uuid4().hex}") as url:
        yield url
