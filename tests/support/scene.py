"""A scripted API for client tests, with a clock that needs no waiting."""

from dataclasses import dataclass
from typing import TypeAlias

import httpx

from muster.client.client import Client
from tests.support import summaries

JOB = {**summaries.JOB, "status": "QUEUED", "of_a_later_release": True}

Answer: TypeAlias = httpx.Response | type[httpx.RequestError]


@dataclass(frozen=True)
class Late:
    """An answer that takes its time."""

    seconds: float
    answer: Answer


class Scene:
    """Returns the given answers in order and repeats the last; sleeping advances the clock."""

    def __init__(self, *answers: Answer | Late) -> None:
        self.answers = list(answers)
        self.requests: list[httpx.Request] = []
        self.now = 0.0

    def client(
        self,
        retry_seconds: float | None = 10.0,
        token: str | None = None,
        url: str = "http://api",
    ) -> Client:
        return Client(
            url,
            token,
            retry_seconds=retry_seconds,
            monotonic=lambda: self.now,
            sleep=self._sleep,
            transport=httpx.MockTransport(self._answer),
        )

    def _sleep(self, seconds: float) -> None:
        self.now += seconds

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Late):
            self._sleep(answer.seconds)
            answer = answer.answer
        if isinstance(answer, httpx.Response):
            return answer
        raise answer("lost")


def job(**changes: object) -> httpx.Response:
    return httpx.Response(200, json={**JOB, **changes})


def problem(status: int, kind: str = "x", **headers: str) -> httpx.Response:
    said = {"status": status, "detail": "Not so.", "type": f"/problems/{kind}", "request_id": "r"}
    return httpx.Response(status, json=said, headers=headers)
