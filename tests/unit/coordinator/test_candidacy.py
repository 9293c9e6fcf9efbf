import asyncio
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest

from coordinator.candidacy import Candidate, end_of
from muster.contracts.process import ProcessRecord
from muster.processes import identify, is_stopped
from store.errors import LeaseLost, StoreUnavailable
from store.leases import LEASE_SECONDS
from store.records import Lease

HOLDER = ProcessRecord(pid=1, start_ticks=1, boot_id="boot", node="there")
OURSELVES = ProcessRecord(pid=2, start_ticks=2, boot_id="boot", node="here")
LEASE = Lease(name="coordinator", epoch=3, beat=7, owner="first", process=HOLDER, address="")


@dataclass
class Leases:
    """A lease as others see it; `rivals` are faster so many times."""

    held: Lease | None = None
    rivals: int = 0
    blocked_by: ProcessRecord | None = None
    """Who stands still in the middle of a transaction, after the first look."""
    looks: int = 0
    asked: list[Lease | None] = field(default_factory=list)

    def current(self, _name: str) -> Lease | None:
        self.looks += 1
        if self.blocked_by is not None and self.looks > 1:
            if self.looks == 2 or is_stopped(self.blocked_by):
                raise StoreUnavailable("the database is locked")
            return None
        return self.held

    def take(
        self,
        name: str,
        owner: str,
        process: ProcessRecord,
        address: str,
        *,
        displacing: Lease | None,
    ) -> Lease:
        self.asked.append(displacing)
        if self.rivals:
            self.rivals -= 1
            raise LeaseLost(name, 0)
        return Lease(name=name, epoch=4, beat=0, owner=owner, process=process, address=address)


@dataclass
class Watch:
    """A candidate, the clock it looks at, and whether the holder's process is provably gone."""

    leases: Leases = field(default_factory=Leases)
    now: float = 100.0
    gone: bool = False

    def __post_init__(self) -> None:
        self.candidate = Candidate(
            self.leases,
            owner="second",
            process=OURSELVES,
            address="127.0.0.1:1",
            is_gone=lambda _: self.gone,
            clock=lambda: self.now,
        )

    def may_displace(self, holder: Lease = LEASE, *, after_seconds: float = 0.0) -> bool:
        self.now += after_seconds
        return self.candidate.may_displace(holder)

    def wins(self) -> Lease:
        return asyncio.run(self.candidate.win())


def test_a_free_lease_is_taken() -> None:
    watch = Watch()
    lease = watch.wins()
    assert (lease.owner, lease.process) == ("second", OURSELVES)
    assert watch.leases.asked == [None]


def test_a_holder_that_is_provably_dead_is_displaced_at_once() -> None:
    watch = Watch(Leases(held=LEASE), gone=True)
    watch.wins()
    assert watch.leases.asked == [LEASE], "the very lease that was seen"


def test_whoever_was_slower_looks_again() -> None:
    watch = Watch(Leases(rivals=2))
    watch.wins()
    assert watch.leases.asked == [None] * 3


def test_a_holder_that_beats_stays() -> None:
    watch = Watch()
    for beat in range(20):
        assert not watch.may_displace(replace(LEASE, beat=beat), after_seconds=LEASE_SECONDS - 0.1)


def test_a_beat_that_stands_still_for_the_length_of_the_lease_is_a_dead_one() -> None:
    watch = Watch()
    assert not watch.may_displace()
    assert not watch.may_displace(after_seconds=LEASE_SECONDS - 0.1)
    assert watch.may_displace(after_seconds=0.1)


def test_the_time_before_the_first_look_does_not_count() -> None:
    assert not Watch(now=1e9).may_displace()


def test_a_new_holder_gets_the_whole_length_even_with_the_same_beat() -> None:
    watch = Watch()
    watch.may_displace()
    assert not watch.may_displace(replace(LEASE, epoch=4), after_seconds=LEASE_SECONDS)


@pytest.fixture
def holder() -> Iterator[subprocess.Popen[bytes]]:
    """A process of this machine."""
    with subprocess.Popen(["sleep", "60"]) as process:  # noqa: S607
        yield process
        process.kill()


def record_of(holder: subprocess.Popen[bytes]) -> ProcessRecord:
    record = identify(holder.pid)
    assert record is not None
    return record


def test_the_end_of_a_holder_of_this_machine_wakes_who_waits(
    holder: subprocess.Popen[bytes],
) -> None:
    async def waits_and_kills() -> None:
        waiting = asyncio.ensure_future(end_of(record_of(holder), 3600.0))
        await asyncio.sleep(0)
        holder.kill()
        await asyncio.wait_for(waiting, 20)

    asyncio.run(waits_and_kills())


def test_a_holder_that_stands_still_and_blocks_the_database_is_ended(
    holder: subprocess.Popen[bytes],
) -> None:
    record = record_of(holder)
    holder.send_signal(signal.SIGSTOP)
    while not is_stopped(record):
        time.sleep(0.001)
    watch = Watch(Leases(held=replace(LEASE, process=record), blocked_by=record))
    assert watch.wins().epoch == 4
    assert holder.wait(20) == -signal.SIGKILL


def test_a_holder_that_is_not_stopped_is_not_blamed_for_the_database(
    holder: subprocess.Popen[bytes],
) -> None:
    record = record_of(holder)
    watch = Watch(Leases(held=replace(LEASE, process=record), blocked_by=record))
    with pytest.raises(StoreUnavailable):
        watch.wins()
    assert holder.poll() is None


def test_who_waits_looks_again_after_a_while_whoever_holds_the_lease() -> None:
    before = time.monotonic()
    asyncio.run(end_of(HOLDER, 0.01))
    asyncio.run(end_of(replace(HOLDER, pid=2**22 + 1), 0.01))
    assert time.monotonic() - before >= 0.02
