import asyncio
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import pytest
from unit.coordinator.neighbours import neighbour, stop

from coordinator.candidacy import Candidate, end_of
from muster.contracts.process import ProcessRecord
from muster.processes import identify
from store.errors import LeaseLost, StoreLocked, StoreUnavailable
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
    before_looks: list[Callable[[], None]] = field(default_factory=list)
    """What happens at the next looks, one each."""
    before_turns: list[Callable[[], None]] = field(default_factory=list)
    """What happens before it is the turn to write of whoever looks so, once each."""
    asked: list[Lease | None] = field(default_factory=list)

    def current(self, _name: str) -> Lease | None:
        if self.before_looks:
            self.before_looks.pop(0)()
        return self.held

    def current_among_writers(self, _name: str) -> Lease | None:
        if self.before_turns:
            self.before_turns.pop(0)()
        return self.held

    def are_released(self) -> None:
        self.held = None

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
    with neighbour() as process:
        yield process


def record_of(holder: subprocess.Popen[bytes]) -> ProcessRecord:
    record = identify(holder.pid)
    assert record is not None
    return record


def stopped(holder: subprocess.Popen[bytes]) -> ProcessRecord:
    stop(holder)
    return record_of(holder)


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
    watch = Watch(Leases(held=replace(LEASE, process=stopped(holder))))

    def is_blocked_until_it_ends() -> None:
        watch.leases.held = None
        locked()

    watch.leases.before_looks = [nothing, is_blocked_until_it_ends]
    watch.wins()
    assert holder.wait(20) == -signal.SIGKILL


@pytest.mark.slow
def test_a_holder_that_is_not_stopped_is_not_blamed_for_the_database(
    holder: subprocess.Popen[bytes],
) -> None:
    watch = Watch(Leases(held=replace(LEASE, process=record_of(holder))))
    watch.leases.before_looks = [nothing, locked, watch.leases.are_released]
    watch.wins()
    assert holder.poll() is None


@pytest.mark.slow
def test_a_holder_that_stands_still_is_not_blamed_for_a_database_that_is_not_locked(
    holder: subprocess.Popen[bytes],
) -> None:
    watch = Watch(Leases(held=replace(LEASE, process=stopped(holder))))
    watch.leases.before_looks = [nothing, away, watch.leases.are_released]
    watch.wins()
    assert holder.poll() is None


def test_who_waits_looks_again_after_a_while_whoever_holds_the_lease() -> None:
    before = time.monotonic()
    asyncio.run(end_of(HOLDER, 0.01))
    asyncio.run(end_of(replace(HOLDER, pid=2**22 + 1), 0.01))
    assert time.monotonic() - before >= 0.02


def test_a_lease_that_is_our_own_was_taken_when_the_database_went_away() -> None:
    watch = Watch(Leases(held=replace(LEASE, owner="second")))
    watch.wins()
    assert watch.leases.asked == [watch.leases.held]


@pytest.mark.slow
def test_a_candidate_waits_for_a_database_that_is_away() -> None:
    watch = Watch(Leases(before_looks=[away, away]))
    assert watch.wins().owner == "second"


@pytest.mark.slow
def test_time_in_which_nobody_could_renew_does_not_count() -> None:
    watch = Watch(Leases(held=LEASE))

    def takes_long() -> None:
        watch.now += LEASE_SECONDS

    def is_away_for_long() -> None:
        takes_long()
        away()

    released = watch.leases.are_released
    watch.leases.before_looks = [takes_long, takes_long, is_away_for_long, released]
    watch.wins()
    assert watch.leases.asked == [None], "it was not displaced before it released the lease"


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """A candidate that sees nothing move though it looks often; half a second each time."""
    monkeypatch.setattr("coordinator.candidacy.LOOK_SECONDS", 0.0)
    watch = Watch(Leases(held=LEASE))

    def takes_a_moment() -> None:
        watch.now += 0.5

    watch.leases.before_looks = [takes_a_moment] * 20
    watch.leases.before_turns = [takes_a_moment] * 20
    return watch


def test_a_beat_that_stands_still_though_all_can_write_is_a_dead_one(still: Watch) -> None:
    still.wins()
    assert still.leases.asked == [LEASE]
    assert still.now == pytest.approx(100 + LEASE_SECONDS, abs=1.0)


@pytest.mark.parametrize("fails", [False, True])
def test_time_in_which_nobody_could_write_does_not_count(still: Watch, *, fails: bool) -> None:
    def somebody_writes_for_long() -> None:
        still.now += 7.0
        still.leases.before_looks = [nothing, still.leases.are_released]
        if fails:
            locked()

    still.leases.before_turns = [somebody_writes_for_long]
    still.wins()
    assert still.leases.asked == [None], "it was not displaced before it released the lease"


def nothing() -> None:
    """The holder's lease is there to be seen."""


def away() -> None:
    raise StoreUnavailable("away")


def locked() -> None:
    raise StoreLocked("locked")
