"""A requested fault is passed on once, with an event that has its time."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest

from coordinator.agents.lifecycle import AgentLifecycle
from coordinator.agents.requests import Executor
from coordinator.agents.server import AgentServer
from coordinator.jobs import JobTable
from coordinator.persistence import Attachment, Moment
from coordinator.tracked_job import TrackedJob
from database.engine import Database
from database.jobs import Jobs
from muster.cluster.description import cluster_of_service
from muster.contracts.messages.agent import CoordinatorMessage, InjectFault
from muster.contracts.settings.paths import DataDir
from muster.contracts.views.history import FaultView, StruckProcess
from tests.support.database_samples import NOON, submit
from tests.support.stories import queued_job

FAULT = FaultView(
    number=0,
    fault="stop",
    host="b",
    agent=7,
    processes=[StruckProcess(rank=1, attempt=4, pid=9)],
)


def test_a_fault_is_taken_once_and_by_no_successor(tmp_path: Path) -> None:
    database = Database.open(f"sqlite:///{tmp_path}/muster.db")
    jobs = Jobs(database)
    job = submit(jobs, "a")

    def read(table: JobTable) -> list[int]:
        asyncio.run(table.read_changes(Moment(monotonic=0.0, wall=NOON)))
        return [it.number for it in table.tracked[job.uid].faults]

    cluster = cluster_of_service(None, "n-0123456789ab", slots=2)
    table = JobTable(database, DataDir(tmp_path), cluster=cluster, node="n-0123456789ab")
    assert read(table) == []
    for _ in range(2):
        jobs.request_fault(job, FAULT)
    assert read(table) == [1, 2]
    jobs.set_pause(job.job_id, paused=True)
    assert read(table) == [1, 2]
    successor = JobTable(database, DataDir(tmp_path), cluster=cluster, node="n-0123456789ab")
    assert read(successor) == []
    database.close()


@dataclass
class Agents:
    is_connected: bool
    sent: list[tuple[str, str, CoordinatorMessage]] = field(default_factory=list)

    def send(self, uid: str, host: str, message: CoordinatorMessage) -> bool:
        self.sent.append((uid, host, message))
        return self.is_connected


@pytest.mark.parametrize(
    ("is_connected", "kind", "message"),
    [
        (True, "fault_injected", "SIGSTOP was sent to pid 9 of rank 1"),
        (
            False,
            "fault_dropped",
            "SIGSTOP was not sent to pid 9 of rank 1: the agent on b is not connected",
        ),
    ],
)
def test_an_event_tells_whether_a_fault_was_passed_on(
    is_connected: bool,  # noqa: FBT001  a table's column
    kind: str,
    message: str,
) -> None:
    job = TrackedJob(
        snapshot=queued_job(("a", "b"), world_size=2), attachment=Attachment(started_at=None)
    )
    job.faults = [FAULT]
    agents = Agents(is_connected)
    executor = Executor(cast("AgentLifecycle", None), addresses={})
    executor.agents = cast("AgentServer", agents)
    for _ in range(2):
        executor.inject_faults(job)
    request = InjectFault(signal=19, attempts=((1, 4),), agent=7)
    assert agents.sent == [(job.snapshot.uid, "b", request)]
    (event,) = job.events
    assert (event.kind, event.rank, event.attempt, event.message) == (kind, 1, 4, message)
