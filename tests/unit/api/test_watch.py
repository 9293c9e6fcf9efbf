"""What a stream sends: differences, the same to all who watch."""

import asyncio
from datetime import UTC, datetime

import pytest

from api.watch import BACKLOG, Feed, Found, Reader, Watches, delta
from muster.contracts.views import EventView

MOMENT = datetime(2026, 1, 2, tzinfo=UTC)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({"step": 1}, {"step": 1}, {}),
        ({"step": 1, "loss": 2}, {"step": 3, "loss": 2}, {"step": 3}),
        ({"loss": 2}, {"loss": None}, {"loss": None}),
        (
            {"workers": {"0": {"step": 1, "pid": 7}, "1": {"step": 1}}},
            {"workers": {"0": {"step": 2, "pid": 7}, "1": {"step": 1}}},
            {"workers": {"0": {"step": 2}}},
        ),
        ({"workers": {}}, {"workers": {"3": {"step": 0}}}, {"workers": {"3": {"step": 0}}}),
        ({"workers": {"3": {}, "4": {}}}, {"workers": {"4": {}}}, {"left": ["3"]}),
        ({"jobs": {"a": {"step": 1}}}, {"jobs": {"a": {"step": 2}}}, {"jobs": {"a": {"step": 2}}}),
    ],
)
def test_only_what_differs_is_sent(
    before: dict[str, object], after: dict[str, object], expected: dict[str, object]
) -> None:
    assert delta(before, after) == expected


class Source:
    """What a feed looks at; each look finds the next one."""

    def __init__(self, *found: Found | None) -> None:
        self.found = list(found)
        self.number = 0

    async def look(self, _after: int) -> Found | None:
        return self.found.pop(0) if len(self.found) > 1 else self.found[0]

    def changes(self) -> int:
        self.number += 1
        return self.number


def event(number: int) -> EventView:
    return EventView(at=MOMENT, kind="step_taken", message="a step", event_id=number)


def test_all_readers_get_the_same_bytes() -> None:
    source = Source(
        Found({"step": 0}, [event(4)]),
        Found({"step": 1}, [event(5)]),
        Found({"step": 2}, is_over=True),
    )
    watches = Watches(source.changes, lambda: False)

    async def read() -> tuple[list[bytes], bool]:
        async with watches.watching("job", source.look) as feed:
            got, reader = [], feed.join()
            while (content := await reader.get()) is not None:
                got.append(content)
            return got, feed.is_over

    async def check() -> None:
        (first, is_over), (second, _) = await asyncio.gather(read(), read())
        assert first == second
        assert is_over
        kinds = [content.split(b"\n")[0] for content in first]
        assert kinds == [b"id: 5", b"event: summary", b"event: summary"]

    asyncio.run(check())


def test_a_late_reader_is_sent_nothing_more() -> None:
    feed = Feed(Source(None).look, lambda: 0, lambda: False)
    late, quick = Reader(), Reader()
    feed.readers = {late, quick}
    for number in range(BACKLOG + 9):
        feed._take(Found({"step": number}))  # noqa: SLF001  faster than it polls
        while not quick.empty():
            quick.get_nowait()
    got = [late.get_nowait() for _ in range(late.qsize())]
    assert (len(got), got[-1], late.is_late) == (BACKLOG + 1, None, True)
    assert None not in got[:-1]
    assert (feed.readers, quick.is_late) == ({quick}, False)


def test_a_job_that_is_gone_ends_the_feed() -> None:
    async def check() -> None:
        source = Source(Found({"step": 1}), None)
        watches = Watches(source.changes, lambda: False)
        async with watches.watching("job", source.look) as feed:
            assert await feed.join().get() is None
            assert await feed.join().get() is None, "also for a client that comes now"
            assert (feed.is_over, feed.found) == (True, None)

    asyncio.run(check())
