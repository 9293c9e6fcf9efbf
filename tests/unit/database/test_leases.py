"""Leases: one holder at a time, and an epoch that only rises."""

import threading
from contextlib import suppress
from dataclasses import replace

import pytest

from database.engine import Database
from database.errors import LeaseLost
from database.leases import Leases, renew
from database.records import Lease
from tests.support.database_samples import PROCESS, nothing_moves


@pytest.fixture
def leases(database: Database) -> Leases:
    return Leases(database)


def take(leases: Leases, owner: str, displacing: Lease | None) -> Lease:
    return leases.take(owner, PROCESS, f"{owner}:1", displacing=displacing)


def renewed(database: Database, lease: Lease) -> Lease | None:
    with database.writing() as connection:
        renew(connection, lease)
    return Leases(database).current()


def test_a_taken_lease_is_visible(leases: Leases) -> None:
    assert leases.current() is None
    lease = take(leases, "a", None)
    assert (lease.epoch, lease.beat, lease.address) == (1, 0, "a:1")
    assert leases.current() == lease


def test_a_renewal_raises_the_beat_but_not_the_epoch(database: Database, leases: Leases) -> None:
    lease = take(leases, "a", None)
    assert renewed(database, renewed(database, lease)) == replace(lease, beat=2)


def test_the_lease_as_seen_is_taken_with_a_higher_epoch(database: Database, leases: Leases) -> None:
    seen = renewed(database, take(leases, "a", None))
    assert take(leases, "b", seen).epoch == 2
    assert leases.current().owner == "b"


def test_a_displaced_holder_neither_renews_nor_releases(database: Database, leases: Leases) -> None:
    old = take(leases, "a", None)
    take(leases, "b", old)
    with nothing_moves(database):
        with pytest.raises(LeaseLost, match="no longer held with epoch 1"):
            renewed(database, old)
        leases.release(old)


def test_a_lease_that_has_changed_is_not_taken(database: Database, leases: Leases) -> None:
    seen = take(leases, "a", None)
    renewed(database, seen)
    for outdated in (seen, None):
        with nothing_moves(database), pytest.raises(LeaseLost):
            take(leases, "b", outdated)


def test_a_released_lease_is_free_and_keeps_its_epoch(database: Database, leases: Leases) -> None:
    first = take(leases, "a", None)
    leases.release(first)
    assert leases.current() is None
    with pytest.raises(LeaseLost):
        renewed(database, first)
    with pytest.raises(LeaseLost):
        take(leases, "b", first)
    assert take(leases, "b", None).epoch == 2


def test_only_one_of_many_candidates_takes_the_lease(leases: Leases) -> None:
    seen = take(leases, "dead", None)
    gate = threading.Barrier(5)
    taken: list[str] = []

    def compete(owner: str) -> None:
        gate.wait()
        with suppress(LeaseLost):
            taken.append(take(leases, owner, seen).owner)

    threads = [threading.Thread(target=compete, args=(f"t{number}",)) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert taken == [leases.current().owner]


def test_an_elected_holder_skips_the_epochs_of_others(leases: Leases) -> None:
    first = leases.take("a", PROCESS, "a:1", displacing=None, least_epoch=9)
    assert first.epoch == 9
    assert leases.take("b", PROCESS, "b:1", displacing=first, least_epoch=9).epoch == 10
