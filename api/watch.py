"""Live state of jobs: one reader for each watched job, and one for the list.

A stream begins with the whole state, and goes on with what changes. All its clients get the same
bytes, encoded once. A client that is too slow, or comes back, begins with the whole state again,
and with the events after the last one that it has seen: it has no gap.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Final, TypeAlias

import msgspec
import structlog
from sse_starlette import ServerSentEvent

from database.errors import DatabaseUnavailable
from muster.contracts.views import EventView

POLL_SECONDS: Final = 0.05
"""Between two looks whether anything was committed, which take microseconds."""

BLIND_SECONDS: Final = 0.25
"""Between two looks at the rows where commits are not noticed."""

BACKLOG: Final = 256
"""Messages that a client may be behind."""

_LOG: Final = structlog.get_logger("api")

State: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Found:
    """What is watched, as it is now."""

    state: State
    events: Sequence[EventView] = ()  # those after the last that were found
    others: Sequence[tuple[str, State]] = ()  # further messages: what each is, and its content
    is_over: bool = False  # nothing will change any more


class Reader(asyncio.Queue[bytes | None]):
    """The messages of one client; None after the last one."""

    is_late = False
    """It was too slow, and gets no more: it has to begin again."""

    def push(self, content: bytes | None) -> bool:
        """Add a message; return False if the client is too slow."""
        self.is_late = content is not None and self.qsize() >= BACKLOG
        self.put_nowait(None if self.is_late else content)
        return not self.is_late


@dataclass(slots=True)
class Feed:
    """Looks again and again, for all who watch one thing."""

    look: Callable[[int], Awaitable[Found | None]]
    """Returns what is there, with the events after an id; None if it is gone."""
    changes: Callable[[], int | None]
    is_closing: Callable[[], bool]
    found: Found | None = None
    last_event: int = 0
    is_over: bool = False
    has_failed: bool = False
    readers: set[Reader] = field(default_factory=set)
    clients: int = 0
    opened: asyncio.Event = field(default_factory=asyncio.Event)

    def join(self) -> Reader:
        """Return a reader of what comes after `found` and `last_event`, as they are now."""
        reader = Reader()
        if self.is_over:
            reader.push(None)
        else:
            self.readers.add(reader)
        return reader

    async def run(self) -> None:
        """Look until nothing changes any more."""
        seen, waited = None, BLIND_SECONDS
        try:
            while not (self.is_over or self.is_closing()):
                began = monotonic()
                with suppress(DatabaseUnavailable):
                    changes = self.changes()
                    if changes != seen or (changes is None and waited >= BLIND_SECONDS):
                        self._take(await self.look(self.last_event))
                        seen, waited = changes, 0.0
                # A look at thousands of ranks takes long: not more than a fifth of a core.
                rest = max(POLL_SECONDS, 4 * (monotonic() - began))
                await asyncio.sleep(rest)
                waited += rest
        except Exception:  # noqa: BLE001  of this thing alone
            self.has_failed = True  # clients connect again
            _LOG.exception("cannot watch jobs any more", action="watch_failed")
        finally:
            self.is_over = True
            self.opened.set()
            self._publish(None)

    def _take(self, found: Found | None) -> None:
        before, self.found = self.found, found
        self.is_over = found is None or found.is_over
        if found is not None and before is not None:
            for event in found.events:
                self._publish(event_message(event))
            if changed := delta(before.state, found.state):
                self._publish(message("summary", changed))
            for kind, content in found.others:
                self._publish(message(kind, content))
        if found is not None and found.events:
            self.last_event = found.events[-1].event_id or 0
        self.opened.set()

    def _publish(self, content: bytes | None) -> None:
        self.readers = {reader for reader in self.readers if reader.push(content)}


@dataclass(slots=True)
class Watches:
    """The feeds of one event loop, by what they look at."""

    changes: Callable[[], int | None]
    is_closing: Callable[[], bool]
    _feeds: dict[str, tuple[Feed, asyncio.Task[None]]] = field(default_factory=dict)

    @asynccontextmanager
    async def watching(
        self, key: str, look: Callable[[int], Awaitable[Found | None]]
    ) -> AsyncIterator[Feed]:
        """Give a client the feed of `key`, which ends when its last client leaves."""
        feed, task = self._feeds.get(key, (None, None))
        if feed is None or feed.is_over or task is None or task.done():
            feed = Feed(look, self.changes, self.is_closing)
            task = asyncio.create_task(feed.run())
            self._feeds[key] = feed, task
        feed.clients += 1
        try:
            await feed.opened.wait()
            yield feed
        finally:
            feed.clients -= 1
            if not feed.clients:
                task.cancel()
                if self._feeds.get(key, (None,))[0] is feed:
                    del self._feeds[key]


def delta(before: State, after: State) -> State:
    """Return the fields that differ; of a list of ranks, those that differ, by rank.

    ``left`` names what is gone: ranks, or jobs of a list.
    """
    changed: State = {}
    for name, value in after.items():
        old = before.get(name)
        if isinstance(value, dict) and isinstance(old, dict) and name in {"workers", "jobs"}:
            items = {
                key: {it: item[it] for it in item if item[it] != old.get(key, {}).get(it)}
                for key, item in value.items()
                if item != old.get(key)
            }
            if items:
                changed[name] = items
            if left := sorted(old.keys() - value.keys()):
                changed["left"] = left
        elif value != old or name not in before:
            changed[name] = value
    return changed


def message(kind: str, content: Mapping[str, Any], event_id: str | None = None) -> bytes:
    data = msgspec.json.encode(content).decode()
    return ServerSentEvent(data, event=kind, id=event_id, sep="\n").encode()


def event_message(event: EventView) -> bytes:
    return message("event", msgspec.to_builtins(event), str(event.event_id))
