"""Exception handlers: every exception that leaves a route becomes a problem document.

FastAPI's own handlers echo the input, which may be a secret, and have no common shape.
"""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from api.errors import (
    Conflict,
    FieldError,
    InvalidRequest,
    JobNotFound,
    MethodNotAllowed,
    Problem,
    ServiceUnavailable,
    TokenNotFound,
    WorkerNotFound,
    invalid_spec,
    problem_response,
)
from api.listing import Changed
from database.errors import (
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
    TokenExists,
    TokenMissing,
)
from muster.contracts.errors import InvalidSpec

_CONFLICTS: Final[Mapping[type[DatabaseError], str]] = {
    JobNotTerminal: "job-not-over",
    JobOver: "job-over",
    DepartureRefused: "worker-stays",
    TokenExists: "token-exists",
}


def install(app: FastAPI) -> None:
    """Register the handlers of all exceptions."""
    app.add_exception_handler(Problem, _problem)
    app.add_exception_handler(InvalidSpec, _invalid_spec)
    app.add_exception_handler(RequestValidationError, _invalid_request)
    app.add_exception_handler(HTTPException, _http_exception)
    app.add_exception_handler(DatabaseError, _database_error)
    app.add_exception_handler(Exception, _unexpected)


def _problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, Problem)  # noqa: S101  the registered type
    return problem_response(error, request.scope)


def _invalid_spec(request: Request, error: Exception) -> Response:
    assert isinstance(error, InvalidSpec)  # noqa: S101  the registered type
    return problem_response(invalid_spec(error), request.scope)


def _invalid_request(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)  # noqa: S101  the registered type
    errors = [
        _invalid_json(found, error.body)
        if found["type"] == "json_invalid"
        else FieldError(
            loc=tuple(_encodable(part) for part in found["loc"]),
            msg=str(found["msg"]),
            type=str(found["type"]),
        )
        for found in error.errors()
    ]
    return problem_response(InvalidRequest(errors), request.scope)


def _invalid_json(found: Mapping[str, Any], text: str) -> FieldError:
    _, index = found["loc"]
    before = text[:index]
    line, column = before.count("\n") + 1, index - before.rfind("\n")
    message = f"invalid JSON: {found['ctx']['error']} at line {line}, column {column}"
    return FieldError(loc=("body",), msg=message, type=str(found["type"]))


def _http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101  the registered type
    status = HTTPStatus(error.status_code)
    if status is HTTPStatus.METHOD_NOT_ALLOWED:
        return problem_response(MethodNotAllowed(error.headers), request.scope)
    slug = status.phrase.lower().replace(" ", "-")
    is_not_found = status is HTTPStatus.NOT_FOUND
    detail = "This path does not exist. See /openapi.json." if is_not_found else error.detail
    return problem_response(Problem(status, slug, detail, headers=error.headers), request.scope)


def _database_error(request: Request, error: Exception) -> Response:
    match error:
        case JobMissing():
            problem: Problem = JobNotFound()
        case JobExists():
            how = f"DELETE /jobs/{error.job_id}, with ?force=true its checkpoints, too"
            problem = Conflict("job-exists", f"{error} ({how}).")
        case JobNotTerminal() | JobOver() | DepartureRefused() | TokenExists():
            problem = Conflict(_CONFLICTS[type(error)], str(error))
        case JobChanged():
            problem = Changed()
        case MemberMissing():
            problem = WorkerNotFound()
        case TokenMissing():
            problem = TokenNotFound()
        case IdempotencyConflict():
            problem = Problem(HTTPStatus.UNPROCESSABLE_ENTITY, "idempotency-conflict", str(error))
        case CommitInDoubt():
            problem = ServiceUnavailable(str(error), "commit-in-doubt")
        case DatabaseUnavailable():
            problem = ServiceUnavailable(str(error))
        case _:
            raise error  # a bug, answered by `_unexpected`
    return problem_response(problem, request.scope)


def _unexpected(request: Request, _error: Exception) -> Response:
    # AccessMiddleware logs the exception with the request's id.
    detail = "The server failed unexpectedly. Its log has the details under this request_id."
    problem = Problem(HTTPStatus.INTERNAL_SERVER_ERROR, "unexpected", detail)
    return problem_response(problem, request.scope)


def _encodable(part: str | int) -> str | int:
    # A field name sent by a client may contain half a surrogate pair.
    return part if isinstance(part, int) else part.encode("utf-8", "replace").decode()
