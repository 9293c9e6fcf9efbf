"""A reader of a job's log stream that reconnects whenever the stream breaks off.

It resumes by the id of the last complete event, so it must get every line once, and those of each
process in the order in which they were written.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import httpx

RETRY_SECONDS = 0.2
PATIENCE_SECONDS = 20.0
"""A stream says something every 15 seconds, if only that it is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """What a stream says at once: lines of logs, or something of another kind."""

    id: str = ""
    kind: str = ""
    data: list[str] = field(default_factory=list)


class LogFollower:
    """Follows the logs of a job, or of one rank, until the stream says that it has ended.

    Lines are given to `take` as they come, on a thread of the follower's own.
    """

    def __init__(
        self,
        url: str,
        job_id: str,
        take: Callable[[Sequence[str]], object],
        *,
        rank: int | None = None,
    ) -> None:
        self._client = httpx.Client(base_url=url, timeout=PATIENCE_SECONDS, trust_env=False)
        query = "" if rank is None else f"?rank={rank}"
        self._path = f"/jobs/{job_id}/logs/stream{query}"
        self._take = take
        self._position = ""
        self._is_given_up = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.has_ended = False
        self.resumed = 0
        self.lines = 0

    def start(self) -> None:
        self._thread.start()

    def wait(self, timeout_seconds: float) -> None:
        """Wait for the end of the stream, and give it up if it does not come."""
        self._thread.join(timeout_seconds)
        self._is_given_up.set()

    def _run(self) -> None:
        with self._client:
            while not (self.has_ended or self._is_given_up.is_set()):
                try:
                    self._follow()
                except httpx.TransportError:
                    time.sleep(RETRY_SECONDS)

    def _follow(self) -> None:
        headers = {"Last-Event-ID": self._position} if self._position else {}
        with self._client.stream("GET", self._path, headers=headers) as answer:
            if answer.status_code == httpx.codes.NO_CONTENT:
                self.has_ended = True
            elif answer.is_success:
                self.resumed += bool(self._position)
                for event in events(answer.iter_raw()):
                    self._note(event)
            else:
                time.sleep(RETRY_SECONDS)

    def _note(self, event: Event) -> None:
        if event.kind:
            self.has_ended = self.has_ended or event.kind == "end"
        else:
            self.lines += len(event.data)
            self._take(event.data)
        self._position = event.id or self._position


def events(chunks: Iterable[bytes]) -> Iterator[Event]:
    """Yield whole events; one that broke off did not happen, and one without data is none."""
    buffer = EventBuffer()
    for chunk in chunks:
        yield from buffer.feed(chunk)


class EventBuffer:
    """Takes a stream in pieces, cut anywhere, and gives its events as they become whole."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[Event]:
        *whole, self._rest = (self._rest + chunk).split(b"\n\n")
        found = (_event(raw.decode()) for raw in whole)
        return [event for event in found if event.data]


def _event(text: str) -> Event:
    fields = [line.partition(": ")[::2] for line in text.split("\n")]
    data = [value for name, value in fields if name == "data"]
    named = dict(fields)
    return Event(id=named.get("id", ""), kind=named.get("event", ""), data=data)
