"""Every refusal is a line in the log: who, what and why."""

from typing import Final

import structlog
from starlette.types import Scope

from api.problems import Problem

_LOG: Final = structlog.get_logger("api")


def tell_refusal(problem: Problem, scope: Scope) -> None:
    """Write down that the request of `scope` was turned away."""
    state = scope["state"]
    caller = state.get("caller")
    _LOG.warning(
        f"turned a request away: {problem.slug}",
        action="request_refused",
        request_id=state["request_id"],
        caller=caller.name if caller else client_of(scope),
        method=scope["method"],
        path=scope["path"],
        reason=problem.slug,
    )


def client_of(scope: Scope) -> str:
    """Return what is known of a caller who has not said a name: their user, or their address."""
    uid = scope["state"].get("caller_uid")
    if uid is not None:
        return f"uid:{uid}"
    address = scope.get("client")
    return f"address:{address[0]}" if address else "address:unknown"
