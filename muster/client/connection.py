"""One API over HTTP: a question is asked again while nobody answers, an order is given once.

An order may have been carried out though its answer was lost. With an idempotency key it can be
repeated all the same: the server then answers as the first time.
"""

import os
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
    Problem,
    Unconfirmed,
    Unreachable,
    Unsendable,
    refusal,
)
from muster.client.trust import untrusted

TIMEOUT_SECONDS: Final = 30.0
RETRY_SECONDS: Final = 10.0
"""An API that was killed is usually there again within two, as `muster up` sees to it."""

FIRST_PAUSE_SECONDS: Final = 0.1
LONGEST_PAUSE_SECONDS: Final = 1.0

SILENCE_SECONDS: Final = 45.0
"""Three of the pings that a stream carries when it has nothing else to say."""

PASSING: Final = frozenset({408, 429, 502, 503, 504})
"""Statuses that pass, whoever says them."""

UNSURE: Final = frozenset({502, 503, 504})
"""What a proxy says also of a request that it has passed on, or the API when the database is lost
at the very moment of a commit."""

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
        except msgspec.MsgspecError as error:
            raise NotMuster(self.url, self.status) from error


class Connection:
    """One API, with connections kept open until `close`."""

    def __init__(
        self,
        url: str,
        token: str | None,
        *,
        timeout_seconds: float = TIMEOUT_SECONDS,
        retry_seconds: float = RETRY_SECONDS,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """`retry_seconds` is how long one goes on asking; `transport` is httpx's own seam."""
        self.url = url
        self.monotonic = monotonic
        self.sleep = sleep
        self._retry_seconds = retry_seconds
        headers = {"Authorization": f"Bearer {_sendable(token)}"} if token else {}
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
    ) -> Answer:
        """Return the answer; raises `Unreachable`, `NotMuster` or what `Refused` has below it.

        `key` is an idempotency key, with which an order is repeated as if it were a question;
        `is_repeatable` says of what has no key whether it is one (None: as its method says);
        `known_tag` is of an answer that need not be given again while it holds; `read_seconds` is
        how long the answer may take, where it takes longer than others.
        """
        if is_repeatable is None:
            is_repeatable = method == "GET" or key is not None
        until = self.monotonic() + self._retry_seconds
        request = self._request(method, path, query, body)
        request.headers.update(_present({"Idempotency-Key": key, "If-None-Match": known_tag}))
        if read_seconds is not None:
            request.extensions["timeout"]["read"] = read_seconds
        may_be_done = False
        for pause in pauses():
            try:
                return self._answer(request)
            except (Unreachable, Busy) as error:
                may_be_done = may_be_done or _may_have_arrived(error)
                wait_seconds = max(pause, _retry_after(error))
                if not is_repeatable or self.monotonic() + wait_seconds > until:
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
        """Open a stream of events; what breaks it off, at any time, is `Unreachable`."""
        timeout = httpx.Timeout(self._http.timeout.connect, read=SILENCE_SECONDS)
        try:
            with self._http.stream(
                "GET", path, params=query, headers=headers, timeout=timeout
            ) as response:
                if response.is_error:
                    response.read()
                    raise _refusal(self.url, response)
                yield response
        except httpx.RequestError as error:
            raise _unanswered(self.url, error) from error

    def _request(self, method: str, path: str, query: Query | None, body: object) -> httpx.Request:
        headers, content = {}, None
        if body is not None:
            headers["Content-Type"] = "application/json"
            content = _encoded(body)
        # Without a query of its own a path may bring one, as the link to the next page does.
        return self._http.build_request(
            method, path, params=query or None, headers=headers, content=content
        )

    def _answer(self, request: httpx.Request) -> Answer:
        try:
            response = self._http.send(request)
        except httpx.RequestError as error:
            raise _unanswered(self.url, error) from error
        if not response.is_success and response.status_code != HTTPStatus.NOT_MODIFIED:
            raise _refusal(self.url, response)
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


def _sendable(token: str) -> str:
    """Return a token as a header takes it; a file that it was read from ends with a line feed."""
    stripped = token.strip()
    if not (stripped.isascii() and stripped.isprintable()):
        raise Unsendable("the token holds what no token does: copy it again, all of it")
    return stripped


def _encoded(body: object) -> bytes:
    try:
        return msgspec.json.encode(body, enc_hook=os.fspath)
    except UnicodeEncodeError as error:
        raise Unsendable("a text of this request is no UTF-8, and JSON takes no other") from error
    except TypeError as error:
        raise Unsendable(f"this request holds what JSON cannot say: {error}") from error


def _present(headers: Mapping[str, str | None]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if value is not None}


def _unanswered(url: str, error: httpx.RequestError) -> ClientError:
    """Return what it means that no answer came: nobody is there, or not whom we trust."""
    if isinstance(error, httpx.ReadError | httpx.RemoteProtocolError | httpx.DecodingError):
        return HungUp(url)
    return untrusted(url, error) or Unreachable(url)


def _may_have_arrived(error: Unreachable | Busy) -> bool:
    """Whether the request may have been carried out before its answer was lost."""
    if isinstance(error, Busy):
        return error.status in UNSURE
    return not isinstance(error.__cause__, httpx.ConnectError | httpx.ConnectTimeout)


def _path_of(link: str | None) -> str | None:
    """Return where a link leads on this API: a token goes nowhere else."""
    return None if link is None else httpx.URL(link).raw_path.decode()


def _refusal(url: str, response: httpx.Response) -> Exception:
    try:
        problem = msgspec.json.decode(response.content, type=Problem)
    except msgspec.MsgspecError:
        if response.status_code not in PASSING:
            return NotMuster(url, response.status_code)
        problem = _wordless(url, response.status_code)
    after = response.headers.get("Retry-After", "")
    return refusal(problem, float(after) if after.isdecimal() else None)


def _wordless(url: str, status: int) -> Problem:
    """Return what a status says that comes without our words: of a proxy, or under siege."""
    return Problem(status=status, detail=f"{url} has no time or nobody to answer (HTTP {status})")


def _retry_after(error: Unreachable | Busy) -> float:
    return (isinstance(error, Busy) and error.retry_after_seconds) or 0.0
