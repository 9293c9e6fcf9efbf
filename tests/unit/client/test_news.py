"""What is new of what happened."""

from datetime import UTC, datetime, timedelta

import pytest

from muster.client.news import news
from muster.client.views import EventView


def event(number: int) -> EventView:
    at = datetime(2026, 3, 1, tzinfo=UTC) + timedelta(seconds=number)
    return EventView(at=at, kind="k", message=str(number), rank=None, incarnation=None)


@pytest.mark.parametrize(
    ("last", "told"), [(None, [3, 4, 5]), (3, [4, 5]), (5, []), (1, [3, 4, 5])]
)
def test_an_event_is_told_once(last: int | None, told: list[int]) -> None:
    known = [event(number) for number in (3, 4, 5)]
    found = news(known, None if last is None else event(last))
    assert list(found) == [event(number) for number in told]
