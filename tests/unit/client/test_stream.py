"""Logs are followed across lost connections, without gap or repetition."""

from collections.abc import Iterator

import httpx
import pytest

from muster.client.errors import Busy, NotFound, NotMuster, Unreachable
from muster.client.http import LONGEST_PAUSE_SECONDS, Connection
from muster.client.stream import RECONNECT_SECONDS, follow

EVENTS = {"Content-Type": "text/event-stream; charset=utf-8"}

FIRST = b"id: 0.0:2\ndata: [rank 3] a\n\n"
SECOND = b"id: 0.0:4\ndata: [rank 0] b\ndata: c\n\n"
END = b'event: end\ndata: {"status": "COMPLETED"}\nid: 0.0:4\n\n'


class Broken(httpx.SyncByteStream):
    """A stream that is lost after its bytes."""

    def __init__(self, *chunks: bytes) -> None:
        self._chunks = chunks

    def __iter__(self) -> Iterator[bytes]:
        yield from self._chunks
        raise httpx.ReadError("lost")


class Scene:
    """Answers in turn, the last one for ever; time passes with each sleep."""

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
                document = {"status": status, "detail": "Not so."}
                return httpx.Response(status, json=document if status != 204 else None)
            case _:
                raise httpx.ConnectError("no connection")


def test_a_lost_stream_resumes_after_the_last_whole_event() -> None:
    scene = Scene(Broken(FIRST, SECOND[:-3]), None, 503, SECOND, END)
    assert scene.lines(tail=7) == [(3, "a"), (0, "b"), (0, "c")]
    first, *later = scene.asked
    assert first == ("tail=7", None)
    assert later == [("", "0.0:2"), ("", "0.0:2"), ("", "0.0:2"), ("", "0.0:4")]


def test_a_lost_stream_resumes_where_it_began_without_lines() -> None:
    scene = Scene(Broken(b"retry: 2000\nid: 0.0:7\n\n"), FIRST + END)
    assert scene.lines(tail=0) == [(3, "a")]
    assert scene.asked == [("tail=0", None), ("", "0.0:7")]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_are_whole_however_they_are_cut(size: int) -> None:
    text = (
        "id: 0.0:0\nretry: 2000\n\n: ping\n\n"
        "id: 0.0:9\ndata: a\ndata:\ndata:  b \u2028 c \x0b d\n\n: ping\n\n"
        "id: 0.0:10\ndata: \n\n"
    ).encode()
    chunks = [text[start : start + size] for start in range(0, len(text), size)]
    lines = Scene(Broken(*chunks, b"data: cut off\n"), END).lines(rank=2)
    assert lines == [(2, "a"), (2, ""), (2, " b \u2028 c \x0b d"), (2, "")]


def test_a_finished_job_has_no_more_lines() -> None:
    assert Scene(Broken(FIRST), 204).lines() == [(3, "a")]


def test_the_lines_of_one_rank_are_taken_as_they_are() -> None:
    scene = Scene(FIRST + END)
    assert scene.lines(rank=2) == [(2, "[rank 3] a")]
    assert scene.asked == [("rank=2", None)]


def test_a_stream_is_given_up_after_a_minute() -> None:
    scene = Scene(Broken(FIRST), None)
    with pytest.raises(Unreachable):
        scene.lines()
    assert RECONNECT_SECONDS < scene.now < RECONNECT_SECONDS + 2 * LONGEST_PAUSE_SECONDS


def test_an_idle_stream_may_last_for_hours() -> None:
    scene = Scene(None, FIRST + END)

    class Silent(httpx.SyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            scene.now += 3600
            yield b": ping\n\n"
            raise httpx.ReadError("lost")

    scene.answers.insert(0, Silent())
    assert scene.lines() == [(3, "a")]


def not_now(retry_after_seconds: int) -> httpx.Response:
    document = {"status": 429, "detail": "Not now."}
    return httpx.Response(429, json=document, headers={"Retry-After": str(retry_after_seconds)})


def test_a_retry_after_is_respected() -> None:
    scene = Scene(not_now(30), not_now(20), FIRST + END)
    assert scene.lines() == [(3, "a")]
    assert scene.now == 50.0


PAGE = httpx.Response(200, html="<p>Log in, please.</p>\n\n")
REDIRECTION = httpx.Response(302, headers={"Location": "http://elsewhere/login"})


@pytest.mark.parametrize(
    ("answers", "kind", "requests"),
    [
        ([404], NotFound, 1),
        ([not_now(30)], Busy, 3),
        ([Broken(FIRST), PAGE], NotMuster, 2),
        ([Broken(FIRST), REDIRECTION], NotMuster, 2),
    ],
)
def test_a_refusal_ends_the_stream(
    answers: list[object], kind: type[Exception], requests: int
) -> None:
    scene = Scene(*answers)
    with pytest.raises(kind):
        scene.lines()
    assert len(scene.asked) == requests
