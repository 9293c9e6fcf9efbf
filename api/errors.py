"""The problem documents (RFC 9457) that answer a refused request.

Problem                    status, kind, a sentence and the fields that are wrong
├── Unauthorized           401  api.access.auth
├── Conflict               409  the job's state does not allow the request
├── InvalidRequest         422  fields of the body, the query or the headers
├── TooManyRequests        429  api.access.rate_limits
└── ServiceUnavailable     503  the database cannot be reached

Every other exception that leaves a route becomes one here, too: FastAPI's own handlers echo the
input, which may be a secret, and have no common shape. A long value that a client sent is not
repeated in its refusal; a path and the name of a field are.
"""

import json
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Scope

from database.errors import (
    CheckpointPending,
    CommitInDoubt,
    DatabaseError,
    DatabaseUnavailable,
    DepartureRefused,
    IdempotencyConflict,
    JobChanged,
    JobExists,
    JobMissing,
    JobNotTerminal,
    JobOver,
    MemberMissing,
    PoolFull,
    TokenExists,
    TokenMissing,
)
from muster.contracts.errors import InvalidSpec, MusterError
from muster.contracts.messages.wire import encodable
from muster.contracts.token import masked
from muster.contracts.views.service import FieldError, ProblemView

RETRY_AFTER_SECONDS: Final = 1

MEDIA_TYPE = "application/problem+json"

_DATABASE_REFUSALS: Final[Mapping[type[DatabaseError], tuple[int, str]]] = {
    JobMissing: (404, "job-not-found"),
    MemberMissing: (404, "worker-not-found"),
    TokenMissing: (404, "token-not-found"),
    JobNotTerminal: (409, "job-not-over"),
    JobOver: (409, "job-over"),
    CheckpointPending: (409, "checkpoint-pending"),
    DepartureRefused: (409, "worker-stays"),
    PoolFull: (409, "pool-full"),
    TokenExists: (409, "token-exists"),
    JobChanged: (412, "job-changed"),
    IdempotencyConflict: (422, "idempotency-conflict"),
}
"""Status and kind of each refusal."""


