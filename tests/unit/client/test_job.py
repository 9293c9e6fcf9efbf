"""Waiting for a job: for the right one, and not longer than asked."""

import httpx
import pytest

from muster.client.errors import Replaced, Unreachable, WaitTimedOut
from muster.client.http import LATE_SECONDS, LONGEST_PAUSE_SECONDS, TIMEOUT_SECONDS
from muster.client.job import PAUSE_SECONDS
from tests.support import summaries
from tests.support.scene import Late, Scene, job, problem


def over() -> httpx.Response:
    return job(status="COMPLETED", is_terminal=True)


def test_a_wait_is_a_long_poll() -> None:
    scene = Scene(job(), job(), over())
    assert scene.client().job("a").wait(until="running").is_terminal
    assert [str(request.url) for request in scene.requests[1:]] == [
        "http://api/jobs/a?until=RUNNING&wait=30.0"
    ] * 2
    patience = scene.requests[1].extensions["timeout"]["read"]
    assert patience == TIMEOUT_SECONDS + 30.0
    assert scene.now < LONGEST_PAUSE_SECONDS


@pytest.mark.parametrize("timeout_seconds", [0, 0.3, 5, 70])
def test_a_wait_times_out_without_an_answer(timeout_seconds: float) -> None:
    scene = Scene(job(), httpx.ConnectError)
    held = scene.client(retry_seconds=80).job("a")
    with pytest.raises(WaitTimedOut, match=r"a was QUEUED when last seen.* no answer") as caught:
        held.wait(timeout_seconds=timeout_seconds)
    assert isinstance(caught.value.lost, Unreachable)
    assert scene.now == pytest.approx(timeout_seconds)


def test_a_wait_times_out_without_progress() -> None:
    scene = Scene(job(), job(), httpx.ConnectError)
    with pytest.raises(WaitTimedOut):
        scene.client(retry_seconds=60).job("a").wait(timeout_seconds=5, progress=True)
    assert scene.now == pytest.approx(5)


def test_no_request_takes_longer_than_the_wait() -> None:
    summary = httpx.Response(200, json=summaries.SUMMARY)
    scene = Scene(job(), Late(4.0, job()), summary, httpx.ConnectTimeout)
    with pytest.raises(WaitTimedOut):
        scene.client().job("a").wait(timeout_seconds=5, progress=True)
    limits = [request.extensions["timeout"] for request in scene.requests[1:]]
    longest = [max(one["connect"], one["read"]) for one in limits]
    assert longest[:2] == [5 + LATE_SECONDS, 1 + LATE_SECONDS]
    assert max(longest[2:]) <= 1 + LATE_SECONDS


def test_a_long_wait_ends_when_the_service_is_gone() -> None:
    scene = Scene(job(), httpx.ConnectError)
    with pytest.raises(Unreachable):
        scene.client(retry_seconds=10).job("a").wait(timeout_seconds=60)
    assert scene.now <= 10


def test_a_retry_after_beyond_the_wait_ends_it() -> None:
    scene = Scene(job(), problem(429, **{"Retry-After": "30"}))
    with pytest.raises(WaitTimedOut, match="Not so"):
        scene.client().job("a").wait(timeout_seconds=5)
    assert (len(scene.requests), scene.now) == (2, 5.0)


def test_retries_count_from_the_loss_of_a_long_answer() -> None:
    scene = Scene(job(), Late(25.0, httpx.ReadError), httpx.ConnectError, over())
    assert scene.client(retry_seconds=10).job("a").wait().is_terminal


def test_retries_count_from_the_start_of_a_silence() -> None:
    scene = Scene(Late(TIMEOUT_SECONDS, httpx.ReadTimeout))
    with pytest.raises(Unreachable):
        scene.client(retry_seconds=10).job("a")
    assert len(scene.requests) == 1


def test_a_successful_wait_ignores_a_lost_progress(capsys: pytest.CaptureFixture[str]) -> None:
    scene = Scene(job(), over(), httpx.ConnectError)
    assert scene.client().job("a").wait(progress=True).is_terminal
    assert (len(scene.requests), capsys.readouterr().err) == (3, "")


def test_early_answers_do_not_cause_a_busy_loop() -> None:
    def happened(*events: dict[str, object]) -> httpx.Response:
        return httpx.Response(200, json={"job_id": "a", "events": events})

    event = {"at": "2026-03-01T12:00:00Z", "kind": "ended", "message": "it is over"}
    ended = happened({**event, "rank": None, "attempt": None, "event_id": 1})
    scene = Scene(job(), job(), happened(), job(), happened(), over(), ended, over(), happened())
    assert [each.message for each in scene.client().job("a").follow_events()] == ["it is over"]
    assert scene.now == pytest.approx(3 * PAUSE_SECONDS)


def test_another_job_with_the_same_id_is_an_error() -> None:
    scene = Scene(job(), job(job_uid="another"))
    with scene.client() as client:
        held = client.job("a")
        with pytest.raises(Replaced, match="a was deleted, and another job has its id"):
            held.wait()
    assert held.view.job_uid == "u"
