"""Whether a coordinator is there, by its process or by its beat."""

from dataclasses import replace

from api.liveness import CoordinatorWatch
from muster.contracts.process import ProcessRecord
from muster.processes import myself
from store.leases import LEASE_SECONDS
from store.records import Lease

HERE = Lease(
    name="coordinator", epoch=1, beat=0, owner="me", process=myself(), address="127.0.0.1:1"
)
ELSEWHERE = replace(
    HERE, process=ProcessRecord(pid=1, start_ticks=1, boot_id="other", node="elsewhere")
)


class World:
    """A lease that moves and a clock that does as it is told."""

    def __init__(self, lease: Lease | None) -> None:
        self.lease = lease
        self.seconds = 0.0
        self.watch = CoordinatorWatch(lambda: self.lease, lambda: self.seconds)


def test_without_a_lease_there_is_none() -> None:
    assert "make up" in str(World(None).watch.absence())


def test_a_living_process_of_this_host_is_there_at_once() -> None:
    assert World(HERE).watch.absence() is None


def test_a_dead_process_of_this_host_is_not_whatever_its_beat() -> None:
    dead = replace(HERE, process=replace(HERE.process, start_ticks=1))
    world = World(dead)
    assert world.watch.absence() is not None
    world.lease = replace(dead, beat=1)
    assert world.watch.absence() is not None


def test_another_hosts_coordinator_is_there_while_its_beat_moves() -> None:
    world = World(ELSEWHERE)
    assert world.watch.absence() is not None
    world.lease = replace(ELSEWHERE, beat=1)
    assert world.watch.absence() is None
    world.seconds = LEASE_SECONDS
    assert world.watch.absence() is not None
