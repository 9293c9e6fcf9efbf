"""Which requests are repeated, and which error a bad answer becomes."""

import traceback
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from muster.client.client import Client
from muster.client.errors import (
    Busy,
    ClientError,
    Conflict,
    ConnectionClosed,
    InvalidRequest,
    NotAllowed,
    NotFound,
    NotMuster,
    Refused,
    Unconfirmed,
    Unreachable,
    WrongPath,
)
from muster.client.http import (
    LONGEST_PAUSE_SECONDS,
    NOT_DONE,
    TIMEOUT_SECONDS,
)
from muster.client.job import ENDING_SECONDS, Job
from muster.contracts.errors import InvalidEnvironment
from tests.support.scene import JOB, Scene, job, problem

# Retries


def test_a_question_is_repeated_until_it_is_answered() -> None:
    scene = Scene(httpx.ConnectError, httpx.ReadError, problem(503, **{"Retry-After": "2"}), job())
    assert scene.client().job("a").id == "a"
    assert len(scene.requests) == 4
    assert 2.0 < scene.now < 3.0


def test_a_question_is_given_up_in_time() -> None:
    scene = Scene(httpx.ConnectError)
    with pytest.raises(Unreachable, match="no answer from http://api: check that it is") as caught:
        scene.client().job("a")
    assert 10.0 - LONGEST_PAUSE_SECONDS <= scene.now <= 10.0
    assert "httpx.ConnectError" not in "".join(traceback.format_exception(caught.value))


def test_a_retry_after_beyond_the_limit_ends_the_retries() -> None:
    scene = Scene(problem(429, **{"Retry-After": "60"}))
    with pytest.raises(Busy) as caught:
        scene.client().job("a")
    assert (caught.value.retry_after_seconds, scene.now) == (60.0, 0.0)


def test_what_an_answer_warns_of_is_said() -> None:
    answer = httpx.Response(200, json=JOB, headers={"Warning": '199 muster "it is on one disk"'})
    with pytest.warns(UserWarning, match="^it is on one disk$"):
        Scene(answer).client().job("a")


@pytest.mark.parametrize("status", [408, 429, 502, 503, 504])
def test_a_transient_status_is_retried_without_a_document(status: int) -> None:
    with Scene(httpx.Response(status, text="<html>Bad Gateway"), job()).client() as client:
        assert client.job("a").id == "a"
    with (
        Scene(httpx.Response(status)).client() as client,
        pytest.raises(Busy, match="overloaded or down"),
    ):
        client.job("a")


@pytest.mark.parametrize(
    ("method", "order"),
    [
        ("POST", lambda client, _: client.purge()),
        ("POST", lambda _, held: held.stop()),
        ("PATCH", lambda _, held: held.scale(2)),
        ("DELETE", lambda _, held: held.delete()),
    ],
    ids=["purge", "stop", "scale", "delete"],
)
def test_an_order_is_sent_once(method: str, order: Callable[[Client, Job], object]) -> None:
    scene = Scene(job(), httpx.ReadError)
    client = scene.client()
    held = client.job("a")
    with pytest.raises(Unreachable):
        order(client, held)
    assert ([request.method for request in scene.requests[1:]], scene.now) == ([method], 0.0)


def test_a_submission_is_repeated_under_its_own_key() -> None:
    scene = Scene(httpx.ReadTimeout, httpx.ReadError, job())
    client = scene.client()
    client.submit(world_size=1)
    client.submit(world_size=1)
    keys = [request.headers["Idempotency-Key"] for request in scene.requests]
    assert keys[0] == keys[1] == keys[2] != keys[3]


def test_a_plan_is_repeated_without_a_key() -> None:
    scene = Scene(httpx.ReadTimeout)
    with pytest.raises(Unreachable) as caught:
        scene.client().plan(world_size=1)
    assert not isinstance(caught.value, Unconfirmed)
    assert len(scene.requests) > 1
    assert "Idempotency-Key" not in scene.requests[0].headers


# Whether a lost submission may have arrived

LOST = {
    "lost after it was sent": ([httpx.ReadTimeout, httpx.ConnectError], Unconfirmed),
    "never sent": ([httpx.ConnectError, problem(429), httpx.ConnectTimeout], Unreachable),
    **{f"{status} of a proxy": ([problem(status)], Unconfirmed) for status in (502, 503, 504)},
    **{kind: ([problem(503, kind.removeprefix("/problems/"))], Busy) for kind in sorted(NOT_DONE)},
    "lost before it was refused": (
        [httpx.ReadTimeout, problem(503, "store-unavailable")],
        Unconfirmed,
    ),
}


@pytest.mark.parametrize(("answers", "kind"), LOST.values(), ids=LOST)
def test_a_lost_submission_says_whether_it_may_be_done(
    answers: list[httpx.Response], kind: type[ClientError]
) -> None:
    with pytest.raises(kind) as caught:
        Scene(*answers).client().submit(world_size=1)
    assert type(caught.value) is kind
    if isinstance(caught.value, Unconfirmed):
        assert "may have been accepted" in str(caught.value)
        assert str(caught.value.lost).removesuffix(".") in str(caught.value)


# Bad answers


@pytest.mark.parametrize(
    ("status", "kind"),
    [(401, NotAllowed), (403, NotAllowed), (404, NotFound), (409, Conflict), (500, Refused)],
)
def test_a_refusal_has_the_servers_own_sentence(status: int, kind: type[Refused]) -> None:
    scene = Scene(problem(status))
    with pytest.raises(kind, match=r"^Not so\.$") as caught:
        scene.client().submit()
    error = caught.value
    assert (error.status, error.detail, error.type) == (status, "Not so.", "/problems/x")
    assert (error.errors, error.request_id) == ((), "r")
    assert len(scene.requests) == 1


