"""The problem documents (RFC 9457) that answer a refused request.

Problem                    status, kind, a sentence and the fields that are wrong
├── Unauthorized           401  api.auth
├── ScopeTooSmall          403  api.auth
├── JobNotFound            404
├── WorkerNotFound         404
├── TokenNotFound          404
├── MethodNotAllowed       405
├── Conflict               409  the job's state does not allow the request
├── Changed                412  api.conditional
├── InvalidRequest         422  fields of the body, the query or the headers
├── TooManyRequests        429  api.rate_limits
└── ServiceUnavailable     503  the database cannot be reached

A long value that a client sent is not repeated in its refusal; a path and the name of a field are.
"""

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from starlette.responses import Response
from starlette.types import Scope

from muster.contracts.errors import InvalidSpec, MusterError

RETRY_AFTER_SECONDS: Final = 1

MEDIA_TYPE = "application/problem+json"


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldError:
    """One invalid field of a request."""

    loc: tuple[str | int, ...]
    """Its path: ``("body", "world_size")`` or ``("query", "limit")``."""
    msg: str
    type: str
    hint: str | None = None
    """What was probably meant."""


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


class JobNotFound(Problem):
    def __init__(self) -> None:
        detail = "There is no job with this id. GET /jobs lists all jobs."
        super().__init__(HTTPStatus.NOT_FOUND, "job-not-found", detail)


class WorkerNotFound(Problem):
    def __init__(self) -> None:
        detail = "The job has no worker with this id. GET /jobs/{job_id}/workers lists them."
        super().__init__(HTTPStatus.NOT_FOUND, "worker-not-found", detail)


class TokenNotFound(Problem):
    def __init__(self) -> None:
        detail = "There is no valid token with this name. GET /tokens lists all tokens."
        super().__init__(HTTPStatus.NOT_FOUND, "token-not-found", detail)


class MethodNotAllowed(Problem):
    """`headers` names the allowed methods in ``Allow``."""

    def __init__(self, headers: Mapping[str, str] | None) -> None:
        detail = "This path does not support this method. See /openapi.json."
        super().__init__(
            HTTPStatus.METHOD_NOT_ALLOWED, "method-not-allowed", detail, headers=headers
        )


class InvalidRequest(Problem):
    def __init__(self, errors: Sequence[FieldError]) -> None:
        detail = "; ".join(_sentence(error) for error in errors)
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


def invalid_spec(error: InvalidSpec) -> InvalidRequest:
    """Return the refusal of a job specification, with its problems as fields of the body."""
    return InvalidRequest(
        [
            FieldError(loc=("body", problem.field), msg=problem.message, type="value_error")
            for problem in error.problems
        ]
    )


def did_you_mean(name: str, known: Iterable[str]) -> str | None:
    """Return a question with the most similar known name, or None if none is similar."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {str(near[0])!r}?" if near else None


def problem_response(problem: Problem, scope: Scope) -> Response:
    """Return the document that answers the request of `scope`."""
    document = {
        "type": f"/problems/{problem.slug}",
        "title": problem.slug.replace("-", " ").capitalize(),
        "status": int(problem.status),
        "detail": problem.detail,
        "instance": scope.get("path", ""),
        "request_id": scope.get("state", {}).get("request_id", ""),
    }
    if problem.errors:
        document["errors"] = [
            {"loc": list(error.loc), "msg": error.msg, "type": error.type, "hint": error.hint}
            for error in problem.errors
        ]
    # json.dumps writes ASCII only: a path may contain what UTF-8 cannot encode.
    return Response(
        json.dumps(document), problem.status, headers=problem.headers, media_type=MEDIA_TYPE
    )


def _sentence(error: FieldError) -> str:
    where = ".".join(str(part) for part in error.loc[1:]) or str(error.loc[0])
    return f"{where}: {error.msg}" + (f" ({error.hint})" if error.hint else "")
