"""A reader that reads wrongly would find gaps where there are none, or miss those there are."""

import pytest

from tests.support.log_follower import Event, events

STREAM = (
    "retry: 1000\n\n"
    "id: 0.0:9\ndata: one\ndata: two: of them\n\n"
    ": ping\n\n"
    "data: a\u2028line\n\n"
    "event: end\nid: 0.0:12\ndata: {}\n\n"
).encode()
EVENTS = [
    Event(id="0.0:9", data=["one", "two: of them"]),
    Event(data=["a\u2028line"]),
    Event(kind="end", id="0.0:12", data=["{}"]),
]


@pytest.mark.parametrize("size", [1, 7, len(STREAM)])
def test_wherever_a_stream_is_cut_its_events_are_the_same(size: int) -> None:
    chunks = [STREAM[place : place + size] for place in range(0, len(STREAM), size)]
    assert list(events(chunks)) == EVENTS


def test_an_event_that_broke_off_did_not_happen() -> None:
    assert list(events([STREAM[:-1]])) == EVENTS[:-1]
