"""A PostgreSQL server that dies, freezes or closes connections: clear errors and bounded waits."""

import threading
from collections.abc import Iterator

import pytest
from sqlalchemy import make_url
from sqlalchemy.exc import OperationalError

from database.engine import Database
from database.errors import CommitInDoubt, DatabaseUnavailable
from database.jobs import Jobs
from database.postgres import SILENCE_SECONDS, PostgresBackend
from tests.support.database_samples import submit
from tests.support.installation import DEADLINE_SECONDS
from tests.support.postgres_server import FragilePostgres, fragile_postgres

pytestmark = pytest.mark.postgres

BRIEF_SECONDS = 1.0


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
    heard = threading.Semaphore(0)
    database.listen(heard.release)
    assert heard.acquire(timeout=DEADLINE_SECONDS)
    before = database.changes()
    server.cut()
    assert heard.acquire(timeout=DEADLINE_SECONDS), "some commits may have been missed"
    assert database.changes() != before
    submit(Jobs(database), "after-the-cut")
    assert heard.acquire(timeout=SILENCE_SECONDS)


def test_a_frozen_server_is_given_up_and_found_again(
    server: FragilePostgres, database: Database
) -> None:
    job = submit(Jobs(database), "stopped")
    server.stop()
    with pytest.raises(DatabaseUnavailable, match="cannot be used now"):
        database.check()
    with pytest.raises(DatabaseUnavailable) as caught:
        submit(Jobs(database), "never")
    assert not isinstance(caught.value, CommitInDoubt)
    server.heal()
    assert Jobs(database).get(job.job_id) == job
    assert Jobs(database).find("never") is None


def test_a_transaction_in_a_frozen_server_ends(server: FragilePostgres, database: Database) -> None:
    with pytest.raises(DatabaseUnavailable, match="has not answered"), database.writing():
        server.stop()
    server.heal()
    database.check()
    submit(Jobs(database), "next")


def test_a_migration_may_take_longer(
    server: FragilePostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("database.postgres.SLACK_SECONDS", 0.0)
    url = make_url(server.url).set(drivername="postgresql+psycopg")
    backend = PostgresBackend(url, BRIEF_SECONDS)
    takes_long = f"SELECT pg_sleep({3 * BRIEF_SECONDS})"
    with backend.migrating() as connection:
        connection.exec_driver_sql(takes_long)
    with pytest.raises(OperationalError, match="has not answered"), backend.engine.begin() as usual:
        usual.exec_driver_sql(takes_long)
    backend.close()


def test_closed_connections_cost_no_request(server: FragilePostgres, database: Database) -> None:
    job = submit(Jobs(database), "cut")
    server.cut()
    assert Jobs(database).get(job.job_id) == job
    server.cut()
    submit(Jobs(database), "cut-2")
    with pytest.raises(CommitInDoubt, match="cannot be used now"), database.writing():
        server.cut()
    submit(Jobs(database), "cut-3")