def test_a_wrong_path_is_named() -> None:
    client = Scene(problem(404, "not-found")).client(url="http://api/muster")
    with pytest.raises(WrongPath, match="serves nothing under /muster: set MUSTER_URL to http://a"):
        client.job("a")


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(200, text="<h1>hello</h1>"),
        httpx.Response(500, text="<h1>out of order</h1>"),
        httpx.Response(302, headers={"Location": "http://elsewhere"}),
        httpx.Response(200, json={"jobs": 7}),
        httpx.Response(200, content=b'{"jobs": "\xff"}'),
        httpx.Response(404, content=b"[" * 100_000),
    ],
    ids=["a page", "an error page", "a redirection", "other JSON", "not UTF-8", "no end"],
)
def test_another_service_is_recognised(answer: httpx.Response) -> None:
    with pytest.raises(NotMuster, match="the server at http://api is not Muster"):
        list(Scene(answer).client().jobs())


def test_a_body_that_cannot_be_unpacked_is_no_answer() -> None:
    with pytest.raises(ConnectionClosed):
        Scene(httpx.DecodingError).client().job("a")


# Headers, pages and limits


@pytest.mark.parametrize(
    ("token", "variable", "sent"),
    [
        (None, None, None),
        ("mst_1", None, "Bearer mst_1"),
        (None, "mst_2", "Bearer mst_2"),
        ("mst_1", "mst_2", "Bearer mst_1"),
        ("mst_1\n", None, "Bearer mst_1"),
    ],
)
def test_every_request_carries_the_token(
    monkeypatch: pytest.MonkeyPatch, token: str | None, variable: str | None, sent: str | None
) -> None:
    monkeypatch.delenv("MUSTER_TOKEN", raising=False)
    if variable is not None:
        monkeypatch.setenv("MUSTER_TOKEN", variable)
    scene = Scene(job())
    scene.client(token=token).job("a").stop()
    assert [request.headers.get("Authorization") for request in scene.requests] == [sent, sent]


def test_a_response_that_waits_for_jobs_may_take_longer() -> None:
    gone = {"job_id": "a", "deleted": True, "logs_deleted": True, "checkpoints_deleted": False}
    scene = Scene(job(), httpx.Response(200, json=gone))
    assert scene.client().job("a").delete(stop_first=True).deleted
    limits = [request.extensions["timeout"]["read"] for request in scene.requests]
    assert limits == [TIMEOUT_SECONDS, ENDING_SECONDS]


@pytest.mark.parametrize(
    "link", ["/jobs?limit=1&cursor=x", "http://elsewhere/jobs?limit=1&cursor=x"]
)
def test_the_next_page_is_read_from_the_same_server(link: str) -> None:
    first = httpx.Response(200, json={"jobs": [JOB]}, headers={"Link": f'<{link}>; rel="next"'})
    scene = Scene(first, httpx.Response(200, json={"jobs": []}))
    assert len(list(scene.client().jobs())) == 1
    assert [str(request.url) for request in scene.requests] == [
        "http://api/jobs?limit=1000",
        "http://api/jobs?limit=1&cursor=x",
    ]


def test_the_address_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MUSTER_HOST", raising=False)
    monkeypatch.delenv("MUSTER_URL", raising=False)
    monkeypatch.setenv("MUSTER_PORT", "8123")
    assert Client().url == "http://127.0.0.1:8123"
    monkeypatch.setenv("MUSTER_URL", "https://muster.example/")
    assert Client().url == "https://muster.example"


# Requests that cannot be sent


def test_an_invalid_address_is_reported_at_once() -> None:
    with pytest.raises(InvalidEnvironment, match="is not a URL such as"):
        Client("localhost:8000")
    with pytest.raises(InvalidRequest, match="correct MUSTER_URL"):
        Client("http://xn--é.é:80")


@pytest.mark.parametrize("token", ["m\nst", "mst_\N{EN DASH}"])
def test_an_invalid_token_is_neither_sent_nor_shown(token: str) -> None:
    with pytest.raises(ClientError, match="copy it again") as caught:
        Client("http://api", token)
    assert token not in str(caught.value)


def test_a_path_is_sent_as_text() -> None:
    scene = Scene(job())
    scene.client().submit(dataset_dir=Path("/data"))
    assert scene.requests[0].content == b'{"dataset_dir":"/data"}'


def test_an_empty_list_of_statuses_sends_nothing() -> None:
    scene = Scene(problem(500))
    with scene.client() as client:
        assert list(client.jobs(status=[])) == []
        assert client.purge(status=[], force=True).deleted == 0
    assert scene.requests == []


CYCLE: list[object] = []
CYCLE.append(CYCLE)

UNSENDABLE: dict[str, tuple[Callable[[Client], object], str]] = {
    "a key that is no text": (lambda client: client.submit(env={None: "x"}), "not JSON"),
    "a cycle": (lambda client: client.submit(labels=CYCLE), "contains itself"),
    "a text that is not Unicode": (
        lambda client: client.submit(name="\udcff"),
        "not valid Unicode",
    ),
    "a long path": (lambda client: client.job("x" * 70_000), "no URL can hold"),
    "a surrogate in the path": (lambda client: client.job("\udcff"), "not valid Unicode"),
}


@pytest.mark.parametrize(("ask", "error"), UNSENDABLE.values(), ids=UNSENDABLE)
def test_an_invalid_request_is_not_sent(ask: Callable[[Client], object], error: str) -> None:
    scene = Scene(job())
    with scene.client() as client, pytest.raises(InvalidRequest, match=error):
        ask(client)
    assert scene.requests == []
