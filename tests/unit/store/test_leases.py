"""One decides at a time, and the epoch says who."""

import threading
from dataclasses import replace

import pytest
from store_samples import PROCESS, nothing_moves

from store.database import Database
from store.errors import LeaseLost, StoreUnavailable
from store.leases import Leases, beat
from store.records import Lease


@pytest.fixture
def leases(database: Database) -> Leases:
    return Leases(database)


def take(leases: Leases, owner: str, displacing: Lease | None) -> Lease:
    return leases.take("coordinator", owner, PROCESS, f"{owner}:1", displacing=displacing)


def renew(database: Database, lease: Lease) -> Lease | None:
    with database.writing() as connection:
        beat(connection, lease)
    return Leases(database).current(lease.name)


def test_nobody_holds_a_lease_at_first(leases: Leases) -> None:
    assert leases.current("coordinator") is None


def test_a_taken_lease_is_seen_by_all(leases: Leases) -> None:
    lease = take(leases, "a", None)
    assert (lease.epoch, lease.beat, lease.address) == (1, 0, "a:1")
    assert leases.current("coordinator") == lease
    assert leases.current_among_writers("coordinator") == lease
    assert leases.current("another") is None


def test_a_renewal_raises_the_beat_and_not_the_epoch(database: Database, leases: Leases) -> None:
    lease = take(leases, "a", None)
    renewed = renew(database, renew(database, lease))
    assert renewed == replace(lease, beat=2) == leases.current("coordinator")


def test_whoever_names_the_lease_as_it_is_takes_it_with_a_higher_epoch(
    database: Database, leases: Leases
) -> None:
    seen = renew(database, take(leases, "a", None))
    assert take(leases, "b", seen).epoch == 2
    assert leases.current("coordinator").owner == "b"


def test_a_displaced_holder_can_neither_renew_nor_release(
    database: Database, leases: Leases
) -> None:
    old = take(leases, "a", None)
    take(leases, "b", old)
    with nothing_moves(database):
        with pytest.raises(LeaseLost, match="no longer held with epoch 1"):
            renew(database, old)
        leases.release(old)


def test_a_lease_renewed_since_it_was_seen_is_not_taken(database: Database, leases: Leases) -> None:
    seen = take(leases, "a", None)
    renew(database, seen)
    with nothing_moves(database), pytest.raises(LeaseLost):
        take(leases, "b", seen)


def test_a_held_lease_is_not_taken_as_a_free_one(database: Database, leases: Leases) -> None:
    take(leases, "a", None)
    with nothing_moves(database), pytest.raises(LeaseLost):
        take(leases, "b", None)


def test_a_released_lease_is_free_and_its_epoch_is_remembered(
    database: Database, leases: Leases
) -> None:
    first = take(leases, "a", None)
    leases.release(first)
    assert leases.current("coordinator") is None
    with pytest.raises(LeaseLost):
        renew(database, first)
    with pytest.raises(LeaseLost):
        take(leases, "b", first)
    assert take(leases, "b", None).epoch == 2


def test_among_writers_it_is_not_seen_while_somebody_else_writes(url: str) -> None:
    ours = Database.open(url, busy_timeout_seconds=0.05)
    theirs = Database.open(url)
    with theirs.writing():
        assert Leases(ours).current("coordinator") is None
        with pytest.raises(StoreUnavailable):
            Leases(ours).current_among_writers("coordinator")
    ours.close()
    theirs.close()


def test_of_many_who_grasp_at_once_one_succeeds(leases: Leases) -> None:
    seen = take(leases, "dead", None)
    gate = threading.Barrier(5)
    taken: list[str] = []
    lost: list[str] = []

    def grasp(owner: str) -> None:
        gate.wait()
        try:
            taken.append(take(leases, owner, seen).owner)
        except LeaseLost:
            lost.append(owner)

    threads = [threading.Thread(target=grasp, args=(f"t{number}",)) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == 1
    assert len(lost) == 4
    assert leases.current("coordinator").owner == taken[0]
