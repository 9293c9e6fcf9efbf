"""Attackers of a service: some never finish a request, others exceed their limits.

``python -m stress.security.overload_clients PLAN`` follows the JSON of `Plan` and prints an
`Outcome`. Each client uses a different loopback address and, as root, a user id other than the
service's.
"""

import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from typing import TypeAlias

import msgspec

from tests.support.strangers import STRANGER, socket_of

SLOW_EACH = 60
"""Slow clients per user and token; below the limit of both."""

SLOW_SECONDS = 0.04
"""Between two starts: 200 are connected before the first is closed."""

DRIBBLE_SECONDS = 0.5
HOLD_SECONDS = 5.0
"""How long a slow client holds a connection."""

PATIENCE_SECONDS = 20.0
"""How long an answer is waited for."""

UNANSWERED = -1
"""The connection is open, but there was no response in time."""

FLOODERS = 4
FLOOD_LEAST = 8
"""Requests of each of them, however short the run is."""

NAMES_PAUSE_SECONDS = 0.1
STREAMS = 100

CROWD_SECONDS = 1.0
"""Between two bytes of a connection of the crowd."""

RETURN_SECONDS = 20.0
"""Within which a closed connection of the crowd is opened again."""

LONG_HEADER = b"a" * (200 << 10)
"""More than the limit of 128 KiB, and less than one read of asyncio."""

HEADER_LINES = b"GET /jobs HTTP/1.1\r\nhost: localhost\r\n" + b"a:\r\n" * 32_000 + b"\r\n"
HEADER_LINES_AT_ONCE = 48
"""Without a limit of header fields, they hold up all others for seconds."""

LARGE_BODY = b"x" * (2 << 20)
MANY_NAMES = [f"n{number}" for number in range(15_000)]
"""A query of them is below the limit of headers, 128 KiB, which refuses longer ones."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The service and the attacks."""

    port: int
    seconds: float
    slow: int
    tokens: dict[str, str]
    """Those of each crowd of slow clients, and of each kind of demand."""
    job_id: str
    crowd: int = 0
    """Connections of one other user without a token, instead of all else."""


def crowd_name(crowd: int) -> str:
    return f"slow clients {crowd}"


class Outcome(msgspec.Struct, kw_only=True):
    """What the attackers observed."""

    flood_seconds: float = 0.0
    """How long the flood has lasted: longer than it should where the service is slow."""
    statuses: dict[str, dict[int, int]] = {}
    """For each kind of demand: the answers; 0 for a connection that was closed without one."""

    def count(self, kind: str, status: int) -> None:
        counts = self.statuses.setdefault(kind, {})
        counts[status] = counts.get(status, 0) + 1


