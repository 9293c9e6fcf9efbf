"""A stream goes on while its token holds, and has an end when it does not."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import anyio
from starlette.types import Message

from api.visit import Visit

START = {"type": "http.response.start", "status": 200, "headers": []}
LINE = {"type": "http.response.body", "body": b"line", "more_body": True}
LAST = {"type": "http.response.body", "body": b"last"}
GONE = {"type": "http.disconnect"}


@dataclass
class Client:
    """Says what it has to say, then listens for ever."""

    says: Iterator[Message] = field(default_factory=lambda: iter([]))
    heard: list[Message] = field(default_factory=list)

    async def receive(self) -> Message:
        for message in self.says:
            return message
        return await asyncio.get_running_loop().create_future()

    async def send(self, message: Message) -> None:
        self.heard.append(message)


def visit_of(client: Client, known: Sequence[bool] = ()) -> Visit:
    """Return a visit that is known as often as `known` says."""
    answers = iter(known)

    async def is_known() -> bool:
        return next(answers)

    return Visit(client.receive, client.send, is_known, recheck_seconds=0.0)


async def at_once(visit: Visit) -> Message | None:
    """Return what there is without waiting, as `Request.is_disconnected` does."""
    with anyio.CancelScope() as scope:
        scope.cancel()
        return await visit.receive()
    return None


async def stream(visit: Visit, *messages: Message) -> Message:
    """Answer as an application does that streams until its client has left."""
    for message in messages:
        await visit.send(message)
    left = await visit.receive()
    await visit.end()
    return left


def test_what_a_client_sends_is_passed_on() -> None:
    body = {"type": "http.request", "body": b"{}"}
    assert asyncio.run(visit_of(Client(iter([body]))).receive()) == body


def test_who_only_asks_whether_the_client_has_left_is_told_so_in_time() -> None:
    async def poll() -> list[Message | None]:
        visit = visit_of(Client(iter([GONE])))
        found = [await at_once(visit)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return [*found, await at_once(visit)]

    assert asyncio.run(poll()) == [None, GONE]


def test_who_only_asks_is_told_that_a_token_holds_no_more() -> None:
    async def poll() -> Message:
        visit = visit_of(Client(), [True, False])
        for _ in range(100):
            if (found := await at_once(visit)) is not None:
                return found
            await asyncio.sleep(0)
        raise AssertionError

    assert asyncio.run(poll()) == GONE


def test_nothing_is_waited_for_when_a_visit_is_over() -> None:
    async def leave() -> int:
        visit = visit_of(Client())
        assert await at_once(visit) is None
        await visit.end()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return len(asyncio.all_tasks())

    assert asyncio.run(leave()) == 1


def test_a_stream_is_finished_once_its_token_holds_no_more() -> None:
    client = Client()
    assert asyncio.run(stream(visit_of(client, [True, True, False]), START, LINE)) == GONE
    assert client.heard == [START, LINE, {"type": "http.response.body"}]


def test_an_answer_that_is_finished_is_left_alone() -> None:
    client = Client()
    assert asyncio.run(stream(visit_of(client, [False]), START, LINE, LAST)) == GONE
    assert client.heard == [START, LINE, LAST]


def test_an_answer_that_broke_off_by_itself_is_not_made_to_look_whole() -> None:
    client = Client(iter([GONE]))
    assert asyncio.run(stream(visit_of(client), START, LINE)) == GONE
    assert client.heard == [START, LINE]
