"""One API over HTTP: a question is asked again while nobody answers, an order is given once.

An order may have been carried out though its answer was lost. With an idempotency key it can be
repeated all the same: the server then answers as the first time.
"""

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final, TypeAlias, TypeVar

import httpx
import msgspec

from muster.client.errors import (
    Busy,
    ClientError,
    HungUp,
    NotMuster,
    Refused,
    Unconfirmed,
    Unreachable,
    Unsendable,
    WrongPath,
)
from muster.client.outcomes import (
    UNREADABLE,
    is_refusal,
    leads_nowhere,
    may_have_arrived,
    refused,
    retry_after,
    unanswered,
    was_connected,
)
from muster.client.sendable import bearer, encoded, sendable

TIMEOUT_SECONDS: Final = 30.0
RETRY_SECONDS: Final = 10.0
"""An API that was killed is usually there again within two, as `muster up` sees to it."""

STRANGE_SECONDS: Final = 2.0
"""Instead of `RETRY_SECONDS`, where nobody listens and nobody ever was there: whoever has forgotten
to start it should soon hear so. Who hangs up, or is silent, was there."""

FIRST_PAUSE_SECONDS: Final = 0.1
LONGEST_PAUSE_SECONDS: Final = 1.0

LATE_SECONDS: Final = 2.0
"""How much later than its deadline an answer may come: the server, too, may wait until then."""

SILENCE_SECONDS: Final = 45.0
"""Three of the pings that a stream carries when it has nothing else to say."""

