"""Many readers follow one job; some reconnect; then the service is restarted."""

import asyncio
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stress.load.stream_crowd import Crowd, Reader, line_of
from stress.load.stream_service import StreamService
from stress.runner import chance
from tests.support.usage import processor_seconds

JOB = "followed"

STREAMS_PER_TOKEN = 60
"""Of the 64 requests that one caller may have open: the service's limits stay as they are."""

RESTLESS = 1 / 10
"""Of the readers leave once without a word, and come back at once."""

AFTERWARDS_SECONDS = 1.0
"""How long lines go on once all are back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """What came of it; delays are of readers who stayed, from a line's write to its receipt."""

    opened_seconds: float
    """From the first request until all have a stream."""
    delays: Sequence[float]
    core_share: float
    """Of the service's core, while lines came."""
    ended_seconds: float
    """From SIGTERM until the service is gone."""
    exit_code: int
    back_seconds: float
    """From the next service's start until all have a stream again."""
    resumed: int
    lines: int
    faults: Sequence[str]


async def follow(
    service: StreamService, *, clients: int, lines_per_second: float, seconds: float, seed: int
) -> Followed:
    """Let so many readers follow a job that writes at a steady rate."""
    service.run(JOB)
    draw = chance(seed)
    readers = _readers(service, clients)
    restless = draw.sample(readers, int(clients * RESTLESS))
    writer = Writer(service.files(JOB).log(0, 0), lines_per_second)
    began = time.monotonic()
    async with Crowd(readers) as crowd:
        await crowd.until("have no stream", lambda reader: reader.stream)
        opened = time.monotonic() - began
        loop = asyncio.get_running_loop()
        for reader in restless:
            loop.call_later(draw.uniform(0, seconds), reader.leave)
        began, used = time.monotonic(), processor_seconds(service.pid)
        writing = asyncio.create_task(writer.write_on())
        await asyncio.sleep(seconds)
        lines = writer.lines
        await crowd.until(f"did not get {lines} lines", lambda reader: reader.lines >= lines)
        share = (processor_seconds(service.pid) - used) / (time.monotonic() - began)
        delays = [delay for one in readers if one not in restless for delay in one.delays]
        began = time.monotonic()
        code = await asyncio.to_thread(service.service.end, signal.SIGTERM)
        ended = time.monotonic() - began
        await crowd.until("still have a stream", lambda reader: not reader.stream)
        await asyncio.to_thread(service.start)
        began = time.monotonic()
        await crowd.until("did not come back", lambda reader: reader.stream)
        back = time.monotonic() - began
        await asyncio.sleep(AFTERWARDS_SECONDS)
        writing.cancel()
        service.finish(JOB)
        await crowd.until("received no end", lambda reader: reader.has_ended)
    return Followed(
        opened_seconds=opened,
        delays=delays,
        core_share=share,
        ended_seconds=ended,
        exit_code=code,
        back_seconds=back,
        resumed=sum(reader.resumed for reader in readers),
        lines=writer.lines,
        faults=crowd.faults(writer.lines),
    )


def _readers(service: StreamService, count: int) -> list[Reader]:
    tokens = [service.token(f"crowd-{first}") for first in range(0, count, STREAMS_PER_TOKEN)]
    path = f"/jobs/{JOB}/logs/stream"
    return [
        Reader(port=service.port, path=path, token=tokens[number // STREAMS_PER_TOKEN])
        for number in range(count)
    ]


class Writer:
    """Writes numbered lines into a log, each when it is due."""

    def __init__(self, log: Path, lines_per_second: float) -> None:
        self._log = log
        self._pause_seconds = 1 / lines_per_second
        self.lines = 0

    async def write_on(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        with self._log.open("ab", buffering=0) as log:
            while True:
                log.write(line_of(self.lines))
                self.lines += 1
                due += self._pause_seconds
                await asyncio.sleep(due - loop.time())
