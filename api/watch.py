"""Live state of jobs: one feed for each watched job, and one for the list.

A stream begins with the whole state, and goes on with what changes. All its clients get the same
bytes, encoded once. A client that is too slow, or comes back, begins with the whole state again,
and with the events after the last one that it has seen: it has no gap.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from time import monotonic
from typing import Any, Final, TypeAlias

import msgspec
from anyio.to_thread import run_sync
from sse_starlette import ServerSentEvent

from api.streams import Feed
from database.errors import DatabaseUnavailable
from muster.contracts.views.history import EventView

POLL_SECONDS: Final = 0.05
"""Between two checks whether anything was committed, which take microseconds."""

BLIND_SECONDS: Final = 0.25
"""Between two reads of the rows where commits are not noticed."""

BACKLOG: Final = 256
"""Messages that a client may be behind."""

State: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Found:
    """What is watched, as it is now."""

    state: State
    events: Sequence[EventView] = ()  # those after the last that were found
    others: Sequence[tuple[str, State]] = ()  # further messages: what each is, and its content
    is_over: bool = False  # nothing will change any more


@dataclass(eq=False, kw_only=True)
class WatchFeed(Feed[bytes]):
    """Reads a job or the list of jobs, and encodes what differs."""

    read: Callable[[int], Found | None]
    """Returns what is there, with the events after an id; None if it is gone. Runs in a thread."""
    changes: Callable[[], int | None]
    found: Found | None = field(default=None, init=False)
    last_event: int = field(default=0, init=False)
    _seen: int | None = field(default=None, init=False)
    _read_at: float = field(default=-inf, init=False)

    def __post_init__(self) -> None:
        self.kept = deque(maxlen=BACKLOG)

    async def poll(self) -> float:
        began = monotonic()
        with suppress(DatabaseUnavailable):
            changes = self.changes()
            is_blind = changes is None and began - self._read_at >= BLIND_SECONDS
            if changes != self._seen or is_blind:
                self._take(await run_sync(self.read, self.last_event))
                self._seen, self._read_at = changes, monotonic()
        # Thousands of ranks take long to read: not more than a fifth of a core.
        return max(POLL_SECONDS, 4 * (monotonic() - began))

    def _take(self, found: Found | None) -> None:
        before, self.found = self.found, found
        self.is_over = found is None or found.is_over
        if found is not None and before is not None:
            for event in found.events:
                self.publish(event_message(event))
            if changed := delta(before.state, found.state):
                self.publish(message("summary", changed))
            for kind, content in found.others:
                self.publish(message(kind, content))
        if found is not None and found.events:
            self.last_event = found.events[-1].event_id or 0
        self.opened.set()


def delta(before: State, after: State) -> State:
    """Return the fields that differ; of a list of ranks, those that differ, by rank.

    ``left`` names what is gone: ranks, or jobs of a list.
    """
    changed: State = {}
    for name, value in after.items():
        old = before.get(name)
        if isinstance(value, dict) and isinstance(old, dict) and name in {"workers", "jobs"}:
            items = {
                key: {
                    field: new for field, new in item.items() if new != old.get(key, {}).get(field)
                }
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
