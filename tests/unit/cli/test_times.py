"""Times as people type them."""

from datetime import UTC, datetime

import pytest

from cli.times import moment_of, seconds_of

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("30m", 1800), ("12h", 43_200), ("2d", 172_800), ("5", None), ("-1m", None)],
)
def test_a_number_has_a_unit(text: str, seconds: int | None) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("10m", datetime(2026, 3, 1, 11, 50, tzinfo=UTC)),
        ("2026-03-01T13:00+02:00", datetime(2026, 3, 1, 11, tzinfo=UTC)),
        ("2026-03-01T13:00Z", datetime(2026, 3, 1, 13, tzinfo=UTC)),
        ("yesterday", None),
        ("9999999999d", None),
    ],
)
def test_a_moment_is_before_now_or_written_out(text: str, moment: datetime | None) -> None:
    assert moment_of(text, NOON) == moment
