"""Which problem document answers which exception. Installed once, covers every route and none.

Stock handlers echo the input, which cannot always be encoded, and answer with `detail` as a list;
ours answer every refusal in one shape, those of unknown routes included.
"""

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import Response

from api.conditional import Changed
from api.field_words import field_words
from api.problems import (
    Conflict,
    FieldError,
    InDoubt,
    InvalidRequest,
    JobNotFound,
    MethodNotAllowed,
    Problem,
    StoreAway,
    TokenNotFound,
    WorkerNotFound,
    did_you_mean,
    invalid_spec,
    respond,
)
from muster.contracts.errors import InvalidSpec
from store.errors import (
    CommitInDoubt,
    DepartureRefused,
    IdempotencyConflict,
    JobChanged,
    JobExists,
    JobMissing,
    JobNotTerminal,
    JobOver,
    MemberMissing,
    StoreError,
    StoreUnavailable,
    TokenExists,
    TokenMissing,
)

LIST_OF_WORDS: Final = (
    'give its words, such as ["python", "train.py"], or for a line of a shell '
    '["sh", "-c", "python train.py > log"]'
)

_CUT: Final = "it ends there: send all of it, and close what is open"
_CORRECT: Final = "correct it there, or send YAML as `Content-Type: application/yaml`"


def install(app: FastAPI) -> None:
    """Answer every exception that leaves a route with a problem document."""
    app.add_exception_handler(Problem, _problem)
    app.add_exception_handler(InvalidSpec, _invalid_spec)
    app.add_exception_handler(RequestValidationError, _invalid_request)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(StoreError, _store)
    app.add_exception_handler(Exception, _unexpected)


def _problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, Problem)  # noqa: S101  the type it was registered for
    return respond(error, request.scope)


def _invalid_spec(request: Request, error: Exception) -> Response:
    assert isinstance(error, InvalidSpec)  # noqa: S101  the type it was registered for
    return respond(invalid_spec(error), request.scope)


def _invalid_request(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)  # noqa: S101  the type it was registered for
    known = _body_fields(request)
    errors = [
        _no_json(found, error.body)
        if found["type"] == "json_invalid"
        else FieldError(
            loc=tuple(_plain(part) for part in found["loc"]),
            msg=field_words(found),
            type=str(found["type"]),
            hint=_hint(found, known),
        )
        for found in error.errors()
    ]
    return respond(InvalidRequest(errors), request.scope)


def _no_json(found: Mapping[str, Any], text: str) -> FieldError:
    """Return what is wrong with a body that cannot be read, and where in it, as YAML's is told."""
    _, index = found["loc"]
    before = text[:index]
    line, column = before.count("\n") + 1, index - before.rfind("\n")
    why = str(found["ctx"]["error"]).removesuffix(" at")
    is_cut = not text[index:].strip()
    return FieldError(
        loc=("body",),
        msg=f"is no JSON: {why} at line {line}, column {column}",
        type=str(found["type"]),
        hint=_CUT if is_cut else _CORRECT,
    )


def _hint(found: Mapping[str, Any], known: Sequence[str]) -> str | None:
    """Return what was probably meant by a field that pydantic refuses."""
    match found["type"], found["loc"]:
        case "extra_forbidden", (*_, field):
            return did_you_mean(str(field), known)
        case "list_type", ("body", "command"):
            return LIST_OF_WORDS
        case _:
            return None


def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101  the type it was registered for
    status = HTTPStatus(error.status_code)
    if status is HTTPStatus.METHOD_NOT_ALLOWED:
        return respond(MethodNotAllowed(error.headers), request.scope)
    slug = status.phrase.lower().replace(" ", "-")
    is_nowhere = status is HTTPStatus.NOT_FOUND
    detail = "Nothing is served at this path: see /openapi.json." if is_nowhere else error.detail
    return respond(Problem(status, slug, detail, headers=error.headers), request.scope)


_CONFLICTS: Final[Mapping[type[StoreError], str]] = {
    JobNotTerminal: "job-not-over",
    JobOver: "job-over",
    DepartureRefused: "worker-stays",
    TokenExists: "token-exists",
}


def _store(request: Request, error: Exception) -> Response:
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
            problem = InDoubt(str(error))
        case StoreUnavailable():
            problem = StoreAway(str(error))
        case _:
            raise error  # a fault of ours, like anything else that nobody expected
    return respond(problem, request.scope)


def _unexpected(request: Request, _error: Exception) -> Response:
    # The door writes it to the log, with the request's id.
    return respond(
        Problem(
            HTTPStatus.INTERNAL_SERVER_ERROR,
            "unexpected",
            "This is a fault of the server: its log has the story under this request_id.",
        ),
        request.scope,
    )


def _plain(part: str | int) -> str | int:
    # A field's name is the client's: half a surrogate pair in it could not be encoded.
    return part if isinstance(part, int) else part.encode("utf-8", "replace").decode()


def _body_fields(request: Request) -> list[str]:
    route = request.scope.get("route")
    if not isinstance(route, APIRoute) or route.body_field is None:
        return []
    annotation = route.body_field.field_info.annotation
    for candidate in (annotation, *getattr(annotation, "__args__", ())):
        fields = getattr(candidate, "model_fields", None)
        if fields:
            return list(fields)
    return []
