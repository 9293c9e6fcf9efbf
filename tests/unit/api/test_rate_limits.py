"""Token buckets empty and refill, and clients do not pay for one another."""

from contextlib import ExitStack

import pytest

from api.access import rate_limits
from api.access.rate_limits import BURST_SECONDS, RateLimiter, TooManyRequests
from tests.support.clocks import ManualClock

RATE = 2
BURST = RATE * BURST_SECONDS


@pytest.fixture
def hand() -> ManualClock[float]:
    return ManualClock(0.0)


@pytest.fixture
def limiter(hand: ManualClock[float]) -> RateLimiter:
    return RateLimiter(per_second=RATE, at_once=3, monotonic=hand)


def count_admitted(limiter: RateLimiter, client: str, attempts: int) -> int:
    count = 0
    for _ in range(attempts):
        try:
            with limiter.admit(client):
                count += 1
        except TooManyRequests:
            pass
    return count


def test_a_burst_is_admitted_then_the_rate(limiter: RateLimiter, hand: ManualClock[float]) -> None:
    assert count_admitted(limiter, "a", 2 * BURST) == BURST
    hand.now += 3
    assert count_admitted(limiter, "a", 2 * BURST) == 3 * RATE
    hand.now += 1000
    assert count_admitted(limiter, "a", 2 * BURST) == BURST
    assert count_admitted(limiter, "b", BURST) == BURST, "another client"


def test_retry_after_is_enough(limiter: RateLimiter, hand: ManualClock[float]) -> None:
    count_admitted(limiter, "a", BURST)
    with pytest.raises(TooManyRequests) as refused:
        limiter.charge("a")
    assert (refused.value.status, refused.value.slug) == (429, "too-many-requests")
    hand.now += int(refused.value.headers["Retry-After"])
    limiter.charge("a")


def test_open_requests_of_one_client_are_limited(limiter: RateLimiter) -> None:
    with ExitStack() as opened:
        for _ in range(3):
            opened.enter_context(limiter.admit("a"))
        with pytest.raises(TooManyRequests) as refused, limiter.admit("a"):
            raise AssertionError
        assert refused.value.slug == "too-many-at-once"
        with limiter.admit("b"):
            pass
    with limiter.admit("a"):
        pass


def test_a_failed_request_is_not_open(limiter: RateLimiter) -> None:
    for _ in range(BURST):
        with pytest.raises(ZeroDivisionError), limiter.admit("a"):
            raise ZeroDivisionError


def test_the_least_recent_client_is_forgotten(
    limiter: RateLimiter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rate_limits, "CLIENTS_LIMIT", 3)
    count_admitted(limiter, "first", BURST)
    for client in ("b", "c", "first", "d"):
        count_admitted(limiter, client, 1)
    assert count_admitted(limiter, "first", BURST) == 0, "used recently"
    for client in ("b", "c", "d"):
        count_admitted(limiter, client, 1)
    assert count_admitted(limiter, "first", BURST) == BURST
