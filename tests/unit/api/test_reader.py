"""Who reads, however slowly, is left alone; who takes nothing is given up."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from starlette.types import Receive, Scope, Send
from uvicorn import Config
from uvicorn.server import ServerState

from api.protocol import DeadlineProtocol
from api.reader import PROGRESS_BYTES, Reader


@dataclass
class Timer:
    """A call that is made by hand."""

    call: Callable[[], None]
    is_cancelled: bool = False

    def cancel(self) -> None:
        self.is_cancelled = True


@dataclass
class Scene:
    """A loop and a transport, with so much in its buffer."""

    unread_bytes: int = 0
    timers: list[Timer] = field(default_factory=list)
    given_up: int = 0

    def call_later(self, _seconds: float, call: Callable[..., None], *values: int) -> Timer:
        self.timers.append(Timer(lambda: call(*values)))
        return self.timers[-1]

    def get_write_buffer_size(self) -> int:
        return self.unread_bytes

    def write(self, _data: bytes) -> None:
        """Leave to the test what is in the buffer."""

    def get_extra_info(self, _name: str) -> None:
        """Know nobody at either end."""

    def is_closing(self) -> bool:
        return False

    def give_up(self) -> None:
        self.given_up += 1

    def pass_time(self) -> None:
        due, self.timers = self.timers, []
        for timer in due:
            if not timer.is_cancelled:
                timer.call()


@pytest.fixture
def scene() -> Scene:
    return Scene()


@pytest.fixture
def reader(scene: Scene) -> Reader:
    return Reader(scene, scene, scene.give_up, look_seconds=1.0)


def test_what_was_taken_at_once_is_not_watched(scene: Scene, reader: Reader) -> None:
    reader.watch()
    assert not scene.timers


def test_who_takes_nothing_is_given_up(scene: Scene, reader: Reader) -> None:
    scene.unread_bytes = 10 * PROGRESS_BYTES
    reader.watch()
    reader.watch()
    assert len(scene.timers) == 1
    scene.unread_bytes -= PROGRESS_BYTES - 1
    scene.pass_time()
    assert scene.given_up == 1
    assert not scene.timers


def test_who_reads_on_is_left_alone_to_the_end(scene: Scene, reader: Reader) -> None:
    scene.unread_bytes = 2 * PROGRESS_BYTES
    reader.watch()
    while scene.unread_bytes:
        scene.unread_bytes -= PROGRESS_BYTES
        scene.pass_time()
    assert (scene.given_up, scene.timers) == (0, [])


def test_who_has_caught_up_is_not_judged_by_what_came_later(scene: Scene, reader: Reader) -> None:
    scene.unread_bytes = PROGRESS_BYTES
    reader.watch()
    reader.trust()
    scene.unread_bytes *= 2
    scene.pass_time()
    assert scene.given_up == 0


def test_each_answer_of_a_connection_is_judged_by_itself(scene: Scene, reader: Reader) -> None:
    scene.unread_bytes = PROGRESS_BYTES
    reader.watch()
    scene.unread_bytes = 0
    reader.expect_more()
    scene.unread_bytes = PROGRESS_BYTES
    scene.pass_time()
    assert scene.given_up == 0
    reader.watch()
    scene.pass_time()
    assert scene.given_up == 1


def test_who_asks_for_more_and_has_not_taken_the_last_answer_gains_no_time(
    scene: Scene, reader: Reader
) -> None:
    scene.unread_bytes = PROGRESS_BYTES
    reader.watch()
    reader.expect_more()
    scene.pass_time()
    assert scene.given_up == 1


def test_a_request_begins_anew(scene: Scene, reader: Reader) -> None:
    async def leaving_a_rest(_scope: Scope, _receive: Receive, send: Send) -> None:
        scene.unread_bytes = PROGRESS_BYTES
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    class Watched(DeadlineProtocol):
        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self._reader = reader

    async def ask_twice() -> None:
        config = Config(leaving_a_rest, lifespan="off", log_config=None)
        connection = Watched(config, ServerState(), {}, asyncio.get_running_loop())
        connection.connection_made(scene)
        for _ in range(2):
            scene.unread_bytes = 0
            connection.data_received(b"GET / HTTP/1.1\r\n\r\n")
            await asyncio.gather(*connection.tasks)

    asyncio.run(ask_twice())
    assert [timer.is_cancelled for timer in scene.timers] == [True, False]
