"""What came of a request that had no good answer: which error it is, and what is known by it."""

import socket
from collections.abc import Mapping
from typing import Final, TypeVar
from urllib.parse import urlsplit

import httpx
import msgspec

from muster.client.errors import (
    Busy,
    ClientError,
    HungUp,
    NotMuster,
    Problem,
    Refused,
    Unreachable,
    refusal,
)
from muster.client.trust import untrusted

Raised = TypeVar("Raised", bound=OSError)

PASSING: Final = frozenset({408, 429, 502, 503, 504})
"""Statuses that pass, whoever says them."""

UNSURE: Final = frozenset({502, 503, 504})
"""What a proxy says also of a request that it has passed on, or the API when the database is lost
at the very moment of a commit."""

NOT_DONE: Final = frozenset(
    {
        "/problems/store-unavailable",
        "/problems/too-many-connections",
        "/problems/caller-unseen",
    }
)
"""Of these only the API speaks, and then nothing has been written."""

NOWHERE: Final = "/problems/not-found"
"""Of a path that is no route; a job that is not there has a kind of its own."""

UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What is raised for bytes that are not the JSON which was wanted."""


def unanswered(url: str, error: httpx.RequestError) -> ClientError:
    """Return what it means that no answer came: nobody is there, or not whom we trust."""
    if isinstance(error, httpx.ReadError | httpx.RemoteProtocolError | httpx.DecodingError):
        return HungUp(url)
    return untrusted(url, error) or Unreachable(url, _nameless(error))


def was_connected(error: BaseException | None) -> bool:
    """Whether somebody was there who took the connection, whatever came of it."""
    return not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)


def is_refusal(error: Unreachable | Busy) -> bool:
    """Whether the machine is there, and nobody listens at that port of it."""
    return _beneath(error, ConnectionRefusedError) is not None


def _nameless(error: httpx.RequestError) -> str | None:
    """Return what the system says, where it knows no address for the name of a machine."""
    cause = _beneath(error, socket.gaierror)
    return None if cause is None else cause.strerror


def _beneath(error: BaseException, kind: type[Raised]) -> Raised | None:
    """Return the error of the system that a library has put its own around."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, kind):
        cause = cause.__cause__ or cause.__context__
    return cause


def refused(url: str, response: httpx.Response) -> Refused | NotMuster:
    """Return what an answer means that is no good one."""
    try:
        problem = msgspec.json.decode(response.content, type=Problem)
    except UNREADABLE:
        if response.status_code not in PASSING:
            return NotMuster(url, response.status_code)
        problem = _wordless(url, response.status_code)
    return refusal(problem, _retry_after_seconds(response.headers))


def leads_nowhere(url: str, error: ClientError) -> bool:
    """Whether there is no route where one was sought, maybe for the path that the URL has."""
    return isinstance(error, Refused) and error.type == NOWHERE and bool(urlsplit(url).path)


def may_have_arrived(error: Unreachable | Busy) -> bool:
    """Whether the request may have been carried out before its answer was lost."""
    if isinstance(error, Busy):
        return error.status in UNSURE and error.type not in NOT_DONE
    return was_connected(error.__cause__)


def retry_after(error: Unreachable | Busy) -> float:
    """Return for how many seconds the server wants to be left alone: none, if nobody says so."""
    return (isinstance(error, Busy) and error.retry_after_seconds) or 0.0


def _wordless(url: str, status: int) -> Problem:
    """Return what a status says that comes without our words: of a proxy, or under siege."""
    return Problem(status=status, detail=f"{url} has no time or nobody to answer (HTTP {status})")


def _retry_after_seconds(headers: Mapping[str, str]) -> float | None:
    after = headers.get("Retry-After", "")
    return float(after) if after.isdecimal() else None
