"""Clients that send requests while a component fails, and check every response."""

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

import httpx

ANSWER_SECONDS = 30.0
"""Every request is answered within this time, whatever state the database is in."""

CALLERS = 4


@dataclass
class Callers:
    """Threads that poll the API and submit jobs with idempotency keys."""

    url: str
    job_id: str
    statuses: Counter[int] = field(default_factory=Counter)
    slowest_seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)
    acknowledged: dict[str, str] = field(default_factory=dict)
    """Idempotency key → the job in the response."""
    keys: list[str] = field(default_factory=list)
    _ended: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> Self:
        for number in range(CALLERS):
            work = self._submit if number == 0 else self._look
            self._threads.append(threading.Thread(target=work))
            self._threads[-1].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def retry(self) -> None:
        """Repeat the requests that were not acknowledged, as a client does."""
        with self._client() as client:
            for key in self.keys:
                answer = self._post(client, key)
                assert answer.status_code == httpx.codes.CREATED, answer.text
                job_id = answer.json()["job_id"]
                if self.acknowledged.setdefault(key, job_id) != job_id:
                    self.wrong.append(f"{key} was answered with two jobs")

    def _client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=ANSWER_SECONDS, trust_env=False)

    def _look(self) -> None:
        paths = [f"/jobs/{self.job_id}", f"/jobs/{self.job_id}/summary", "/jobs", "/health"]
        with self._client() as client:
            while not self._ended.is_set():
                for path in paths:
                    self._note(lambda path=path: client.get(path))
                self._ended.wait(0.02)

    def _submit(self) -> None:
        with self._client() as client:
            while not self._ended.is_set():
                self.keys.append(f"key-{len(self.keys)}")
                answer = self._note(lambda: self._post(client, self.keys[-1]))
                if answer is not None and answer.status_code == httpx.codes.CREATED:
                    self.acknowledged[self.keys[-1]] = answer.json()["job_id"]
                self._ended.wait(0.2)

    def _post(self, client: httpx.Client, key: str) -> httpx.Response:
        body = {"world_size": 1, "command": ["true"], "name": key}
        return client.post("/jobs", json=body, headers={"Idempotency-Key": key})

    def _note(self, ask: Callable[[], httpx.Response]) -> httpx.Response | None:
        began = time.monotonic()
        try:
            answer = ask()
        except httpx.HTTPError as error:
            self.wrong.append(f"no answer: {error!r}")
            return None
        self.slowest_seconds = max(self.slowest_seconds, time.monotonic() - began)
        self.statuses[answer.status_code] += 1
        self._judge(answer)
        return answer

    def _judge(self, answer: httpx.Response) -> None:
        if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE:
            kind = answer.headers["content-type"]
            if kind != "application/problem+json" or "retry-after" not in answer.headers:
                self.wrong.append(f"an error that is not a problem document: {answer.text}")
            if "Traceback" in answer.text or len(answer.json()["detail"]) < len("a sentence"):
                self.wrong.append(f"an error without a sentence: {answer.text}")
        elif not answer.is_success:
            self.wrong.append(f"{answer.status_code}: {answer.text}")
