"""Small loads of `stress/load`: every line arrives once, however long it takes."""

import asyncio
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from stress.load.stream_follow import follow
from stress.load.stream_history import arrivals, questions, write_log
from stress.load.stream_service import StreamService
from tests.support.installation import await_value
from tests.support.log_follower import events


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StreamService]:
    with StreamService(tmp_path_factory.mktemp("stage")) as running:
        yield running


def test_many_readers_get_each_line_once(stage: StreamService) -> None:
    found = asyncio.run(follow(stage, clients=40, lines_per_second=100, seconds=1, seed=1))
    assert not found.faults
    assert found.exit_code == 0
    assert found.resumed >= 40


def test_every_query_of_a_long_log_is_answered(stage: StreamService) -> None:
    stage.run("long")
    files = stage.files("long")
    lines = write_log(files.log(0, 0), files.times(0, 0), 8 << 20)
    asked = questions("long", lines)
    found = dict(arrivals(stage.port, stage.pid, asked, read_on_bytes=1 << 20))
    assert found.keys() == asked.keys()


def test_a_stream_has_every_line(stage: StreamService) -> None:
    stage.run("whole")
    files = stage.files("whole")
    write_log(files.log(0, 0), files.times(0, 0), 4 << 20)
    stage.finish("whole")
    answer = httpx.get(f"{stage.service.url}/jobs/whole/logs/stream", timeout=60)
    got = [line for event in events([answer.content]) if not event.kind for line in event.data]
    written = files.log(0, 0).read_text().splitlines()
    assert got == [f"[rank 0] {line}" for line in written]


def test_a_reset_stream_leaves_no_open_file(stage: StreamService) -> None:
    stage.run("left")
    stage.files("left").log(0, 0).write_text("line\n" * 1000)
    read_and_reset(stage, after_bytes=1)  # the database is open, and all threads are there
    before = open_files(stage)
    for number in range(60):
        read_and_reset(stage, after_bytes=number % 3 * 1000)
    await_value(lambda: open_files(stage) <= before, lambda: f"{open_files(stage)} > {before}")


def read_and_reset(stage: StreamService, *, after_bytes: int) -> None:
    """Begin to read a stream, and reset the connection."""
    with socket.create_connection(("127.0.0.1", stage.port)) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.sendall(b"GET /jobs/left/logs/stream HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        while after_bytes > 0:
            after_bytes -= len(connection.recv(after_bytes))


def open_files(stage: StreamService) -> int:
    return len(list(Path(f"/proc/{stage.pid}/fd").iterdir()))
