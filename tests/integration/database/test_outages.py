"""A PostgreSQL server that dies or closes connections: clear errors, and nothing lost."""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from database.engine import Database
from database.errors import CommitInDoubt, DatabaseUnavailable
from database.jobs import Jobs
from database.postgres import SILENCE_SECONDS, PostgresBackend
from tests.support.database_samples import submit
from tests.support.installation import DEADLINE_SECONDS
from tests.support.postgres_server import FragilePostgres, fragile_postgres, tcp_server, ways

pytestmark = pytest.mark.postgres

BRIEF_SECONDS = 4.0
"""A transaction of this process that stands still for longer is ended by the server."""


@pytest.fixture(scope="module")
def server() -> Iterator[FragilePostgres]:
    with fragile_postgres() as running:
        # On a busy machine a migration takes longer than the brief waits below.
        Database.open(running.url).close()
        yield running


@pytest.fixture
def database(server: FragilePostgres) -> Iterator[Database]:
    opened = Database.open(server.url, busy_timeout_seconds=BRIEF_SECONDS)
    yield opened
    opened.close()


def test_a_killed_server_is_unavailable_until_it_is_back(
    server: FragilePostgres, database: Database
) -> None:
    job = submit(Jobs(database), "killed")
    server.kill()
    for _ in range(2):
        with pytest.raises(DatabaseUnavailable, match="check the server and try again"):
            Jobs(database).get(job.job_id)
    server.heal()
    assert Jobs(database).get(job.job_id) == job


def test_commits_are_noticed_again_after_a_cut(server: FragilePostgres, database: Database) -> None:
    notified = threading.Semaphore(0)
    database.listen(notified.release)
    assert notified.acquire(timeout=DEADLINE_SECONDS)
    before = database.changes()
    server.cut()
    assert notified.acquire(timeout=DEADLINE_SECONDS), "some commits may have been missed"
    assert database.changes() != before
    submit(Jobs(database), "after-the-cut")
    assert notified.acquire(timeout=SILENCE_SECONDS)


def test_a_server_that_takes_no_writes_is_unavailable(
    server: FragilePostgres, database: Database
) -> None:
    job = submit(Jobs(database), "kept")
    with ways(server)["read-only"]():
        for _ in range(2):
            with pytest.raises(DatabaseUnavailable, match="takes no writes") as refused:
                submit(Jobs(database), "refused")
            assert not isinstance(refused.value, CommitInDoubt)
        assert Jobs(database).get(job.job_id) == job
    submit(Jobs(database), "taken")


def test_a_lost_host_is_noticed_within_ten_seconds() -> None:
    with tcp_server() as remote, closing(PostgresBackend(remote.admin, BRIEF_SECONDS)) as backend:
        connection: Any = backend.engine.raw_connection()
        with socket.socket(fileno=os.dup(connection.fileno())) as found:

            def option(name: int) -> int:
                return found.getsockopt(socket.IPPROTO_TCP, name)

            assert 0 < option(socket.TCP_USER_TIMEOUT) <= 10_000
            probes_seconds = option(socket.TCP_KEEPINTVL) * option(socket.TCP_KEEPCNT)
            assert option(socket.TCP_KEEPIDLE) + probes_seconds <= 10
            assert found.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        connection.close()


def test_closed_connections_cost_no_request(server: FragilePostgres, database: Database) -> None:
    job = submit(Jobs(database), "cut")
    server.cut()
    assert Jobs(database).get(job.job_id) == job
    server.cut()
    submit(Jobs(database), "cut-2")
    with pytest.raises(CommitInDoubt, match="cannot be used now"), database.writing():
        server.cut()
    submit(Jobs(database), "cut-3")