class Connection:
    """A raw HTTP connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, data: bytes) -> None:
        """Send as much as is taken; who is closed meanwhile learns it by reading."""
        with suppress(ConnectionError):
            self._writer.write(data)
            await self._writer.drain()

    async def status(self) -> int:
        """Return the status of the next answer, and leave what follows unread."""
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                return await self._status()
        except TimeoutError:
            return UNANSWERED
        except (ConnectionError, asyncio.IncompleteReadError):
            return 0

    async def _status(self) -> int:
        head = await self._reader.readuntil(b"\r\n\r\n")
        length = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-l")]
        await self._reader.readexactly(int(length[0].partition(b":")[2]) if length else 0)
        return int(head.split()[1])

    async def is_closed(self, within_seconds: float) -> bool:
        """Wait for the end of the connection."""
        try:
            async with asyncio.timeout(within_seconds):
                while await self._reader.read(1 << 16):
                    pass
        except TimeoutError:
            return False
        except ConnectionError:
            pass
        return True


Owing: TypeAlias = Callable[[Connection, str], Awaitable[object]]
"""Holds a connection without a complete request."""


class Attackers:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._end = time.monotonic() + plan.seconds
        self.outcome = Outcome()

    async def run(self) -> None:
        kinds = [_owes_header, _owes_body, _owes_everything]
        async with asyncio.TaskGroup() as group:
            for number in range(self._plan.crowd):
                group.create_task(self._return_again_and_again(_CROWD[number % len(_CROWD)]))
            if self._plan.crowd:
                return
            for number in range(self._plan.slow):
                kind, crowd = kinds[number % len(kinds)], number // SLOW_EACH
                group.create_task(self._slow_client(kind, crowd, number * SLOW_SECONDS))
            group.create_task(self._floods())
            group.create_task(self._long_headers())
            for _ in range(HEADER_LINES_AT_ONCE):
                group.create_task(self._repeat("header lines", [HEADER_LINES]))
            group.create_task(self._large_bodies())
            group.create_task(self._many_names())
            group.create_task(self._many_streams())

    # Incomplete requests

    async def _slow_client(self, owes: Owing, crowd: int, delay_seconds: float) -> None:
        await asyncio.sleep(delay_seconds)
        token = self._plan.tokens[crowd_name(crowd)]
        rounds = 0
        while not rounds or self._goes_on():
            rounds += 1
            async with _connected(self._plan.port, crowd) as connection:
                await owes(connection, token)

    async def _return_again_and_again(self, sent: tuple[bytes, bytes]) -> None:
        while self._goes_on():
            await asyncio.sleep(random.uniform(0, RETURN_SECONDS))  # noqa: S311  spreads them
            with suppress(OSError, TimeoutError):
                async with _connected(self._plan.port, 13) as connection:
                    await self._hold(connection, *sent)

    async def _hold(self, connection: Connection, first: bytes, again: bytes) -> None:
        await connection.send(first)
        while self._goes_on() and not await connection.is_closed(CROWD_SECONDS):
            await connection.send(again)

    # Requests beyond the limits

    async def _floods(self) -> None:
        began = time.monotonic()
        await asyncio.gather(*(self._flood() for _ in range(FLOODERS)))
        self.outcome.flood_seconds = time.monotonic() - began

    async def _flood(self) -> None:
        request = _head("GET", "/jobs?limit=1", self._plan.tokens["flood"])
        async with _connected(self._plan.port, 10) as connection:
            asked = 0
            while asked < FLOOD_LEAST or self._goes_on():
                asked += 1
                await connection.send(request)
                self.outcome.count("flood", await connection.status())

    async def _long_headers(self) -> None:
        head = _head("GET", "/jobs?limit=1", self._plan.tokens["long headers"])
        request = head.removesuffix(b"\r\n") + b"x-word: " + LONG_HEADER + b"\r\n\r\n"
        await self._repeat("long headers", [request])

    async def _large_bodies(self) -> None:
        token = self._plan.tokens["large bodies"]
        whole = _head("POST", "/jobs", token, length=len(LARGE_BODY)) + LARGE_BODY
        head = _head("POST", "/jobs", token, chunked=True)
        chunk = f"{len(LARGE_BODY):x}\r\n".encode() + LARGE_BODY + b"\r\n0\r\n\r\n"
        await self._repeat("large bodies", [whole, head + chunk])

    async def _many_names(self) -> None:
        query = f"GET /livez?{'&'.join(MANY_NAMES)} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode()
        body = json.dumps(dict.fromkeys(MANY_NAMES, 0)).encode()
        head = _head("POST", "/jobs", self._plan.tokens["many names"], length=len(body))
        await self._repeat("many names", [query, head + body], pause_seconds=NAMES_PAUSE_SECONDS)

    async def _repeat(
        self, kind: str, requests: Iterable[bytes], *, pause_seconds: float = DRIBBLE_SECONDS
    ) -> None:
        while self._goes_on():
            for request in requests:
                async with _connected(self._plan.port, 11) as connection:
                    sending = asyncio.create_task(connection.send(request))
                    self.outcome.count(kind, await connection.status())
                    sending.cancel()
            await asyncio.sleep(pause_seconds)

    async def _many_streams(self) -> None:
        path = f"/jobs/{self._plan.job_id}/logs/stream"
        # Each stream stays open until all have been requested.
        answered = asyncio.Barrier(STREAMS)
        await asyncio.gather(*(self._stream(path, answered) for _ in range(STREAMS)))

    async def _stream(self, path: str, answered: asyncio.Barrier) -> None:
        async with _connected(self._plan.port, 12) as connection:
            await connection.send(_head("GET", path, self._plan.tokens["streams"]))
            self.outcome.count("streams", await connection.status())
            await answered.wait()
            await self._rest()

    def _goes_on(self) -> bool:
        return time.monotonic() < self._end

    async def _rest(self) -> None:
        await asyncio.sleep(max(0.0, self._end - time.monotonic()))


async def _owes_header(connection: Connection, _token: str) -> bool:
    await connection.send(b"GET /jobs HTTP/1.1\r\nhost: localhost\r\nx-word: ")
    return await _dribbled(connection)


async def _owes_body(connection: Connection, token: str) -> bool:
    await connection.send(_head("POST", "/jobs", token, length=1000))
    return await _dribbled(connection)


async def _owes_everything(connection: Connection, _token: str) -> bool:
    return await connection.is_closed(HOLD_SECONDS)


async def _dribbled(connection: Connection) -> bool:
    began = time.monotonic()
    while time.monotonic() - began < HOLD_SECONDS:
        await connection.send(b"a")
        if await connection.is_closed(DRIBBLE_SECONDS):
            return True
    return False


@asynccontextmanager
async def _connected(port: int, stranger: int) -> AsyncIterator[Connection]:
    with socket_of(STRANGER + stranger) as channel:
        channel.setblocking(False)  # noqa: FBT003  its name
        channel.bind((f"127.0.1.{1 + stranger}", 0))
        async with asyncio.timeout(PATIENCE_SECONDS):
            await asyncio.get_running_loop().sock_connect(channel, ("127.0.0.1", port))
        reader, writer = await asyncio.open_connection(sock=channel)
        try:
            yield Connection(reader, writer)
        finally:
            writer.transport.abort()


def _head(method: str, path: str, token: str, *, length: int = 0, chunked: bool = False) -> bytes:
    body = "transfer-encoding: chunked" if chunked else f"content-length: {length}"
    return (
        f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {token}\r\n"
        f"content-type: application/json\r\n{body}\r\n\r\n"
    ).encode()


_CROWD = (
    (b"", b""),
    (b"GET /jobs HTTP/1.1\r\nhost: localhost\r\n", b""),
    (b"GET /jobs HTTP/1.1\r\nhost: localhost\r\nx-word: ", b"a"),
    (_head("POST", "/jobs", "none", chunked=True) + b"1\r\na\r\n" * 10_000, b"1\r\na\r\n"),
)
"""Silent, half a header, one byte a second, chunks: what is sent first, and each second."""


async def _attack(plan: Plan) -> Outcome:
    attackers = Attackers(plan)
    await attackers.run()
    return attackers.outcome


if __name__ == "__main__":
    outcome = asyncio.run(_attack(msgspec.json.decode(sys.argv[1], type=Plan)))
    sys.stdout.buffer.write(msgspec.json.encode(outcome))
