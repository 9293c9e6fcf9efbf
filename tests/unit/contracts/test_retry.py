import pytest

from muster.contracts.job.retry import DEFAULT_BACKOFF, Backoff

STEADY = Backoff(jitter=0.0)


@pytest.mark.parametrize(
    ("failures", "seconds"),
    [(1, 0.5), (2, 1), (3, 2), (4, 4), (5, 8), (6, 16), (7, 30), (8, 30), (51, 30), (10**30, 30)],
)
def test_backoff_doubles_up_to_thirty_seconds(failures: int, seconds: float) -> None:
    assert STEADY.delay_seconds(failures, "job/0") == seconds
    delay = DEFAULT_BACKOFF.delay_seconds(failures, "job/0")
    assert 0.75 * seconds <= delay <= seconds
    assert delay == DEFAULT_BACKOFF.delay_seconds(failures, "job/0")


def test_backoff_without_cap_does_not_overflow() -> None:
    patient = Backoff(cap_seconds=float("inf"), jitter=0.0)
    assert patient.delay_seconds(10**6, "job/0") == 0.5 * 2.0**64


def test_backoff_jitter_spreads_ranks() -> None:
    delays = {DEFAULT_BACKOFF.delay_seconds(1, f"job/{rank}") for rank in range(100)}
    assert len(delays) == 100
    assert 0.375 <= min(delays) < 0.4
    assert 0.48 < max(delays) <= 0.5


@pytest.mark.parametrize(
    ("healthy_seconds", "left"), [(0.0, 4), (59.9, 4), (60.0, 0), (1e9, 0), (-1.0, 4)]
)
def test_healthy_minute_resets_failures(healthy_seconds: float, left: int) -> None:
    assert DEFAULT_BACKOFF.failures_after(4, healthy_seconds) == left
