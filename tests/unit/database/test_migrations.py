"""A migrated database keeps its rows, and processes of the earlier release can still write."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Connection, create_engine, make_url, text

from database import schema
from database.engine import Database
from database.history import History
from database.idempotency import Answers
from database.jobs import Jobs
from database.tables import METADATA, UtcTime
from muster.contracts.agent import LOCAL_HOST
from muster.contracts.job import JobId, JobStatus, StopRequest
from tests.support.database_samples import NOON, idempotency_key, worker

NOON_MICROSECONDS = UtcTime().process_bind_param(NOON, None)

TABLES_OF_0001 = Path(__file__).with_name("first_release.sql").read_text()
TYPES = {
    "sqlite": {"number": "DOUBLE", "event_id": "INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT"},
    "postgresql": {"number": "DOUBLE PRECISION", "event_id": "BIGSERIAL NOT NULL PRIMARY KEY"},
}
JOB_OF_0001 = text(
    "INSERT INTO jobs (job_id, uid, spec, status, message, created_at, updated_at, stop_request,"
    " generation, version) VALUES (:id, :id, :spec, 'RUNNING', 'höst', :noon, :noon, 'graceful',"
    " 3, 7)"
)
RANK_OF_0001 = text(
    "INSERT INTO workers (job_id, rank, incarnation, state, restarts, failures, finished, step,"
    " epoch, shard_idx, line_idx, loss, metrics, throughput_steps_per_sec, checkpoints_saved,"
    " last_checkpoint_step)"
    " VALUES (:id, 0, 2, 'live', 1, 0, false, 11, 2, 3, 4, 0.5, '{\"accuracy\": 0.75}', 0.0, 2, 10)"
)
PROGRESS = {
    "step": 11,
    "epoch": 2,
    "shard_idx": 3,
    "line_idx": 4,
    "loss": 0.5,
    "metrics": {"accuracy": 0.75},
    "last_checkpoint_step": 10,
}
EVENT_OF_0001 = text(
    "INSERT INTO events (job_id, at, kind, message)"
    " VALUES (:id, :noon, 'submitted', 'the job was submitted')"
)
ANSWER_OF_0001 = text(
    "INSERT INTO answers (principal, key, request_sha256, job, created_at)"
    " VALUES ('ada', :id, 'body', :job, :noon)"
)
JOB_ANSWERED = """{"job_id": "old", "uid": "old", "spec": {"world_size": 2}, "status": "QUEUED",
 "reason": null, "message": null, "created_at": "2026-03-01T12:00:00Z",
 "updated_at": "2026-03-01T12:00:00Z", "started_at": null, "finished_at": null, "exit_code": null,
 "stop_request": null, "stop_grace_seconds": null, "generation": 0, "agent": null,
 "agent_token_sha256": null, "version": 1}"""
SPEC_OF_0001 = '{"mode": "independent", "world_size": 2, "batch_size": 16, "seed": 5}'


def write_as_0001(connection: Connection, job_id: str, *, has_rank: bool = True) -> None:
    values = {
        "id": job_id,
        "spec": SPEC_OF_0001,
        "job": JOB_ANSWERED,
        "noon": NOON_MICROSECONDS,
    }
    ranks = [RANK_OF_0001] if has_rank else []
    for statement in (JOB_OF_0001, *ranks, EVENT_OF_0001, ANSWER_OF_0001):
        connection.execute(statement, values)


@contextmanager
def migrating(address: str) -> Iterator[tuple[Connection, Config]]:
    """A transaction that Alembic may work in."""
    url = make_url(address)
    driver = "postgresql+psycopg" if url.drivername.startswith("postgresql") else "sqlite"
    engine = create_engine(url.set(drivername=driver))
    try:
        with engine.begin() as connection:
            config = schema.alembic_config()
            config.attributes["connection"] = connection
            yield connection, config
    finally:
        engine.dispose()


@pytest.fixture
def old_url(fresh_url: str) -> str:
    """A database as revision 0001 left it, with a job."""
    with migrating(fresh_url) as (connection, config):
        tables = TABLES_OF_0001.format(**TYPES[connection.dialect.name])
        for statement in tables.split(";\n")[:-1]:
            connection.exec_driver_sql(statement)
        command.stamp(config, "0001")
        write_as_0001(connection, "old")
    return fresh_url


@pytest.fixture
def migrated(old_url: str) -> Iterator[Database]:
    database = Database.open(old_url)
    yield database
    database.close()


def test_tables_and_migrations_agree(migrated: Database) -> None:
    with migrated.reading() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, METADATA) == []


def test_rows_of_the_first_release_are_kept(migrated: Database) -> None:
    job = Jobs(migrated).get(JobId("old"))
    assert (job.status, job.stop_request) == (JobStatus.RUNNING, StopRequest.GRACEFUL)
    assert (job.created_at, job.message, job.version) == (NOON, "höst", 7)
    (agent,) = History(migrated).agents_by_job([job.job_id])[job.job_id]
    assert (agent.host, agent.generation, agent.process) == (LOCAL_HOST, 3, None)
    assert (job.spec.world_size, job.spec.seed, job.spec.effective_batch_size) == (2, 5, 16)
    assert (job.wanted_world_size, job.world_size, job.pause_request) == (None, 2, False)
    assert job.wanted_hosts == {}
    ranks = History(migrated).ranks(job.job_id)
    row = {"host": LOCAL_HOST, "attempt": 2, "process": None, "restarts": 1, "checkpoints_saved": 2}
    assert ranks == [worker(0, **row, **PROGRESS)]
    assert [event.kind for event in History(migrated).events(job.job_id, 9)] == ["submitted"]
    assert History(migrated).members_by_job([job.job_id]) == {job.job_id: []}
    assert History(migrated).attempts(job.job_id, 9, None) == []


def test_a_response_of_the_first_release_is_repeated(migrated: Database) -> None:
    answered = Answers(migrated, lambda: NOON).find(idempotency_key("old"))
    assert answered is not None
    assert (answered.job_id, answered.world_size, answered.pause_request) == ("old", 2, False)


def test_the_transport_of_a_worker_moves_to_a_column_of_its_own(old_url: str) -> None:
    with migrating(old_url) as (connection, config):
        command.upgrade(config, "0010")
        connection.execute(
            text(
                "INSERT INTO members (job_id, worker_id, rank, attempt, state, gpu_count, backend,"
                " joined_at) VALUES ('old', 0, 0, 0, 'active', 0, 'tcp', :noon)"
            ),
            {"noon": NOON_MICROSECONDS},
        )
    with closing(Database.open(old_url)) as database:
        (found,) = History(database).members_by_job([JobId("old")])["old"]
    assert (found.backend, found.transport, found.gpu_count) == (None, "tcp", 0)


@pytest.mark.slow
def test_each_revision_takes_rows_of_the_first(old_url: str) -> None:
    revisions = ["0001", "0002", "0003", "0004", "0005", "0006", "0007", "0008", "0009"]
    for revision in revisions:
        with migrating(old_url) as (connection, config):
            command.upgrade(config, revision)
            write_as_0001(connection, f"of-{revision}", has_rank=revision < "0006")
    with closing(Database.open(old_url)) as database:
        ids = {job.job_id for job in Jobs(database).unfinished()}
        ranks = History(database).ranks_by_job([JobId("old"), JobId("of-0005")])
    assert ids == {"old", *(f"of-{revision}" for revision in revisions)}
    assert ranks["old"] == ranks["of-0005"]
    assert ranks["old"][0].progress.metrics == PROGRESS["metrics"]
