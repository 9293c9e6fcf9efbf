"""What is asked again and what is not, and what an answer that is none is called."""

import math
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
import pytest
from scene import JOB, Scene, job, problem

from muster.client.client import Client
from muster.client.connection import LONGEST_PAUSE_SECONDS, STRANGE_SECONDS, TIMEOUT_SECONDS
from muster.client.errors import (
    Busy,
    ClientError,
    Conflict,
    HungUp,
    NotAllowed,
    NotFound,
    NotMuster,
    Refused,
    Unconfirmed,
    Unreachable,
    Unsendable,
    WrongPath,
)
from muster.client.job import ENDING_SECONDS, Job
from muster.client.outcomes import NOT_DONE
from muster.contracts.errors import InvalidEnvironment
from muster.ports import free_port


def test_a_question_is_asked_until_somebody_answers() -> None:
    scene = Scene(httpx.ConnectError, httpx.ReadError, problem(503, **{"Retry-After": "2"}), job())
    assert scene.client().job("a").id == "a"
    assert len(scene.requests) == 4
    assert 2.0 < scene.now < 3.0


def test_a_question_is_not_asked_for_ever() -> None:
    scene = Scene(httpx.ConnectError)
    words = "nobody answers at http://api: see whether it is up there"
    with pytest.raises(Unreachable, match=words) as caught:
        scene.client().job("a")
    assert 10.0 - LONGEST_PAUSE_SECONDS <= scene.now <= 10.0
    story = "".join(traceback.format_exception(caught.value))
    assert "httpx.ConnectError" not in story


def test_where_nobody_listens_one_who_was_never_answered_soon_gives_up() -> None:
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    def patience(**said: float) -> float:
        nonlocal now
        now = 0.0
        url = f"http://127.0.0.1:{free_port()}"
        with (
            Client(url, monotonic=lambda: now, sleep=sleep, **said) as client,
            pytest.raises(Unreachable, match="muster up"),
        ):
            client.job("a")
        return now

    assert STRANGE_SECONDS - LONGEST_PAUSE_SECONDS <= patience() <= STRANGE_SECONDS
    assert 30.0 - LONGEST_PAUSE_SECONDS <= patience(retry_seconds=30.0) <= 30.0


