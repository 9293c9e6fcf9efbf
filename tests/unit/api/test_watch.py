"""What a stream sends: differences, the same to all who watch."""

import asyncio
from datetime import UTC, datetime

import pytest

from api.streams import Feeds
from api.watch import BACKLOG, Found, WatchFeed, delta
from muster.contracts.views.history import EventView

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
    """What a feed reads; each read finds the next one."""

    def __init__(self, *found: Found | None) -> None:
        self.found = list(found)
        self.number = 0
        self.reads = 0

    def read(self, _after: int) -> Found | None:
        self.reads += 1
        return self.found.pop(0) if len(self.found) > 1 else self.found[0]

    def changes(self) -> int:
        self.number += 1
        return self.number


def event(number: int) -> EventView:
    return EventView(at=MOMENT, kind="step_taken", message="a step", event_id=number)


def feed_of(source: Source) -> WatchFeed:
    return WatchFeed(read=source.read, changes=source.changes, is_closing=lambda: False)


async def rest_of(feed: WatchFeed, number: int) -> list[bytes]:
    """Return what comes from a number on, as far as a reader gets it."""
    return [content async for content in feed.after(number) if content is not None]


def test_fifty_readers_share_each_read_and_get_the_same_bytes() -> None:
    source = Source(
        Found({"step": 0}, [event(4)]),
        Found({"step": 1}, [event(5)]),
        Found({"step": 2}, is_over=True),
    )
    feeds = Feeds()

    async def read() -> tuple[list[bytes], bool]:
        async with feeds.reading("job", lambda: feed_of(source)) as feed:
            return await rest_of(feed, feed.count), feed.is_over

    async def check() -> None:
        (first, is_over), *others = await asyncio.gather(*[read() for _ in range(50)])
        assert others == [(first, is_over)] * 49
        assert is_over
        assert source.reads == 3
        kinds = [content.split(b"\n")[0] for content in first]
        assert kinds == [b"id: 5", b"event: summary", b"event: summary"]

    asyncio.run(check())


def test_a_late_reader_is_sent_nothing_more() -> None:
    async def check() -> None:
        feed = feed_of(Source(None))
        quick = feed.after(0)
        for number in range(BACKLOG + 9):
            feed._take(Found({"step": number}))  # noqa: SLF001  faster than it polls
            if number:  # the first one is the whole
                assert await anext(quick) is not None
        feed.is_over = True
        assert len(await rest_of(feed, feed.count - BACKLOG)) == BACKLOG
        assert await rest_of(feed, feed.count - BACKLOG - 1) == []
        assert await anext(quick, None) is None

    asyncio.run(check())


def test_a_job_that_is_gone_ends_the_feed() -> None:
    async def check() -> None:
        source = Source(Found({"step": 1}), None)
        feeds = Feeds()
        async with feeds.reading("job", lambda: feed_of(source)) as feed:
            assert await rest_of(feed, feed.count) == []
            assert await rest_of(feed, feed.count) == [], "also for a client that comes now"
            assert (feed.is_over, feed.found) == (True, None)

    asyncio.run(check())
