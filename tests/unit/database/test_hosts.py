"""What hosts have said about themselves: kept, renewed, and fenced by the lease."""

from dataclasses import replace

import pytest

from database.engine import Database
from database.errors import LeaseLost
from database.hosts import Hosts
from database.leases import Leases
from database.records import HostRecord, Lease
from muster.contracts.views.service import EngineJob, EngineSweep
from tests.support.database_samples import FACTS, NOON, PROCESS

SAID = HostRecord(host="box", facts=FACTS, seen_at=NOON)


@pytest.fixture
def lease(database: Database) -> Lease:
    return Leases(database).take("me", PROCESS, "", displacing=None)


def test_the_last_answer_of_a_host_is_kept(database: Database, lease: Lease) -> None:
    hosts = Hosts(database)
    hosts.write(SAID, lease)
    silent = replace(SAID, problem="no route to host")
    hosts.write(silent, lease)
    assert hosts.all() == {"box": silent}


def test_a_displaced_coordinator_writes_no_answer(database: Database, lease: Lease) -> None:
    Leases(database).take("other", PROCESS, "", displacing=lease)
    with pytest.raises(LeaseLost):
        Hosts(database).write(SAID, lease)
    assert Hosts(database).all() == {}


def test_a_sweep_is_due_until_it_is_answered(database: Database, lease: Lease) -> None:
    hosts, left = Hosts(database), EngineJob(name="n", state="runs", job_id=None)
    hosts.write(replace(SAID, host="engine:slurm"), lease)
    assert [hosts.request_sweep("engine:slurm", [it]).number for it in "ab"] == [1, 2]
    asked = hosts.find("engine:slurm")
    assert (asked.is_sweep_due, asked.facts) == (True, FACTS)
    done = EngineSweep(number=2, cancel=["a", "b"], leftovers=[left])
    hosts.write(replace(SAID, host="engine:slurm", sweep=done), lease)
    found = hosts.find("engine:slurm")
    assert (found.is_sweep_due, found.sweep, found.sweep_request) == (
        False,
        done,
        EngineSweep(number=2, cancel=["a", "b"]),
    )
