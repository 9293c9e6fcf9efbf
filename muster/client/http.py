"""HTTP requests to one API: what is repeated, what is not, and which error a failure is.

A question is repeated while the API does not answer. An order is sent once, because it may have
been carried out although its answer was lost, unless it has an idempotency key: then the server
returns the original response.
"""

import math
import os
import random
import socket
import ssl
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final, TypeAlias, TypeVar
from urllib.parse import urlsplit

import httpx
import msgspec

from muster.client.errors import (
    Busy,
    CertificateRejected,
    ClientError,
    ConnectionClosed,
    InvalidRequest,
    NoCertificates,
    NotMuster,
    Unconfirmed,
    Unreachable,
    WrongPath,
    refusal,
)
from muster.contracts.settings.services import CA_FILE
from muster.contracts.views.service import ProblemView

TIMEOUT_SECONDS: Final = 30.0

RETRY_SECONDS: Final = 10.0  # `muster up` restarts an API that was killed within two seconds

FIRST_PAUSE_SECONDS: Final = 0.1
LONGEST_PAUSE_SECONDS: Final = 1.0

LATE_SECONDS: Final = 2.0
"""How much later than its deadline an answer may come: the server may wait until the deadline."""

STREAM_SILENCE_SECONDS: Final = 45.0  # three times the interval of pings on an idle stream

NOT_DONE: Final = frozenset(
    {
        "/problems/store-unavailable",
        "/problems/too-many-connections",
        "/problems/caller-unseen",
        "/problems/no-leader",
    }
)
"""Problems with which the API says that it has written nothing."""

_TRANSIENT: Final = frozenset({408, 429, 502, 503, 504})
_MAYBE_DONE: Final = frozenset({502, 503, 504})
"""A proxy also answers these for a request that it has passed on."""

_NO_ROUTE: Final = "/problems/not-found"
"""The path is not a route; a missing job has a kind of its own."""

_UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

Query: TypeAlias = Mapping[str, str | int | float | bool | Sequence[str] | None]
"""What is None is not sent."""

Value = TypeVar("Value")
Raised = TypeVar("Raised", bound=OSError)


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiResponse:
    """A successful response."""

    url: str
    status: int
    body: bytes
    next_page: str | None  # path of the next page
    total: int | None  # number of results on all pages, if the server counts them

    def read_as(self, kind: type[Value]) -> Value:
        """Decode the body; raise `NotMuster` if it is not of this kind."""
        try:
            return msgspec.json.decode(self.body, type=kind)
        except _UNREADABLE as error:
            raise NotMuster(self.url, self.status) from error


