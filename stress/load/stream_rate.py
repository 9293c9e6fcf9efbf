"""How fast one reader gets an existing log, compared with a plain copy of the same bytes."""

import multiprocessing
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import httptools

from tests.support.log_follower import events

PIECE_BYTES = 1 << 16
RECEIVE_BYTES = 1 << 20
TIMEOUT_SECONDS = 60.0


@contextmanager
def plain_copies(path: Path, place: AbstractContextManager[None]) -> Iterator[int]:
    """Serve a file over plain TCP from a process started in `place`; yield the port."""
    spawning = multiprocessing.get_context("spawn")
    ours, theirs = spawning.Pipe()
    process = spawning.Process(target=_copy, args=(path, theirs))
    with place:
        process.start()
    try:
        yield ours.recv()
    finally:
        process.kill()
        process.join()


def _copy(path: Path, ready: Connection) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ready.send(listener.getsockname()[1])
        while True:
            client, _ = listener.accept()
            with client, path.open("rb") as file:
                while piece := file.read(PIECE_BYTES):
                    client.sendall(piece)


def received(port: int, request: bytes = b"") -> tuple[float, bytes]:
    """Read until the end of the connection; return the seconds and the bytes."""
    with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_SECONDS) as connection:
        began = time.monotonic()
        connection.sendall(request)
        got = bytearray()
        while piece := connection.recv(RECEIVE_BYTES):
            got += piece
        return time.monotonic() - began, bytes(got)


def stream_request(job_id: str) -> bytes:
    return (
        f"GET /jobs/{job_id}/logs/stream HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
    ).encode()


def lines_in(answer: bytes) -> list[str]:
    """Return the lines of rank 0 in a whole answer of a stream."""
    parts: list[bytes] = []

    class Parts:
        on_body: Callable[[bytes], None] = parts.append

    httptools.HttpResponseParser(Parts()).feed_data(answer)
    found = (event for event in events(parts) if not event.kind)
    return [line.removeprefix("[rank 0] ") for event in found for line in event.data]
