"""Who was turned away and why, and who changed what: a line in the log for each."""

from typing import Final

import structlog
from starlette.types import Message, Scope, Send

from api.identity import Caller
from api.networks import client_network
from api.problems import Problem

CHANGING: Final = frozenset({"POST", "PUT", "PATCH", "DELETE"})

LEGIBLE_LIMIT: Final = 200
"""The longest path of ours, with a job's name of 64 letters, is half of it."""

_LOG: Final = structlog.get_logger("api")


def tell_refusal(problem: Problem, scope: Scope) -> None:
    """Write down that the request of `scope` was turned away."""
    caller: Caller | None = scope["state"].get("caller")
    name = caller.name if caller else client_of(scope)
    _LOG.warning(
        f"turned away {name}: {problem.slug}",
        action="request_refused",
        caller=name,
        method=scope["method"],
        path=legible(scope["path"]),
        reason=problem.slug,
    )


def with_account(send: Send, scope: Scope) -> Send:
    """Write down who changed anything, or tried to, when they are answered.

    Who only looks is nobody's business.
    """

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            _tell_change(scope, message["status"])
        await send(message)

    is_change = scope["method"] in CHANGING and "caller" in scope["state"]
    return sending if is_change else send


def legible(text: str) -> str:
    """Return what may be shown of a text that anybody may have made up, such as a path."""
    shown = repr(text[:LEGIBLE_LIMIT])[1:-1]  # a terminal would obey what is in it
    return shown if len(text) <= LEGIBLE_LIMIT else f"{shown}…"


def client_of(scope: Scope) -> str:
    """Return what is known of somebody without a token: their user, or else their network."""
    uid = scope["state"].get("caller_uid")
    if uid is not None:
        return f"uid:{uid}"
    client = scope.get("client")
    return f"address:{client_network(client[0])}" if client else "address:unknown"


def _tell_change(scope: Scope, status: int) -> None:
    caller: Caller = scope["state"]["caller"]
    _LOG.info(
        f"answered {scope['method']} of {caller.name} with {status}",
        action="request_answered",
        caller=caller.name,
        method=scope["method"],
        path=legible(scope["path"]),
        status=status,
    )
