"""What a client is told when its request is not answered: problem documents (RFC 9457).

Problem                 carries status, type, a sentence and the fields that are wrong
├── JobNotFound         404  no job has this id
├── WorkerNotFound      404  the job has never had a worker of this id
├── MethodNotAllowed    405  the path is there, and takes other methods
├── InvalidRequest      422  one or more fields of the body or the query cannot be accepted
├── TokenNotFound       404  no token that could be revoked has this name
├── Conflict            409  the job's present state forbids it; the sentence names the way on
├── Changed             412  the job is no longer what the caller saw
├── Unauthorized        401  nobody we know
├── ScopeTooSmall       403  somebody we know, who may not do this
├── TooManyRequests     429  not now, from this client
└── StoreAway           503  the database cannot be reached now, and nothing was written
    └── InDoubt         503  it was lost at the very moment of a commit

A value that a client sent is said back only where it is short; the name of a field and a path are
said whole, for whoever has to find them. The document itself is ASCII, whatever is in it.
"""

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from starlette.responses import Response
from starlette.types import Scope

from api.tracing import trace_id
from muster.contracts.errors import InvalidSpec, MusterError

RETRY_AFTER_SECONDS: Final = 1

MEDIA_TYPE = "application/problem+json"


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldError:
    """One thing that is wrong with a request."""

    loc: tuple[str | int, ...]
    """Where: ``("body", "world_size")`` or ``("query", "limit")``."""
    msg: str
    type: str
    hint: str | None = None
    """What was probably meant."""


class Problem(MusterError):
    """Ends a request with a problem document. `slug` names the kind, for machines."""

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
        super().__init__(
            HTTPStatus.NOT_FOUND, "job-not-found", "There is no such job: GET /jobs lists them."
        )


class WorkerNotFound(Problem):
    def __init__(self) -> None:
        super().__init__(
            HTTPStatus.NOT_FOUND,
            "worker-not-found",
            "This job has no such worker: GET /jobs/{job_id}/workers lists them.",
        )


class TokenNotFound(Problem):
    def __init__(self) -> None:
        super().__init__(
            HTTPStatus.NOT_FOUND,
            "token-not-found",
            "There is no such token, or it was revoked before: GET /tokens lists them.",
        )


class MethodNotAllowed(Problem):
    """The headers say which methods are: ``Allow``."""

    def __init__(self, headers: Mapping[str, str] | None) -> None:
        super().__init__(
            HTTPStatus.METHOD_NOT_ALLOWED,
            "method-not-allowed",
            "This path does not take this method: see /openapi.json.",
            headers=headers,
        )


class InvalidRequest(Problem):
    def __init__(self, errors: Sequence[FieldError]) -> None:
        super().__init__(
            HTTPStatus.UNPROCESSABLE_ENTITY,
            "invalid-request",
            "; ".join(_sentence(error) for error in errors),
            errors=errors,
        )


class StoreAway(Problem):
    def __init__(self, detail: str, slug: str = "store-unavailable") -> None:
        super().__init__(
            HTTPStatus.SERVICE_UNAVAILABLE,
            slug,
            detail,
            headers={"Retry-After": str(RETRY_AFTER_SECONDS)},
        )


class InDoubt(StoreAway):
    def __init__(self, detail: str) -> None:
        super().__init__(detail, "commit-in-doubt")


class Conflict(Problem):
    def __init__(self, slug: str, detail: str) -> None:
        super().__init__(HTTPStatus.CONFLICT, slug, detail)


def invalid_field(where: str, field: str, message: str, hint: str | None = None) -> InvalidRequest:
    """Return the refusal of one field of the "body" or the "query"."""
    return InvalidRequest(
        [FieldError(loc=(where, field), msg=message, type="value_error", hint=hint)]
    )


def invalid_spec(error: InvalidSpec) -> InvalidRequest:
    """Return what `muster.contracts.spec` found, as fields of the body."""
    return InvalidRequest(
        [
            FieldError(loc=("body", problem.field), msg=problem.message, type="value_error")
            for problem in error.problems
        ]
    )


def did_you_mean(name: str, known: Iterable[str]) -> str | None:
    """Return a question with the nearest known name, or None if none is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {str(near[0])!r}?" if near else None


def respond(problem: Problem, scope: Scope) -> Response:
    """Return the document; `scope` says which request it is about."""
    document = {
        "type": f"/problems/{problem.slug}",
        "title": problem.slug.replace("-", " ").capitalize(),
        "status": int(problem.status),
        "detail": problem.detail,
        "instance": scope.get("path", ""),
        "request_id": scope.get("state", {}).get("request_id", ""),
    }
    trace = trace_id(scope)
    if trace is not None:
        document["trace_id"] = trace
    if problem.errors:
        document["errors"] = [
            {"loc": list(error.loc), "msg": error.msg, "type": error.type, "hint": error.hint}
            for error in problem.errors
        ]
    # ASCII only: a path may hold what UTF-8 cannot.
    return Response(
        json.dumps(document), problem.status, headers=problem.headers, media_type=MEDIA_TYPE
    )


def _sentence(error: FieldError) -> str:
    where = ".".join(str(part) for part in error.loc[1:]) or str(error.loc[0])
    return f"{where}: {error.msg}" + (f" ({error.hint})" if error.hint else "")
