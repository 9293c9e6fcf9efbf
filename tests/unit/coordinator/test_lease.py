import asyncio
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import pytest

from coordinator.lease import LeaseCandidate, wait_for_end
from database.errors import DatabaseUnavailable, LeaseLost
from database.leases import LEASE_SECONDS
from database.records import Lease
from muster.cluster.members import term_of
from muster.contracts.rank import ProcessRecord
from muster.host.processes import identify

HOLDER = ProcessRecord(pid=1, start_ticks=1, boot_id="boot", node="there", pid_namespace=1)
OURSELVES = ProcessRecord(pid=2, start_ticks=2, boot_id="boot", node="here", pid_namespace=1)
LEASE = Lease(name="coordinator", epoch=3, beat=7, owner="first", process=HOLDER, address="")


@dataclass
class Leases:
    """A lease as candidates see it; a rival is faster `rivals` times."""

    held: Lease | None = None
    rivals: int = 0
    before_looks: list[Callable[[], None]] = field(default_factory=list)
    """Called at the next looks, one each."""
    asked: list[Lease | None] = field(default_factory=list)

    def current(self) -> Lease | None:
        if self.before_looks:
            self.before_looks.pop(0)()
        return self.held

    def are_released(self) -> None:
        self.held = None

    def take(
        self,
        owner: str,
        process: ProcessRecord,
        address: str,
        *,
        displacing: Lease | None,
        least_epoch: int,
    ) -> Lease:
        self.asked.append(displacing)
        if self.rivals:
            self.rivals -= 1
            raise LeaseLost("coordinator", 0)
        epoch, name = max(4, least_epoch), "coordinator"
        return Lease(name=name, epoch=epoch, beat=0, owner=owner, process=process, address=address)


@dataclass
class Watch:
    """A candidate with its clock; `gone` says whether the holder's process is gone."""

    leases: Leases = field(default_factory=Leases)
    now: float = 100.0
    gone: bool = False

    def __post_init__(self) -> None:
        self.candidate = LeaseCandidate(
            leases=self.leases,
            owner="second",
            process=OURSELVES,
            address="127.0.0.1:1",
            is_gone=lambda _: self.gone,
            clock=lambda: self.now,
        )

    def may_replace(self, holder: Lease = LEASE, *, after_seconds: float = 0.0) -> bool:
        self.now += after_seconds
        return self.candidate.may_replace(holder)

    def wins(self) -> Lease:
        return asyncio.run(self.candidate.win())


def test_a_free_lease_is_taken() -> None:
    watch = Watch()
    lease = watch.wins()
    assert (lease.owner, lease.process) == ("second", OURSELVES)
    assert watch.leases.asked == [None]


def test_a_dead_holder_is_replaced_at_once() -> None:
    watch = Watch(Leases(held=LEASE), gone=True)
    watch.wins()
    assert watch.leases.asked == [LEASE], "the lease that was seen"


def test_the_slower_candidate_looks_again() -> None:
    watch = Watch(Leases(rivals=2))
    watch.wins()
    assert watch.leases.asked == [None] * 3


def test_a_holder_that_renews_stays() -> None:
    watch = Watch()
    for beat in range(20):
        assert not watch.may_replace(replace(LEASE, beat=beat), after_seconds=LEASE_SECONDS - 0.1)


def test_a_lease_expires_without_renewal() -> None:
    watch = Watch()
    assert not watch.may_replace()
    assert not watch.may_replace(after_seconds=LEASE_SECONDS - 0.1)
    assert watch.may_replace(after_seconds=0.1)


def test_time_before_the_first_look_does_not_count() -> None:
    assert not Watch(now=1e9).may_replace()


def test_a_new_holder_gets_the_full_lease() -> None:
    watch = Watch()
    watch.may_replace()
    assert not watch.may_replace(replace(LEASE, epoch=4), after_seconds=LEASE_SECONDS)


@pytest.fixture
def holder() -> Iterator[subprocess.Popen[bytes]]:
    """A process of this machine that sleeps."""
    with subprocess.Popen(["sleep", "60"]) as process:  # noqa: S607
        yield process
        process.kill()


def record_of(holder: subprocess.Popen[bytes]) -> ProcessRecord:
    record = identify(holder.pid)
    assert record is not None
    return record


def test_the_end_of_a_local_holder_wakes_the_candidate(
    holder: subprocess.Popen[bytes],
) -> None:
    async def waits_and_kills() -> None:
        waiting = asyncio.ensure_future(wait_for_end(record_of(holder), 3600.0))
        await asyncio.sleep(0)
        holder.kill()
        await asyncio.wait_for(waiting, 20)

    asyncio.run(waits_and_kills())


def test_a_remote_holder_is_polled() -> None:
    before = time.monotonic()
    asyncio.run(wait_for_end(HOLDER, 0.01))
    asyncio.run(wait_for_end(replace(HOLDER, pid=2**22 + 1), 0.01))
    assert time.monotonic() - before >= 0.02


def test_our_own_unconfirmed_lease_is_taken_again() -> None:
    watch = Watch(Leases(held=replace(LEASE, owner="second")))
    watch.wins()
    assert watch.leases.asked == [watch.leases.held]


@pytest.mark.slow
def test_a_candidate_waits_for_a_database_that_is_away() -> None:
    watch = Watch(Leases(before_looks=[away, away]))
    assert watch.wins().owner == "second"


@pytest.mark.slow
def test_an_outage_does_not_count_against_the_holder() -> None:
    watch = Watch(Leases(held=LEASE))

    def takes_long() -> None:
        watch.now += LEASE_SECONDS

    def is_away_for_long() -> None:
        takes_long()
        away()

    released = watch.leases.are_released
    watch.leases.before_looks = [takes_long, takes_long, is_away_for_long, released]
    watch.wins()
    assert watch.leases.asked == [None], "it was not replaced before it released the lease"


def away() -> None:
    raise DatabaseUnavailable("away")


def test_no_two_elected_nodes_have_one_epoch() -> None:
    first = term_of(3, "n-1")
    assert term_of(2, "n-2") + 0xFFFF < first < term_of(4, "n-2")
    assert abs(term_of(3, "n-2") - first) > 0xFFFF - 1
    assert term_of(0, "n-1") == 0, "without a household"
    watch = Watch(Leases(held=LEASE), gone=True)
    watch.candidate.first_epoch = first
    assert watch.wins().epoch == first
    assert watch.candidate.displaced == LEASE
