"""What a caller needs to be for which route. Every route says it, where it is declared.

``@router.post("/jobs", dependencies=[SUBMIT])``: the scope is then in the OpenAPI document as well,
from which a test goes through all routes with all kinds of tokens.
"""

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Annotated, Any, Final, TypeAlias

from fastapi import APIRouter, Depends, Request, Security
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer, SecurityScopes
from starlette.types import Scope as ASGIScope

from api.account import CHANGING, tell_refusal
from api.identity import Caller
from api.problems import MethodNotAllowed, Problem
from muster.contracts.token import Scope

API_VERSION: Final = "v1"
PREFIX: Final = f"/api/{API_VERSION}"

BARE_PROBES: Final = frozenset({"/healthz", "/livez", "/readyz"})
"""They say yes or no and nothing else, also to whoever calls this machine by another name: what
watches over a container knows its address only."""

PROBES: Final = BARE_PROBES | {"/health"}
"""Whoever watches over the service has no token; they tell nothing of any job."""

_SCHEME: Final = HTTPBearer(
    auto_error=False,
    scheme_name="token",
    description="Made with `muster token create`; its own user on its own machine needs none.",
)


AskAgain: TypeAlias = Callable[[], Awaitable[None]]
"""Raises `Problem` if who asks would not be let in any more."""


class ScopeTooSmall(Problem):
    """Somebody we know, who may not do this."""

    def __init__(self, caller: Caller, needed: Scope) -> None:
        super().__init__(
            HTTPStatus.FORBIDDEN,
            "scope-too-small",
            f"This needs a token of scope {needed} at least, and {caller.name} has {caller.scope}: "
            "ask whoever runs the service for one.",
            headers={"WWW-Authenticate": f'Bearer error="insufficient_scope", scope="{needed}"'},
        )


async def _check(
    request: Request, needed: SecurityScopes, _shown: Annotated[object, Depends(_SCHEME)]
) -> None:
    with _told(request):
        if request.method in CHANGING:
            # FastAPI reads the body first: by now it may be seconds since the door was passed.
            await _recognize(request)
        _refuse_smaller(request.scope["state"]["caller"], Scope(needed.scopes[-1]))


async def _asking_again(request: Request) -> AskAgain:
    async def ask_again() -> None:
        with _told(request):
            await _recognize(request)

    return ask_again


AskingAgain = Annotated[AskAgain, Depends(_asking_again)]
"""For a route that waits before it changes something."""


async def _recognize(request: Request) -> None:
    recognize: Callable[[], Awaitable[Caller]] = request.scope["state"]["recognize"]
    await recognize()


@contextmanager
def _told(request: Request) -> Iterator[None]:
    """Write down who is turned away."""
    try:
        yield
    except Problem as problem:
        tell_refusal(problem, request.scope)
        raise


def refuse_idle_change(request: ASGIScope) -> None:
    """Raise `Problem` for a change that cannot come to anything, whatever is in its body.

    That is one of a probe, and one by whoever may only look.
    """
    if request["method"] not in CHANGING:
        return
    if is_probe(request["path"]):
        raise MethodNotAllowed({"Allow": "GET"})
    _refuse_smaller(request["state"]["caller"], Scope.SUBMIT)


def _refuse_smaller(caller: Caller, needed: Scope) -> None:
    if not caller.scope.covers(needed):
        raise ScopeTooSmall(caller, needed)


async def _anybody() -> None:
    """Let everybody in."""


READ: Final = Security(_check, scopes=[Scope.READ])
SUBMIT: Final = Security(_check, scopes=[Scope.SUBMIT])
ADMIN: Final = Security(_check, scopes=[Scope.ADMIN])
OPEN: Final = Depends(_anybody)
"""For `PROBES` and nothing else: the door lets nobody through to another path without a name."""

_DECLARATIONS: Final[tuple[Any, ...]] = (READ, SUBMIT, ADMIN, OPEN)


class ScopeMissing(LookupError):
    """A route does not say what it needs, which is a bug of ours."""


def is_probe(path: str) -> bool:
    """Whether a path is for everybody."""
    return path.removeprefix(PREFIX) in PROBES


def is_bare_probe(path: str) -> bool:
    """Whether a path tells nobody anything."""
    return path.removeprefix(PREFIX) in BARE_PROBES


def refuse_undeclared(router: APIRouter) -> None:
    """Raise `ScopeMissing` for a route that does not say who may use it."""
    for route in router.routes:
        if isinstance(route, APIRoute) and not any(
            needed is declared for needed in route.dependencies for declared in _DECLARATIONS
        ):
            raise ScopeMissing(f"{route.path} ({route.name}) declares no scope: see api/access.py")
