"""Logs are followed across lost connections, without gap or repetition."""

from collections.abc import Iterator

import httpx
import pytest

from muster.client.errors import Busy, NotFound, NotMuster, Unreachable
from muster.client.http import LONGEST_PAUSE_SECONDS
from muster.client.job import RECONNECT_SECONDS, follow_logs
from tests.support.scene import Late, Scene, problem

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


def events(content: bytes) -> httpx.Response:
    return httpx.Response(200, content=content, headers=EVENTS)


def broken(*chunks: bytes) -> httpx.Response:
    return httpx.Response(200, stream=Broken(*chunks), headers=EVENTS)


def lines(scene: Scene, rank: int | None = None, tail: int | None = None) -> list[tuple[int, str]]:
    found = follow_logs(scene.client().connection, "/jobs/a/logs/stream", rank, tail)
    return [(line.rank, line.line) for line in found]


def asked(scene: Scene) -> list[tuple[str, str | None]]:
    return [
        (request.url.query.decode(), request.headers.get("Last-Event-ID"))
        for request in scene.requests
    ]


def test_a_lost_stream_resumes_after_the_last_whole_event() -> None:
    scene = Scene(
        broken(FIRST, SECOND[:-3]), httpx.ConnectError, problem(503), events(SECOND), events(END)
    )
    assert lines(scene, tail=7) == [(3, "a"), (0, "b"), (0, "c")]
    first, *later = asked(scene)
    assert first == ("tail=7", None)
    assert later == [("", "0.0:2"), ("", "0.0:2"), ("", "0.0:2"), ("", "0.0:4")]


def test_a_lost_stream_resumes_where_it_began_without_lines() -> None:
    scene = Scene(broken(b"retry: 2000\nid: 0.0:7\n\n"), events(FIRST + END))
    assert lines(scene, tail=0) == [(3, "a")]
    assert asked(scene) == [("tail=0", None), ("", "0.0:7")]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_are_whole_however_they_are_cut(size: int) -> None:
    text = (
        "id: 0.0:0\nretry: 2000\n\n: ping\n\n"
        "id: 0.0:9\ndata: a\ndata:\ndata:  b \u2028 c \x0b d\n\n: ping\n\n"
        "id: 0.0:10\ndata: \n\n"
    ).encode()
    chunks = [text[start : start + size] for start in range(0, len(text), size)]
    scene = Scene(broken(*chunks, b"data: cut off\n"), events(END))
    assert lines(scene, rank=2) == [(2, "a"), (2, ""), (2, " b \u2028 c \x0b d"), (2, "")]


def test_a_finished_job_has_no_more_lines() -> None:
    assert lines(Scene(broken(FIRST), httpx.Response(204))) == [(3, "a")]


def test_the_lines_of_one_rank_are_taken_as_they_are() -> None:
    scene = Scene(events(FIRST + END))
    assert lines(scene, rank=2) == [(2, "[rank 3] a")]
    assert asked(scene) == [("rank=2", None)]


def test_a_stream_is_given_up_after_a_minute() -> None:
    scene = Scene(broken(FIRST), httpx.ConnectError)
    with pytest.raises(Unreachable):
        lines(scene)
    assert RECONNECT_SECONDS < scene.now < RECONNECT_SECONDS + 2 * LONGEST_PAUSE_SECONDS


def test_an_idle_stream_may_last_for_hours() -> None:
    scene = Scene(Late(3600, broken(b": ping\n\n")), httpx.ConnectError, events(FIRST + END))
    assert lines(scene) == [(3, "a")]


def not_now(seconds: int) -> httpx.Response:
    return problem(429, **{"Retry-After": str(seconds)})


def test_a_retry_after_is_respected() -> None:
    scene = Scene(not_now(30), not_now(20), events(FIRST + END))
    assert lines(scene) == [(3, "a")]
    assert scene.now == 50.0


PAGE = httpx.Response(200, html="<p>Log in, please.</p>\n\n")
REDIRECTION = httpx.Response(302, headers={"Location": "http://elsewhere/login"})


@pytest.mark.parametrize(
    ("answers", "kind", "requests"),
    [
        ([problem(404)], NotFound, 1),
        ([not_now(30)], Busy, 3),
        ([broken(FIRST), PAGE], NotMuster, 2),
        ([broken(FIRST), REDIRECTION], NotMuster, 2),
    ],
)
def test_a_refusal_ends_the_stream(
    answers: list[httpx.Response], kind: type[Exception], requests: int
) -> None:
    scene = Scene(*answers)
    with pytest.raises(kind):
        lines(scene)
    assert len(scene.requests) == requests