class Problem(MusterError):
    """Ends a request with a problem document. `slug` names the kind, for programs."""

    def __init__(
        self,
        status: int,
        slug: str,
        detail: str,
        *,
        errors: Sequence[FieldError] = (),
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.slug = slug
        self.detail = detail
        self.errors = tuple(errors)
        self.headers = dict(headers or {})


class InvalidRequest(Problem):
    def __init__(self, errors: Sequence[FieldError]) -> None:
        # The name of a field may contain half a surrogate pair, which UTF-8 cannot encode.
        errors = [
            msgspec.structs.replace(
                error,
                loc=tuple(encodable(part) if isinstance(part, str) else part for part in error.loc),
            )
            for error in errors
        ]
        detail = "; ".join(map(_sentence, errors))
        super().__init__(HTTPStatus.UNPROCESSABLE_ENTITY, "invalid-request", detail, errors=errors)


class ServiceUnavailable(Problem):
    def __init__(self, detail: str, slug: str = "store-unavailable") -> None:
        headers = {"Retry-After": str(RETRY_AFTER_SECONDS)}
        super().__init__(HTTPStatus.SERVICE_UNAVAILABLE, slug, detail, headers=headers)


class Conflict(Problem):
    def __init__(self, slug: str, detail: str) -> None:
        super().__init__(HTTPStatus.CONFLICT, slug, detail)


def invalid_field(where: str, field: str, message: str, hint: str | None = None) -> InvalidRequest:
    """Return the refusal of one field of the "body" or the "query"."""
    return InvalidRequest(
        [FieldError(loc=(where, field), msg=message, type="value_error", hint=hint)]
    )


def problem_response(problem: Problem, scope: Scope) -> Response:
    """Return the document that answers the request of `scope`."""
    document = ProblemView(
        type=f"/problems/{problem.slug}",
        title=problem.slug.replace("-", " ").capitalize(),
        status=int(problem.status),
        detail=problem.detail,
        instance=scope.get("path", ""),
        request_id=scope.get("state", {}).get("request_id", ""),
        errors=problem.errors,
    )
    # json.dumps writes ASCII only: a path may contain what UTF-8 cannot encode.
    content = masked(json.dumps(msgspec.to_builtins(document)))
    return Response(content, problem.status, headers=problem.headers, media_type=MEDIA_TYPE)


def _sentence(error: FieldError) -> str:
    where = ".".join(str(part) for part in error.loc[1:]) or str(error.loc[0])
    return f"{where}: {error.msg}" + (f" ({error.hint})" if error.hint else "")


def install(app: FastAPI) -> None:
    """Register the handlers of all exceptions."""
    for kind in (Problem, InvalidSpec, RequestValidationError, HTTPException, DatabaseError):
        app.add_exception_handler(kind, _refusal)
    app.add_exception_handler(Exception, _unexpected)


def _refusal(request: Request, error: Exception) -> Response:
    problem = problem_of(error)
    if problem.status == HTTPStatus.METHOD_NOT_ALLOWED:
        # Of all routes of the path: Starlette names the methods of the first one only.
        allowed = [
            method
            for method in ("DELETE", "GET", "PATCH", "POST", "PUT")
            if any(
                route.matches({**request.scope, "method": method})[0] is Match.FULL
                for route in request.app.routes
            )
        ]
        problem.headers["Allow"] = ", ".join(allowed).replace("GET", "GET, HEAD")
    return problem_response(problem, request.scope)


def problem_of(error: Exception) -> Problem:
    """Return what to answer; raises an error that is unexpected."""
    match error:
        case Problem():
            return error
        case InvalidSpec():
            return InvalidRequest(
                [
                    FieldError(loc=("body", problem.field), msg=problem.message, type="value_error")
                    for problem in error.problems
                ]
            )
        case RequestValidationError():
            return InvalidRequest(
                [
                    _invalid_json(found, error.body)
                    if found["type"] == "json_invalid"
                    else FieldError(loc=found["loc"], msg=_message_of(found), type=found["type"])
                    for found in error.errors()
                ]
            )
        case HTTPException():
            slug = HTTPStatus(error.status_code).phrase.lower().replace(" ", "-")
            details = {404: "This path does not exist. See /docs."}
            details[405] = "This path does not support this method. See /docs."
            detail = details.get(error.status_code, error.detail)
            return Problem(error.status_code, slug, detail, headers=error.headers)
        case JobExists():
            how = f"DELETE /jobs/{error.job_id}, with ?force=true its checkpoints, too"
            return Conflict("job-exists", f"{error} ({how}).")
        case CommitInDoubt():
            return ServiceUnavailable(str(error), "commit-in-doubt")
        case DatabaseUnavailable():
            return ServiceUnavailable(str(error))
        case DatabaseError() if type(error) in _DATABASE_REFUSALS:
            status, slug = _DATABASE_REFUSALS[type(error)]
            return Problem(status, slug, str(error))
        case _:
            raise error  # a bug, answered by `_unexpected`


def _message_of(found: Mapping[str, Any]) -> str:
    wanted = {"bool_parsing": "true or false", "int_parsing": "an integer"}.get(found["type"])
    return f"expected {wanted}, got {found['input']!r}" if wanted else str(found["msg"])


def _invalid_json(found: Mapping[str, Any], text: str) -> FieldError:
    _, index = found["loc"]
    before = text[:index]
    line, column = before.count("\n") + 1, index - before.rfind("\n")
    message = f"invalid JSON: {found['ctx']['error']} at line {line}, column {column}"
    return FieldError(loc=("body",), msg=message, type=str(found["type"]))


def _unexpected(request: Request, _error: Exception) -> Response:
    # `AccessMiddleware` logs the exception with the request's id.
    detail = "The server failed unexpectedly. Its log has the details under this request_id."
    problem = Problem(HTTPStatus.INTERNAL_SERVER_ERROR, "unexpected", detail)
    return problem_response(problem, request.scope)
