"""Events out of bytes, wherever the bytes were cut."""

import pytest

from muster.client.stream import ServerEvent, events_of

BYTES = (
    "retry: 2000\n\n"
    ": ping\n\n"
    "id: 0.0:9\ndata: a\ndata:\ndata:  b \u2028 c \x0b d\n\n"
    "event: end\ndata: {}\nid: 0.0:12\n\n"
    "data: broken off\n"
).encode()


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_are_whole_however_they_come(size: int) -> None:
    chunks = [BYTES[start : start + size] for start in range(0, len(BYTES), size)]
    assert list(events_of(chunks)) == [
        ServerEvent("", "a\n\n b \u2028 c \x0b d", "0.0:9"),
        ServerEvent("end", "{}", "0.0:12"),
    ]


def test_where_to_go_on_is_told_before_there_is_a_line() -> None:
    assert list(events_of([b"retry: 2000\nid: 0.0:9\n\n: ping\n\n"])) == [
        ServerEvent("", None, "0.0:9")
    ]