class NobodyListens(httpx.ConnectError):
    """Of a port at which nobody is at the moment."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.__cause__ = ConnectionRefusedError(message)


def test_who_was_answered_once_waits_for_an_api_that_is_replaced() -> None:
    scene = Scene(job(), *([NobodyListens] * 8), job(status="RUNNING"))
    client = scene.client(retry_seconds=None)
    assert client.job("a").refresh().status == "RUNNING"
    assert scene.now > STRANGE_SECONDS


@pytest.mark.parametrize("lost", [httpx.ReadError, httpx.RemoteProtocolError, httpx.ReadTimeout])
def test_who_was_never_answered_but_met_somebody_waits_for_an_api_that_is_replaced(
    lost: type[httpx.RequestError],
) -> None:
    scene = Scene(lost, *([NobodyListens] * 8), job())
    assert scene.client(retry_seconds=None).submit(world_size=1).id == "a"
    assert scene.now > STRANGE_SECONDS


def test_who_was_hung_up_on_in_the_middle_of_a_stream_has_met_somebody() -> None:
    scene = Scene(httpx.ReadError, *([NobodyListens] * 8), job())
    connection = scene.client(retry_seconds=None).connection
    with pytest.raises(HungUp), connection.stream("/jobs/a/logs/stream", {}, {}):
        pass
    assert connection.ask("GET", "/jobs/a").status == 200
    assert scene.now > STRANGE_SECONDS


def test_who_wants_to_be_asked_later_than_one_waits_is_believed_at_once() -> None:
    scene = Scene(problem(429, **{"Retry-After": "60"}))
    with pytest.raises(Busy) as caught:
        scene.client().job("a")
    assert (caught.value.retry_after_seconds, scene.now) == (60.0, 0.0)


def test_of_a_submission_that_was_lost_on_its_way_it_is_said_that_it_may_have_arrived() -> None:
    scene = Scene(httpx.ReadTimeout, httpx.ConnectError)
    with pytest.raises(Unconfirmed, match=r"may have been accepted all the same.*muster ps"):
        scene.client().submit(world_size=1)
    never_sent = Scene(httpx.ConnectError, problem(429), httpx.ConnectTimeout)
    with pytest.raises(Unreachable) as caught:
        never_sent.client().submit(world_size=1)
    assert not isinstance(caught.value, Unconfirmed)


@pytest.mark.parametrize("status", [502, 503, 504])
def test_who_says_not_now_may_have_passed_the_submission_on(status: int) -> None:
    with pytest.raises(Unconfirmed, match=r"Not so\. It may have been accepted") as caught:
        Scene(problem(status)).client().submit(world_size=1)
    lost = caught.value.lost
    assert not isinstance(caught.value, Unreachable)  # somebody has answered
    assert isinstance(lost, Busy)
    assert (lost.status, lost.request_id) == (status, "r")


@pytest.mark.parametrize("kind", sorted(NOT_DONE))
def test_what_the_api_says_it_has_not_done_was_not_accepted(kind: str) -> None:
    answer = problem(503, kind.removeprefix("/problems/"))
    with pytest.raises(Busy, match=r"^Not so\.$"):
        Scene(answer).client().submit(world_size=1)
    with pytest.raises(Unconfirmed):
        Scene(httpx.ReadTimeout, answer).client().submit(world_size=1)


def test_a_lost_plan_is_asked_again_and_may_not_have_been_accepted() -> None:
    scene = Scene(httpx.ReadTimeout)
    with pytest.raises(Unreachable) as caught:
        scene.client().plan(world_size=1)
    assert not isinstance(caught.value, Unconfirmed)
    assert len(scene.requests) > 1
    assert "Idempotency-Key" not in scene.requests[0].headers


def test_an_answer_that_cannot_be_unpacked_is_none() -> None:
    scene = Scene(httpx.DecodingError)
    with pytest.raises(HungUp):
        scene.client().job("a")


def test_a_submission_is_repeated_with_its_key_and_the_next_one_has_another() -> None:
    scene = Scene(httpx.ReadTimeout, httpx.ReadError, job())
    client = scene.client()
    client.submit(world_size=1)
    client.submit(world_size=1)
    keys = [request.headers["Idempotency-Key"] for request in scene.requests]
    assert keys[0] == keys[1] == keys[2] != keys[3]


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
def test_an_order_is_given_once(method: str, order: Callable[[Client, Job], object]) -> None:
    scene = Scene(job(), httpx.ReadError)
    client = scene.client()
    held = client.job("a")
    with pytest.raises(Unreachable):
        order(client, held)
    assert ([request.method for request in scene.requests[1:]], scene.now) == ([method], 0.0)


@pytest.mark.parametrize(
    ("status", "kind"),
    [(401, NotAllowed), (403, NotAllowed), (404, NotFound), (409, Conflict), (500, Refused)],
)
def test_a_refusal_is_told_in_the_servers_own_words(status: int, kind: type[Refused]) -> None:
    scene = Scene(problem(status))
    with pytest.raises(kind, match=r"^Not so\.$") as caught:
        scene.client().submit()
    told = caught.value
    assert (told.status, told.detail, told.type) == (status, "Not so.", "/problems/x")
    assert (told.errors, told.request_id) == ((), "r")
    assert len(scene.requests) == 1


def test_a_route_that_an_older_server_lacks_says_nothing_against_its_path() -> None:
    nowhere = problem(404, "not-found")
    scene = Scene(nowhere, job(), nowhere)
    client = scene.client(url="http://api/muster")
    with pytest.raises(WrongPath, match="serves nothing under /muster: set MUSTER_URL to http://a"):
        client.job("a")
    held = client.job("a")
    with pytest.raises(NotFound, match=r"^Not so\.$"):
        held.pause()
    with pytest.raises(NotFound), client.connection.stream("/jobs/a/new/stream", {}, {}):
        pass


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
    ids=["a page", "an error page", "a redirection", "other JSON", "no UTF-8", "no end"],
)
def test_a_stranger_is_recognised(answer: httpx.Response) -> None:
    with pytest.raises(NotMuster, match="what answers at http://api is not Muster"):
        list(Scene(answer).client().jobs())


@pytest.mark.parametrize(
    ("token", "environment", "sent"),
    [
        (None, {}, None),
        ("mst_1", {}, "Bearer mst_1"),
        (None, {"MUSTER_TOKEN": "mst_2"}, "Bearer mst_2"),
        ("mst_1", {"MUSTER_TOKEN": "mst_2"}, "Bearer mst_1"),
        ("mst_1\n", {}, "Bearer mst_1"),
    ],
)
def test_the_token_goes_with_every_request(
    monkeypatch: pytest.MonkeyPatch,
    token: str | None,
    environment: dict[str, str],
    sent: str | None,
) -> None:
    monkeypatch.delenv("MUSTER_TOKEN", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    scene = Scene(job())
    scene.client(token=token).job("a").stop()
    assert [request.headers.get("Authorization") for request in scene.requests] == [sent, sent]


def test_an_answer_that_waits_for_the_end_of_a_job_may_take_its_time() -> None:
    gone = {"job_id": "a", "deleted": True, "logs_deleted": True, "checkpoints_deleted": False}
    scene = Scene(job(), httpx.Response(200, json=gone))
    assert scene.client().job("a").delete(stop_first=True).deleted
    patience = [request.extensions["timeout"]["read"] for request in scene.requests]
    assert patience == [TIMEOUT_SECONDS, ENDING_SECONDS]


@pytest.mark.parametrize("token", ["m\nst", "mst_\N{EN DASH}"])
def test_a_token_that_is_none_is_not_sent_and_not_told(token: str) -> None:
    with pytest.raises(ClientError, match="copy it again") as caught:
        Client("http://api", token)
    assert token not in str(caught.value)


def test_what_json_cannot_hold_is_not_sent() -> None:
    scene = Scene(job())
    with pytest.raises(Unsendable, match="no UTF-8"):
        scene.client().submit(name="\udcff")
    assert not scene.requests
    scene.client().submit(dataset_dir=Path("/data"))
    assert scene.requests[0].content == b'{"dataset_dir":"/data"}'


def test_an_address_that_is_none_is_told_at_once() -> None:
    with pytest.raises(InvalidEnvironment, match="is not a URL such as"):
        Client("localhost:8000")
    with pytest.raises(Unsendable, match="correct MUSTER_URL"):
        Client("http://xn--é.é:80")


def _urls(requests: Sequence[httpx.Request]) -> list[str]:
    return [str(request.url) for request in requests]


def test_where_the_api_is_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MUSTER_HOST", raising=False)
    monkeypatch.delenv("MUSTER_URL", raising=False)
    monkeypatch.setenv("MUSTER_PORT", "8123")
    assert Client().url == "http://127.0.0.1:8123"
    monkeypatch.setenv("MUSTER_URL", "https://muster.example/")
    assert Client().url == "https://muster.example"


@pytest.mark.parametrize(
    "link", ["/jobs?limit=1&cursor=x", "http://elsewhere/jobs?limit=1&cursor=x"]
)
def test_the_next_page_is_asked_for_here_and_nowhere_else(link: str) -> None:
    first = httpx.Response(200, json={"jobs": [JOB]}, headers={"Link": f'<{link}>; rel="next"'})
    scene = Scene(first, httpx.Response(200, json={"jobs": []}))
    assert len(list(scene.client().jobs())) == 1
    assert _urls(scene.requests) == [
        "http://api/jobs?limit=1000",
        "http://api/jobs?limit=1&cursor=x",
    ]


def test_what_still_holds_is_not_given_again() -> None:
    tag = 'W/"1"'
    whole = httpx.Response(200, json={"jobs": []}, headers={"ETag": tag})
    scene = Scene(whole, httpx.Response(304, headers={"ETag": tag}))
    connection = scene.client().connection
    first = connection.ask("GET", "/jobs/summaries")
    again = connection.ask("GET", "/jobs/summaries", known_tag=first.tag)
    assert [first.is_unchanged, again.is_unchanged] == [False, True]
    assert [request.headers.get("If-None-Match") for request in scene.requests] == [None, tag]


@pytest.mark.parametrize("status", [408, 429, 502, 503, 504])
def test_a_status_that_passes_is_waited_for_though_it_comes_without_our_words(status: int) -> None:
    scene = Scene(httpx.Response(status, text="<html>Bad Gateway"), job())
    with scene.client() as client:
        assert client.job("a").id == "a"
    scene = Scene(httpx.Response(status))
    with scene.client() as client, pytest.raises(Busy, match="nobody to answer"):
        client.job("a")


def test_an_empty_choice_of_statuses_is_none_of_them_and_nobody_is_asked() -> None:
    scene = Scene(problem(500))
    with scene.client() as client:
        assert list(client.jobs(status=[])) == []
        assert client.purge(status=[], force=True).deleted == 0
    assert scene.requests == []


HELD_BY_ITSELF: list[object] = []
HELD_BY_ITSELF.append(HELD_BY_ITSELF)


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda client: client.submit(env={None: "x"}), "what JSON cannot say"),
        (lambda client: client.submit(labels=HELD_BY_ITSELF), "holds itself"),
        (lambda client: client.submit(metrics={"a": [1.0, math.nan]}), "holds nan"),
        (lambda client: client.submit(labels={math.inf}), "holds inf"),
        (lambda client: client.job("x" * 70_000), "no URL can hold"),
        (lambda client: client.job("\udcff"), "no UTF-8"),
    ],
    ids=[
        "other things",
        "what holds itself",
        "no number",
        "nor in a set",
        "a long word",
        "a word that is no text",
    ],
)
def test_what_has_not_the_form_of_a_request_is_not_sent(
    ask: Callable[[Client], object], said: str
) -> None:
    scene = Scene(job())
    with scene.client() as client, pytest.raises(Unsendable, match=said):
        ask(client)
    assert scene.requests == []
