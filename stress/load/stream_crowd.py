"""Many readers of one job's log stream on one event loop.

Each line holds its number and when it was written, so the script knows for every reader whether
each line arrived once, in order, and how late. A reader that is disconnected resumes after the last
complete event.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

import httptools
import httpx

from tests.support.log_follower import Event, EventBuffer

RETRY_SECONDS = 0.1
PATIENCE_SECONDS = 60.0
LOOK_SECONDS = 0.01
NANOSECONDS = 1e9


def line_of(number: int) -> bytes:
    """Return a line that holds its number and the time of writing."""
    return f"line {number} of {time.monotonic_ns()}\n".encode()


@dataclass(kw_only=True)
class Reader:
    """One reader, over all its connections."""

    port: int
    path: str
    token: str
    position: str = ""
    """The id of the last complete event."""
    lines: int = 0
    """Also the number of the next line."""
    delays: list[float] = field(default_factory=list)
    """Delay of each line in seconds, from its write to its receipt."""
    resumed: int = 0
    cut: int = 0
    """Number of streams that broke off."""
    has_ended: bool = False
    faults: list[str] = field(default_factory=list)
    stream: "_Connection | None" = None
    """The one that is open."""

    async def run(self) -> None:
        """Read until the stream says that the job is over."""
        loop = asyncio.get_running_loop()
        while not self.has_ended:
            try:
                _, connection = await loop.create_connection(
                    lambda: _Connection(self), "127.0.0.1", self.port
                )
            except OSError:  # the service does not listen yet
                await asyncio.sleep(RETRY_SECONDS)
                continue
            try:
                await connection.closed.wait()
            finally:  # after the last event the server may reset the connection
                connection.leave()
                await connection.closed.wait()

    def leave(self) -> None:
        """Drop the connection; it is opened again at once."""
        if self.stream is not None:
            self.stream.leave()

    @property
    def request(self) -> bytes:
        resumed = f"Last-Event-ID: {self.position}\r\n" if self.position else ""
        return (
            f"GET {self.path} HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            f"Authorization: Bearer {self.token}\r\n{resumed}\r\n"
        ).encode()

    def take(self, event: Event) -> None:
        if event.kind:
            self.has_ended = self.has_ended or event.kind == "end"
        now = time.monotonic_ns()
        for line in event.data if not event.kind else ():
            _, number, _, written = line.removeprefix("[rank 0] ").split(" ")
            self._count(int(number), (now - int(written)) / NANOSECONDS)
        self.position = event.id or self.position

    def _count(self, number: int, delay_seconds: float) -> None:
        if number != self.lines:
            self.faults.append(f"line {number} came where {self.lines} was due")
        self.lines = number + 1
        self.delays.append(delay_seconds)


class _Connection(asyncio.Protocol):
    """One stream: from its bytes to events, and whether it came to a proper end."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._events = EventBuffer()
        self._parser = httptools.HttpResponseParser(self)
        self._may_break_off = False
        self.closed = asyncio.Event()

    def leave(self) -> None:
        self._may_break_off = True
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._reader.request)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status == httpx.codes.OK:
            self._reader.stream = self
            self._reader.resumed += bool(self._reader.position)
        elif status == httpx.codes.NO_CONTENT:
            self._reader.has_ended = True
        else:
            self._reader.faults.append(f"was answered {status}")

    def on_body(self, body: bytes) -> None:
        for event in self._events.feed(body):
            self._reader.take(event)

    def on_message_complete(self) -> None:
        self._may_break_off = True
        self._transport.close()

    def connection_lost(self, _error: Exception | None) -> None:
        if self._reader.stream is self:
            self._reader.stream = None
            self._reader.cut += not self._may_break_off
        self.closed.set()


class Crowd:
    """Readers who read inside of `async with`."""

    def __init__(self, readers: Sequence[Reader]) -> None:
        self._readers = readers

    async def __aenter__(self) -> Self:
        self._reading = [asyncio.create_task(reader.run()) for reader in self._readers]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._reading:
            task.cancel()
        await asyncio.gather(*self._reading, return_exceptions=True)

    async def until(self, lack: str, holds: Callable[[Reader], object]) -> None:
        """Wait until `holds` is true for every reader; `lack` describes the others."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while late := sum(not holds(reader) for reader in self._readers):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{late} of {len(self._readers)} readers {lack}")
            await asyncio.sleep(LOOK_SECONDS)

    def faults(self, lines: int) -> list[str]:
        """Return what is wrong with what was read, where so many lines were written."""
        short = sum(reader.lines != lines for reader in self._readers)
        cut = sum(reader.cut for reader in self._readers)
        return [
            *(fault for reader in self._readers for fault in reader.faults),
            *([f"{short} readers did not get {lines} lines"] if short else []),
            *([f"{cut} streams broke off without an end"] if cut else []),
        ]
