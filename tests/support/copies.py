"""Copies of a database: the one that leads, what writes it, and how both are compared."""

import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from database.engine import Database
from database.errors import DatabaseError
from database.fenced_writer import FencedWriter
from database.history import History
from database.hosts import Hosts
from database.jobs import Jobs
from database.leases import Leases
from database.records import Event
from database.replication.copy import connect
from database.replication.messages import Row
from database.replication.outbox import Replication
from database.tokens import Tokens
from muster.cluster.members import MemberNode, Members, write_members
from muster.contracts.errors import IllegalMove
from muster.contracts.job.status import JobId, JobStatus, StopRequest
from muster.contracts.token import Scope
from tests.support.database_samples import (
    NOON,
    attempt,
    commit,
    epoch,
    member,
    points,
    submit,
    take_lease,
    worker,
    write_of,
)


def leading(directory: Path, *, epoch: int = 1, has_majority: bool = True, nodes: int = 2) -> Path:
    """Write the file of members of a leader, and return it."""
    each = {"name": "a", "slots": 1, "cores": 1, "ram_mb": 1, "address": None}
    members = tuple(MemberNode(node_id=str(number), **each) for number in range(nodes))
    file = directory / "nodes.json"
    write_members(
        file, Members(nodes=members, epoch=epoch, has_majority=has_majority, has_copies=True)
    )
    return file


def open_leading(path: Path) -> Database:
    """Open the database of a leader whose members are in a file beside it."""
    files = path.with_name("nodes.json"), path.with_name("replication.sock")
    return Database.open(path, replication=Replication(*files))


def back_up(path: Path, copy: Path) -> None:
    with closing(connect(path)) as source, closing(sqlite3.connect(copy)) as target:
        source.backup(target)


def outbox(path: Path, after: int = 0) -> list[Row]:
    with closing(connect(path)) as connection:
        rows = connection.execute("SELECT * FROM outbox WHERE number > ?", (after,)).fetchall()
    return [Row(number, epoch, bool(majority), done) for number, epoch, majority, done in rows]


def content(path: Path) -> dict[str, list[tuple[Any, ...]]]:
    """Return the rows of all tables but the lease, which does not travel."""
    with closing(connect(path)) as connection:
        tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        return {
            name: connection.execute(f"SELECT * FROM {name} ORDER BY 1, 2").fetchall()  # noqa: S608
            if name not in {"image", "alembic_version", "sqlite_sequence"}
            else sorted(connection.execute(f"SELECT * FROM {name}").fetchall())  # noqa: S608
            for (name,) in tables.fetchall()
            if name != "leases"
        }


class Writers:
    """Everything that writes to one database, by the names of `WRITES`."""

    def __init__(self, database: Database) -> None:
        self.jobs = Jobs(database)
        self.history = History(database)
        self.hosts = Hosts(database)
        self.tokens = Tokens(database)
        self.leases = Leases(database)
        self.lease = take_lease(database)
        self.writer = FencedWriter(database, self.lease)

    def write(self, what: str, number: int) -> None:
        """Write something about job `number`; what the database refuses leaves no trace."""
        with suppress(DatabaseError, IllegalMove):
            WRITES[what](self, JobId(f"job-{number}"), number)

    def commit(self, job_id: JobId, **new: object) -> None:
        self.writer.commit([write_of(self.jobs.get(job_id), **new)])

    def commit_all(self, job_id: JobId, number: int) -> None:
        """Write rows of every kind, as a coordinator does."""
        self.commit(
            job_id,
            ranks=[worker(0, loss=0.1), worker(1)],
            attempts=[attempt(0, number), attempt(1, number)],
            members=[member(1)],
            commits=[commit(step) for step in range(3)],
            epochs=[epoch(number)],
            series=points(*[0.5] * 40, second=40 * number),
            series_due=frozenset({"loss"}),
            events=[Event(at=NOON, kind="x", message=text) for text in (f"é{number}", "")],
        )

    def delete(self, job_id: JobId) -> None:
        self.jobs.delete(job_id, self.jobs.get(job_id).uid)


WRITES: dict[str, Callable[[Writers, JobId, int], object]] = {
    "submit": lambda to, job_id, _: submit(to.jobs, job_id, uid=f"{job_id}", key=f"k{job_id}"),
    "commit": Writers.commit_all,
    "beat": lambda to, _, __: to.writer.commit([]),
    "start": lambda to, job_id, _: to.commit(job_id, status=JobStatus.STARTING),
    "fail": lambda to, job_id, _: to.commit(job_id, status=JobStatus.FAILED),
    "stop": lambda to, job_id, _: to.jobs.request_stop(job_id, StopRequest.GRACEFUL, None),
    "pause": lambda to, job_id, n: to.jobs.set_pause(job_id, paused=n % 2 == 0),
    "save": lambda to, job_id, _: to.jobs.request_checkpoint(job_id),
    "join": lambda to, job_id, _: to.history.request_join(job_id, "h", "one more"),
    "leave": lambda to, job_id, _: to.history.request_departure(job_id, 1),
    "delete": lambda to, job_id, _: to.delete(job_id),
    "sweep": lambda to, _, n: to.hosts.request_sweep("slurm", [f"m{n}"]),
    "token": lambda to, _, n: to.tokens.create(
        f"t{n}", Scope.READ, lifetime=timedelta(days=n), created_by=None
    ),
    "revoke": lambda to, _, n: to.tokens.revoke(f"t{n}"),
}