class Connection:
    """Requests to one API, over connections that stay open until `close`."""

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
        """`retry_seconds` is how long a request is repeated."""
        self.url = url
        self.monotonic = monotonic
        self.sleep = sleep
        self.retry_seconds = retry_seconds
        self.warn: Callable[[str], None] = warnings.warn
        """Takes what an answer warns of."""
        try:
            self._http = httpx.Client(
                base_url=url,
                headers={"Authorization": _bearer(token)} if token else {},
                timeout=timeout_seconds,
                transport=transport,
                trust_env=False,
            )
        except httpx.InvalidURL as error:
            raise InvalidRequest(
                f"{url} is not a valid URL: {error}; correct MUSTER_URL"
            ) from error

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
        read_seconds: float | None = None,
        deadline: float = math.inf,
    ) -> ApiResponse:
        """Send a request and return the response.

        `key` is an idempotency key, which makes the request repeatable. Without one,
        `is_repeatable` says whether it is (None: if the method is GET). `read_seconds` replaces the
        read timeout. `deadline`, on the clock `monotonic`, ends the retries.

        Raises `InvalidRequest`, `Unreachable`, `CertificateRejected`, `NotMuster` or a `Refused`,
        and `Unconfirmed` if a request with a key may have been carried out.
        """
        if is_repeatable is None:
            is_repeatable = method == "GET" or key is not None
        request = self._request(method, path, query, body)
        if key is not None:
            request.headers["Idempotency-Key"] = key
        if read_seconds is not None:
            request.extensions["timeout"]["read"] = read_seconds
        may_be_done = False
        lost_at: float | None = None
        for pause in pauses():
            asked_at = self.monotonic()
            longest = max(0.0, deadline - asked_at) + LATE_SECONDS
            limits = request.extensions["timeout"]
            request.extensions["timeout"] = {name: min(limits[name], longest) for name in limits}
            try:
                return self._send(request)
            except (Unreachable, Busy) as error:
                may_be_done = may_be_done or _may_be_done(error)
                now, wait_seconds = self.monotonic(), max(pause, retry_after(error))
                if lost_at is None:
                    # A server that closes the connection during a long answer was there until now.
                    lost_at = now if isinstance(error, ConnectionClosed | Busy) else asked_at
                until = min(lost_at + self.retry_seconds, deadline)
                if not is_repeatable or now + wait_seconds > until:
                    if key is not None and may_be_done:
                        raise Unconfirmed(error) from None
                    raise error from None  # httpx's own error adds nothing
            self.sleep(wait_seconds)
        raise AssertionError  # `pauses` is infinite

    def get(self, path: str, query: Query | None = None) -> Any:  # noqa: ANN401  any JSON
        """Return the JSON of a GET request as plain values."""
        return self.ask("GET", path, query=query).read_as(object)

    @contextmanager
    def stream(
        self, path: str, query: Query, headers: Mapping[str, str]
    ) -> Iterator[httpx.Response]:
        """Open a stream of server-sent events; status 204 if there is none.

        Raises `Unreachable` at any time if the connection is lost, or `NotMuster`.
        """
        timeout = httpx.Timeout(self._http.timeout.connect, read=STREAM_SILENCE_SECONDS)
        try:
            with self._http.stream(
                "GET", path, params=query, headers=headers, timeout=timeout
            ) as response:
                if not response.is_success:
                    response.read()
                    raise self._refused(response)
                media_type = response.headers.get("Content-Type", "").partition(";")[0]
                is_stream = media_type.strip().lower() == "text/event-stream"
                if not is_stream and response.status_code != HTTPStatus.NO_CONTENT:
                    raise NotMuster(self.url, response.status_code)
                yield response
        except httpx.RequestError as error:
            raise self._unanswered(error) from error

    def _request(self, method: str, path: str, query: Query | None, body: object) -> httpx.Request:
        headers = {} if body is None else {"Content-Type": "application/json"}
        given = {name: value for name, value in (query or {}).items() if value is not None}
        try:
            content = None if body is None else _encoded(body)
            # Without a query of its own a path may bring one, as the link to the next page does.
            return self._http.build_request(
                method, path, params=given or None, headers=headers, content=content
            )
        except UnicodeEncodeError as error:
            raise InvalidRequest("a text of this request is not valid Unicode") from error
        except httpx.InvalidURL as error:
            raise InvalidRequest(f"no URL can hold this request: {error}") from error

    def _send(self, request: httpx.Request) -> ApiResponse:
        try:
            response = self._http.send(request)
        except httpx.RequestError as error:
            raise self._unanswered(error) from error
        if not response.is_success:
            raise self._refused(response)
        if warning := response.headers.get("Warning"):  # 199 muster "its text"
            self.warn(warning.partition('"')[2].rstrip('"'))
        total = response.headers.get("X-Total-Count", "")
        link = response.links.get("next", {}).get("url")
        return ApiResponse(
            url=self.url,
            status=response.status_code,
            body=response.content,
            # Only the path: the token goes to no other server.
            next_page=None if link is None else httpx.URL(link).raw_path.decode(),
            total=int(total) if total.isdecimal() else None,
        )

    def _unanswered(self, error: httpx.RequestError) -> ClientError:
        if isinstance(error, httpx.ReadError | httpx.RemoteProtocolError | httpx.DecodingError):
            return ConnectionClosed(self.url)
        if (cause := _cause(error, ssl.SSLError)) is not None:
            return _untrusted(self.url, cause)
        unresolved = _cause(error, socket.gaierror)
        return Unreachable(self.url, unresolved.strerror if unresolved else None)

    def _refused(self, response: httpx.Response) -> ClientError:
        try:
            problem = msgspec.json.decode(response.content, type=ProblemView)
        except _UNREADABLE:
            if response.status_code not in _TRANSIENT:
                return NotMuster(self.url, response.status_code)
            detail = f"{self.url} is overloaded or down (HTTP {response.status_code})"
            problem = ProblemView(status=response.status_code, detail=detail)
        path = urlsplit(self.url).path
        if path and (problem.type == _NO_ROUTE or path.endswith("/jobs")):
            return WrongPath(self.url)
        after = response.headers.get("Retry-After", "")
        return refusal(problem, float(after) if after.isdecimal() else None)


