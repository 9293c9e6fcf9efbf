"""A job that a script holds: waited for it is, and no other one, and for as long as was said."""

import httpx
import pytest
import summaries
from scene import Late, Scene, job, problem

from muster.client.connection import LATE_SECONDS, LONGEST_PAUSE_SECONDS, TIMEOUT_SECONDS
from muster.client.errors import Replaced, Unreachable, WaitTimedOut
from muster.client.job import BREATH_SECONDS


def over() -> httpx.Response:
    return job(status="COMPLETED", is_terminal=True)


def test_a_wait_is_a_question_that_is_answered_late() -> None:
    scene = Scene(job(), job(), over())
    assert scene.client().job("a").wait(until="running").is_terminal
    assert [str(request.url) for request in scene.requests[1:]] == [
        "http://api/jobs/a?until=RUNNING&wait=30.0"
    ] * 2
    patience = scene.requests[1].extensions["timeout"]["read"]
    assert patience == TIMEOUT_SECONDS + 30.0
    assert scene.now < LONGEST_PAUSE_SECONDS


@pytest.mark.parametrize("timeout_seconds", [0, 0.3, 5, 70])
def test_a_wait_has_its_end_though_nobody_is_there_to_say_so(timeout_seconds: float) -> None:
    scene = Scene(job(), httpx.ConnectError)
    held = scene.client(retry_seconds=80).job("a")
    with pytest.raises(WaitTimedOut, match=r"a was QUEUED when last seen.* nobody answers") as told:
        held.wait(timeout_seconds=timeout_seconds)
    assert isinstance(told.value.lost, Unreachable)
    assert scene.now == pytest.approx(timeout_seconds)


def test_a_wait_has_its_end_though_it_cannot_be_drawn() -> None:
    scene = Scene(job(), job(), httpx.ConnectError)
    with pytest.raises(WaitTimedOut):
        scene.client(retry_seconds=60).job("a").wait(timeout_seconds=5, progress=True)
    assert scene.now == pytest.approx(5)


def test_nothing_of_a_wait_may_take_longer_than_it() -> None:
    summary = httpx.Response(200, json=summaries.SUMMARY)
    scene = Scene(job(), Late(4.0, job()), summary, httpx.ConnectTimeout)
    with pytest.raises(WaitTimedOut):
        scene.client().job("a").wait(timeout_seconds=5, progress=True)
    limits = [request.extensions["timeout"] for request in scene.requests[1:]]
    longest = [max(one["connect"], one["read"]) for one in limits]
    assert longest[:2] == [5 + LATE_SECONDS, 1 + LATE_SECONDS]
    assert max(longest[2:]) <= 1 + LATE_SECONDS


def test_a_wait_that_has_long_to_go_is_given_up_where_nobody_answers() -> None:
    scene = Scene(job(), httpx.ConnectError)
    with pytest.raises(Unreachable):
        scene.client(retry_seconds=10).job("a").wait(timeout_seconds=60)
    assert scene.now <= 10


def test_who_wants_to_be_asked_after_the_end_of_a_wait_is_not_asked_again() -> None:
    scene = Scene(job(), problem(429, **{"Retry-After": "30"}))
    with pytest.raises(WaitTimedOut, match="Not so"):
        scene.client().job("a").wait(timeout_seconds=5)
    assert (len(scene.requests), scene.now) == (2, 5.0)


def test_an_api_that_goes_away_in_the_middle_of_a_long_answer_is_missed_from_then_on() -> None:
    scene = Scene(job(), Late(25.0, httpx.ReadError), httpx.ConnectError, over())
    assert scene.client(retry_seconds=10).job("a").wait().is_terminal


def test_an_api_that_says_nothing_is_missed_from_the_beginning() -> None:
    scene = Scene(Late(TIMEOUT_SECONDS, httpx.ReadTimeout))
    with pytest.raises(Unreachable):
        scene.client(retry_seconds=10).job("a")
    assert len(scene.requests) == 1


def test_what_was_waited_for_is_so_though_it_cannot_be_drawn(
    capsys: pytest.CaptureFixture[str],
) -> None:
    scene = Scene(job(), over(), httpx.ConnectError)
    assert scene.client().job("a").wait(progress=True).is_terminal
    assert (len(scene.requests), capsys.readouterr().err) == (3, "")


def test_a_server_that_answers_too_early_is_not_asked_without_a_breath() -> None:
    def happened(*events: dict[str, object]) -> httpx.Response:
        return httpx.Response(200, json={"job_id": "a", "events": events})

    event = {"at": "2026-03-01T12:00:00Z", "kind": "ended", "message": "it is over"}
    ended = happened({**event, "rank": None, "incarnation": None, "event_id": 1})
    scene = Scene(job(), job(), happened(), job(), happened(), over(), ended, over(), happened())
    assert [each.message for each in scene.client().job("a").follow_events()] == ["it is over"]
    assert scene.now == pytest.approx(3 * BREATH_SECONDS)


def test_another_job_of_the_same_id_is_not_taken_for_this_one() -> None:
    scene = Scene(job(), job(job_uid="another"))
    with scene.client() as client:
        held = client.job("a")
        with pytest.raises(Replaced, match="a was deleted, and another job has its id"):
            held.wait()
    assert held.view.job_uid == "u"
