"""Buckets that empty and fill again, and clients that do not pay for one another."""

from contextlib import ExitStack

import pytest
from hand import Hand

from api.limits import BURST_SECONDS, CLIENTS_REMEMBERED, Limits, TooManyRequests

RATE = 2
BURST = RATE * BURST_SECONDS


@pytest.fixture
def hand() -> Hand[float]:
    return Hand(0.0)


@pytest.fixture
def limits(hand: Hand[float]) -> Limits:
    return Limits(per_second=RATE, at_once=3, monotonic=hand)


def admitted(limits: Limits, client: str | None, attempts: int) -> int:
    """Return how many of a client's requests in a row are let in."""
    count = 0
    for _ in range(attempts):
        try:
            with limits.admitted(client):
                count += 1
        except TooManyRequests:
            pass
    return count


def test_a_burst_is_let_in_and_then_as_many_as_the_rate(limits: Limits, hand: Hand[float]) -> None:
    assert admitted(limits, "a", 2 * BURST) == BURST
    hand.now += 3
    assert admitted(limits, "a", 2 * BURST) == 3 * RATE
    hand.now += 1000
    assert admitted(limits, "a", 2 * BURST) == BURST


def test_one_client_does_not_pay_for_another(limits: Limits) -> None:
    admitted(limits, "a", 2 * BURST)
    assert admitted(limits, "b", BURST) == BURST


def test_for_the_services_own_user_there_is_no_limit(limits: Limits) -> None:
    assert admitted(limits, None, 100 * BURST) == 100 * BURST


def test_who_asks_too_often_is_told_when_to_come_back(limits: Limits, hand: Hand[float]) -> None:
    admitted(limits, "a", BURST)
    with pytest.raises(TooManyRequests, match="more than 2 times a second") as caught:
        limits.charge("a")
    assert (caught.value.status, caught.value.slug) == (429, "too-many-requests")
    hand.now += int(caught.value.headers["Retry-After"])
    limits.charge("a")


def test_only_so_many_are_answered_at_once(limits: Limits) -> None:
    with ExitStack() as being_answered:
        for _ in range(3):
            being_answered.enter_context(limits.admitted("a"))
        with pytest.raises(TooManyRequests, match="3 of your requests"), limits.admitted("a"):
            raise AssertionError
        with limits.admitted("b"):
            pass
    with limits.admitted("a"):
        pass
    assert not limits.in_flight


def test_a_request_that_fails_is_over(limits: Limits) -> None:
    for _ in range(BURST):
        with pytest.raises(ZeroDivisionError), limits.admitted("a"):
            raise ZeroDivisionError
    assert not limits.in_flight


def test_addresses_without_number_do_not_fill_the_memory(limits: Limits) -> None:
    admitted(limits, "first", BURST)
    for number in range(CLIENTS_REMEMBERED):
        limits.charge(f"{number}")
    assert len(limits.buckets) == CLIENTS_REMEMBERED
    assert "first" not in limits.buckets