def pauses() -> Iterator[float]:
    """Yield the pause before each next attempt, in seconds, for ever: growing, with jitter."""
    longest = FIRST_PAUSE_SECONDS
    while True:
        # Jitter: clients that lost the same server do not come back at the same instant.
        yield longest * random.uniform(0.75, 1.0)  # noqa: S311  not a secret
        longest = min(LONGEST_PAUSE_SECONDS, 2 * longest)


def retry_after(error: Unreachable | Busy) -> float:
    """Return for how many seconds the server asked not to be called; 0 if it did not."""
    return (isinstance(error, Busy) and error.retry_after_seconds) or 0.0


def tls_context(url: str, ca_file: str | None) -> ssl.SSLContext:
    """Return a context that trusts `ca_file` (PEM) alone, or the system's certificates.

    Raises `NoCertificates` if the file cannot be used.
    """
    if not url.startswith("https:"):
        # To load the system's certificates takes time, and http needs none.
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:
        raise NoCertificates(
            f"{ca_file} cannot be trusted: {_reason(error)}. Name a file of certificates in PEM in "
            f"{CA_FILE}, or none to trust those of the system"
        ) from error


def _untrusted(url: str, error: ssl.SSLError) -> CertificateRejected:
    if not isinstance(error, ssl.SSLCertVerificationError):
        return CertificateRejected(
            f"the TLS handshake with {url} failed ({_reason(error)}): if the server does not speak "
            "TLS, write http:// in MUSTER_URL"
        )
    return CertificateRejected(
        f"the certificate of {url} is not trusted ({error.verify_message}): if it is the "
        f"operator's own, set {CA_FILE} to it. Set MUSTER_URL to a name that its certificate is for"
    )


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or str(error)).lower().replace("_", " ")
    return error.strerror or str(error)


def _may_be_done(error: Unreachable | Busy) -> bool:
    """Return whether the request may have been carried out before its answer was lost."""
    if isinstance(error, Busy):
        return error.status in _MAYBE_DONE and error.type not in NOT_DONE
    return not isinstance(error.__cause__, httpx.ConnectError | httpx.ConnectTimeout)


def _cause(error: BaseException, kind: type[Raised]) -> Raised | None:
    """Return the system's error in the chain of causes."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, kind):
        cause = cause.__cause__ or cause.__context__
    return cause


def _bearer(token: str) -> str:
    stripped = token.strip()  # a file that it was read from ends with a line feed
    if not (stripped.isascii() and stripped.isprintable()):
        raise InvalidRequest("the token has characters that no token has: copy it again")
    return f"Bearer {stripped}"


def _encoded(body: object) -> bytes:
    try:
        return msgspec.json.encode(body, enc_hook=os.fspath)
    except TypeError as error:
        raise InvalidRequest(f"this request holds a value that is not JSON: {error}") from error
    except RecursionError as error:
        raise InvalidRequest("this request contains itself, or is nested too deeply") from error