Query: TypeAlias = Mapping[str, str | int | float | bool | Sequence[str]]

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A good one."""

    url: str
    status: int
    body: bytes
    next_page: str | None
    """The path of the page after this one."""
    total: int | None
    """How many there are on all pages, where the server counts them."""
    tag: str | None
    """By which the server knows this answer again."""

    @property
    def is_unchanged(self) -> bool:
        """Whether it says no more than that the one with the known tag still holds."""
        return self.status == HTTPStatus.NOT_MODIFIED

    def read_as(self, kind: type[Value]) -> Value:
        """Return the body as a value; raises `NotMuster` if it is no such thing."""
        try:
            return msgspec.json.decode(self.body, type=kind)
        except UNREADABLE as error:
            raise NotMuster(self.url, self.status) from error


class Connection:
    """One API, with connections kept open until `close`."""

    def __init__(
        self,
        url: str,
        token: str | None,
        *,
        timeout_seconds: float = TIMEOUT_SECONDS,
        retry_seconds: float | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """`retry_seconds` is how long one goes on asking; `transport` is httpx's own seam.

        None is `RETRY_SECONDS`, or `STRANGE_SECONDS` where there may never have been anybody.
        """
        self.url = url
        self.monotonic = monotonic
        self.sleep = sleep
        self._retry_seconds = retry_seconds
        self._has_met_somebody = False
        self._is_served = False
        headers = {"Authorization": bearer(token)} if token else {}
        try:
            self._http = httpx.Client(
                base_url=url,
                headers=headers,
                timeout=timeout_seconds,
                transport=transport,
                trust_env=False,
            )
        except httpx.InvalidURL as error:
            raise Unsendable(f"{url} is no URL of an API: {error}; correct MUSTER_URL") from error

    def close(self) -> None:
        self._http.close()

    def ask(  # noqa: PLR0913  all by name, and few at a time
        self,
        method: str,
        path: str,
        *,
        query: Query | None = None,
        body: object = None,
        key: str | None = None,
        is_repeatable: bool | None = None,
        known_tag: str | None = None,
        read_seconds: float | None = None,
        deadline: float = math.inf,
    ) -> Answer:
        """Return the answer.

        Raises `Unsendable`, `Unreachable`, `NotMuster` or what `Refused` has below it.

        `key` is an idempotency key, with which an order is repeated as if it were a question;
        `is_repeatable` says of what has no key whether it is one (None: as its method says);
        `known_tag` is of an answer that need not be given again while it holds; `read_seconds` is
        how long the answer may take, where it takes longer than others; `deadline` is the moment,
        of `monotonic`, after which it is of no use.
        """
        if is_repeatable is None:
            is_repeatable = method == "GET" or key is not None
        request = self._request(method, path, query, body)
        request.headers.update(_present({"Idempotency-Key": key, "If-None-Match": known_tag}))
        if read_seconds is not None:
            request.extensions["timeout"]["read"] = read_seconds
        may_be_done = False
        lost_at: float | None = None
        for pause in pauses():
            asked_at = self.monotonic()
            try:
                return self._answer(_in_time(request, deadline - asked_at))
            except (Unreachable, Busy) as error:
                may_be_done = may_be_done or may_have_arrived(error)
                now, wait_seconds = self.monotonic(), max(pause, retry_after(error))
                if lost_at is None:
                    # Who hangs up in the middle of a long answer was there until then.
                    lost_at = now if isinstance(error, HungUp | Busy) else asked_at
                until = min(lost_at + self._patience_seconds(error), deadline)
                if not is_repeatable or now + wait_seconds > until:
                    if key is not None and may_be_done:
                        raise Unconfirmed(error) from None
                    raise error from None  # what HTTP says of it adds nothing to the sentence
            self.sleep(wait_seconds)
        raise AssertionError  # there is always another pause

    def get(self, path: str, query: Query | None = None) -> Any:  # noqa: ANN401  whatever JSON the API answers
        """Return what the API answers to a question, as plain values."""
        return self.ask("GET", path, query=query).read_as(object)

    @contextmanager
    def stream(
        self, path: str, query: Query, headers: Mapping[str, str]
    ) -> Iterator[httpx.Response]:
        """Open a stream of events, or hear that there is none (204).

        What breaks it off, at any time, is `Unreachable`; a page of somebody else's is `NotMuster`.
        """
        timeout = httpx.Timeout(self._http.timeout.connect, read=SILENCE_SECONDS)
        try:
            with self._http.stream(
                "GET", path, params=query, headers=headers, timeout=timeout
            ) as response:
                self._has_met_somebody = True
                if not response.is_success:
                    response.read()
                    raise self._refused(response)
                if not _is_stream(response):
                    raise NotMuster(self.url, response.status_code)
                self._is_served = True
                yield response
        except httpx.RequestError as error:
            raise self._unanswered(error) from error

    def _request(self, method: str, path: str, query: Query | None, body: object) -> httpx.Request:
        headers, content = {}, None
        with sendable():
            if body is not None:
                headers["Content-Type"] = "application/json"
                content = encoded(body)
            # Without a query of its own a path may bring one, as the link to the next page does.
            return self._http.build_request(
                method, path, params=query or None, headers=headers, content=content
            )

    def _patience_seconds(self, error: Unreachable | Busy) -> float:
        """Return how long to go on asking after `error`."""
        if self._retry_seconds is not None:
            return self._retry_seconds
        is_strange = not self._has_met_somebody and is_refusal(error)
        return STRANGE_SECONDS if is_strange else RETRY_SECONDS

    def _unanswered(self, error: httpx.RequestError) -> ClientError:
        self._has_met_somebody = self._has_met_somebody or was_connected(error)
        return unanswered(self.url, error)

    def _refused(self, response: httpx.Response) -> Refused | NotMuster:
        error = refused(self.url, response)
        # Once anything was served, a route that there is not is only one of another release.
        if not self._is_served and leads_nowhere(self.url, error):
            return WrongPath(self.url)
        return error

    def _answer(self, request: httpx.Request) -> Answer:
        try:
            response = self._http.send(request)
        except httpx.RequestError as error:
            raise self._unanswered(error) from error
        self._has_met_somebody = True
        if not response.is_success and response.status_code != HTTPStatus.NOT_MODIFIED:
            raise self._refused(response)
        self._is_served = True
        total = response.headers.get("X-Total-Count", "")
        return Answer(
            url=self.url,
            status=response.status_code,
            body=response.content,
            next_page=_path_of(response.links.get("next", {}).get("url")),
            total=int(total) if total.isdecimal() else None,
            tag=response.headers.get("ETag"),
        )


def pauses() -> Iterator[float]:
    """Yield how long to wait before each next attempt, for ever: longer and longer, with jitter."""
    longest = FIRST_PAUSE_SECONDS
    while True:
        # Clients that lost the same server do not come back together.
        yield longest * random.uniform(0.75, 1.0)  # noqa: S311  jitter, no secret
        longest = min(LONGEST_PAUSE_SECONDS, 2 * longest)


def _in_time(request: httpx.Request, seconds: float) -> httpx.Request:
    """Let nothing about a request take longer than until its deadline, in so many seconds."""
    longest = max(0.0, seconds) + LATE_SECONDS
    limits = request.extensions["timeout"]
    request.extensions["timeout"] = {what: min(limit, longest) for what, limit in limits.items()}
    return request


def _present(headers: Mapping[str, str | None]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if value is not None}


def _is_stream(response: httpx.Response) -> bool:
    if response.status_code == HTTPStatus.NO_CONTENT:
        return True
    media_type, _, _ = response.headers.get("Content-Type", "").partition(";")
    return bool(media_type.strip().lower() == "text/event-stream")


def _path_of(link: str | None) -> str | None:
    """Return where a link leads on this API: a token goes nowhere else."""
    return None if link is None else httpx.URL(link).raw_path.decode()
