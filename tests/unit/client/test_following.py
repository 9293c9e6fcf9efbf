"""Lines are followed over every break, and not for ever where nobody comes back."""

from collections.abc import Iterator

import httpx
import pytest

from muster.client.connection import LONGEST_PAUSE_SECONDS, Connection
from muster.client.errors import Busy, NotFound, NotMuster, Unreachable
from muster.client.following import PATIENCE_SECONDS, follow

EVENTS = {"Content-Type": "text/event-stream; charset=utf-8"}

FIRST = b"id: 0.0:2\ndata: [rank 3] a\n\n"
SECOND = b"id: 0.0:4\ndata: [rank 0] b\ndata: c\n\n"
END = b'event: end\ndata: {"status": "COMPLETED"}\nid: 0.0:4\n\n'


class Broken(httpx.SyncByteStream):
    """A stream that breaks off after its bytes."""

    def __init__(self, *chunks: bytes) -> None:
        self._chunks = chunks

    def __iter__(self) -> Iterator[bytes]:
        yield from self._chunks
        raise httpx.ReadError("lost")


class Scene:
    """Answers in turn, and time that passes when somebody sleeps."""

    def __init__(self, *answers: object) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, str | None]] = []
        self.now = 0.0
        self.connection = Connection(
            "http://api",
            None,
            monotonic=lambda: self.now,
            sleep=self._sleep,
            transport=httpx.MockTransport(self._answer),
        )

    def lines(self, rank: int | None = None, tail: int | None = None) -> list[tuple[int, str]]:
        found = follow(self.connection, "/jobs/a/logs/stream", rank, tail)
        return [(line.rank, line.line) for line in found]

    def _sleep(self, seconds: float) -> None:
        self.now += seconds

    def _answer(self, request: httpx.Request) -> httpx.Response:
        query = request.url.query.decode()
        self.asked.append((query, request.headers.get("Last-Event-ID")))
        match self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]:
            case bytes() as body:
                return httpx.Response(200, content=body, headers=EVENTS)
            case httpx.SyncByteStream() as stream:
                return httpx.Response(200, stream=stream, headers=EVENTS)
            case httpx.Response() as response:
                return response
            case int() as status:
                said = {"status": status, "detail": "Not so."}
                return httpx.Response(status, json=said if status != 204 else None)
            case _:
                raise httpx.ConnectError("nobody")


def test_one_goes_on_after_the_last_whole_event() -> None:
    scene = Scene(Broken(FIRST, SECOND[:-3]), None, 503, SECOND, END)
    assert scene.lines(tail=7) == [(3, "a"), (0, "b"), (0, "c")]
    first, *later = scene.asked
    assert first == ("tail=7", None)
    assert later == [("", "0.0:2"), ("", "0.0:2"), ("", "0.0:2"), ("", "0.0:4")]


def test_who_asked_for_the_end_goes_on_from_there_though_no_line_had_come() -> None:
    scene = Scene(Broken(b"retry: 2000\nid: 0.0:7\n\n"), FIRST + END)
    assert scene.lines(tail=0) == [(3, "a")]
    assert scene.asked == [("tail=0", None), ("", "0.0:7")]


def test_a_job_that_is_over_and_told_of_has_no_more_lines() -> None:
    assert Scene(Broken(FIRST), 204).lines() == [(3, "a")]


def test_the_lines_of_one_rank_are_taken_as_they_are() -> None:
    scene = Scene(FIRST + END)
    assert scene.lines(rank=2) == [(2, "[rank 3] a")]
    assert scene.asked == [("rank=2", None)]


def test_a_minute_without_anybody_is_enough() -> None:
    scene = Scene(Broken(FIRST), None)
    with pytest.raises(Unreachable):
        scene.lines()
    assert PATIENCE_SECONDS < scene.now < PATIENCE_SECONDS + 2 * LONGEST_PAUSE_SECONDS


def test_a_stream_may_be_silent_for_hours_before_it_breaks() -> None:
    scene = Scene(None, FIRST + END)

    class Silent(httpx.SyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            scene.now += 3600
            yield b": ping\n\n"
            raise httpx.ReadError("lost")

    scene.answers.insert(0, Silent())
    assert scene.lines() == [(3, "a")]


def test_a_refusal_is_no_break() -> None:
    scene = Scene(404)
    with pytest.raises(NotFound):
        scene.lines()
    assert len(scene.asked) == 1


def not_now(retry_after_seconds: int) -> httpx.Response:
    said = {"status": 429, "detail": "Not now."}
    return httpx.Response(429, json=said, headers={"Retry-After": str(retry_after_seconds)})


def test_who_wants_to_be_left_alone_for_a_while_is() -> None:
    scene = Scene(not_now(30), not_now(20), FIRST + END)
    assert scene.lines() == [(3, "a")]
    assert scene.now == 50.0


def test_nobody_is_waited_for_who_wants_to_be_left_alone_for_longer_than_a_minute() -> None:
    scene = Scene(not_now(30))
    with pytest.raises(Busy):
        scene.lines()
    assert (len(scene.asked), scene.now) == (3, 60.0)


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(302, headers={"Location": "http://elsewhere/login"}),
        httpx.Response(200, html="<p>Log in, please.</p>\n\n"),
    ],
    ids=["a redirection", "a page"],
)
def test_the_page_of_a_stranger_is_no_stream_that_broke_off(answer: httpx.Response) -> None:
    scene = Scene(Broken(FIRST), answer)
    with pytest.raises(NotMuster):
        scene.lines()
    assert len(scene.asked) == 2
