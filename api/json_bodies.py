"""Bodies in JSON: a name is in them once, and what cannot be read is said.

FastAPI takes the later one of two, and of whatever else befalls its reader tells no more than that
there was an error.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from api.account import legible
from api.problems import FieldError, InvalidRequest, Problem


class JsonRoute(APIRoute):
    """A route that reads its body so, if it has one."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        answer = super().get_route_handler()
        if self.body_field is None:
            return answer

        async def handle(request: Request) -> Response:
            try:
                return await answer(_JsonRequest(request.scope, request.receive))
            except HTTPException as error:
                if isinstance(error.__cause__, Problem):  # what was raised while a body was read
                    raise error.__cause__ from None
                raise

        return handle


class _JsonRequest(Request):
    async def json(self) -> Any:  # noqa: ANN401  JSON is any
        return value_of(await self.body())


def value_of(body: bytes) -> Any:  # noqa: ANN401  JSON is any
    """Return what a body says; raises `Problem`, and `JSONDecodeError` for what is no JSON."""
    try:
        return json.loads(body, object_pairs_hook=_said_once)
    except json.JSONDecodeError:
        raise
    except UnicodeDecodeError as error:
        raise _unreadable(f"it is no UTF-8 at byte {error.start + 1}") from error
    except RecursionError as error:
        raise _unreadable("its brackets are nested too deep") from error
    except ValueError as error:  # a number of more digits than Python reads
        most = sys.get_int_max_str_digits()
        # Digits that others stand before are not tried again: the time grows with the length alone.
        found = re.search(rb"(?<!\d)\d{%d}" % (most + 1), body)
        where = f" at byte {found.start() + 1}" if found else ""
        raise _unreadable(f"a number{where} has more than {most} digits") from error


def _said_once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        name, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        said = f"the name {legible(name)} is given twice"
        raise InvalidRequest([FieldError(loc=("body",), msg=said, type="given_twice")])
    return found


def _unreadable(why: str) -> Problem:
    return Problem(HTTPStatus.BAD_REQUEST, "bad-request", f"This body cannot be read: {why}.")
