"""What routes read and answer: bodies, parameters, JSON responses, and their OpenAPI schemas."""

import re
from collections.abc import Mapping
from http import HTTPStatus
from itertools import islice
from typing import Annotated, Any, Final, Literal, TypeAlias, TypeVar

import msgspec
from fastapi import Body, Depends, Path, Request
from msgspec import Meta
from starlette.responses import Response

from api.dependencies import PREFIX
from api.errors import MEDIA_TYPE, InvalidRequest
from database.errors import JobMissing, MemberMissing
from muster.contracts import token
from muster.contracts.errors import CONTROLS, InvalidSpec
from muster.contracts.job.field_types import SECONDS_LIMIT, NodeName
from muster.contracts.job.limits import LIMITS
from muster.contracts.job.problems import checked_job_id, field_errors, unknown_names
from muster.contracts.job.spec import JobRequest
from muster.contracts.job.status import JobId
from muster.contracts.token import NAME_PATTERN, NAME_WANTED, Scope
from muster.contracts.views import history, job, service
from muster.contracts.views.history import Fault
from muster.contracts.views.service import FieldError, ProblemView
from muster.contracts.views.view import View

REASON_LIMIT: Final = 500
"""Characters of a reason: a sentence or two."""

ERRORS_LIMIT: Final = 20
"""Most fields that one refusal names. To look for a similar known name takes 0.1 ms."""

_REF: Final = "#/components/schemas/{name}"
_JSON: Final = "application/json"

Responses: TypeAlias = dict[int | str, dict[str, Any]]
Sent = TypeVar("Sent", bound=msgspec.Struct)


class JobPatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What of a job may change while it trains."""

    world_size: Annotated[
        int,
        Meta(
            ge=int(LIMITS["world_size"].low),
            le=int(LIMITS["world_size"].high),
            description="Number of ranks, from the job's min_workers to its max_workers.",
        ),
    ]


class JoinRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A machine of the cluster file that asks to join a job."""

    node: Annotated[NodeName, Meta(description="Its name in the service's cluster file.")]
    gpu_count: Annotated[int, Meta(ge=0, le=4096, description="GPUs that it offers.")] = 0
    backend: Annotated[Literal["cpu", "cuda"], Meta(description="What it computes on.")] = "cpu"
    epoch: Annotated[
        int,
        Meta(ge=0, le=int(LIMITS["epochs"].high), description="The epoch that it has reached."),
    ] = 0


class StopBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long the ranks may take to save and exit, and why they should."""

    grace_seconds: Annotated[
        Annotated[float, Meta(ge=0, le=SECONDS_LIMIT)] | None,
        Meta(description="Seconds from SIGTERM to SIGKILL. Default: the job's stop_grace_seconds."),
    ] = None
    reason: Annotated[
        Annotated[str, Meta(max_length=REASON_LIMIT, pattern=f"^[^{CONTROLS}]*$")] | None,
        Meta(
            description="For people: the job's events show it.",
            extra={"wanted": "holds a control character, such as a line end: leave it out"},
        ),
    ] = None


class FaultBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is to happen to one rank, or to all ranks of a host and their agent."""

    fault: Annotated[Fault, Meta(description="SIGKILL, SIGSTOP or SIGTERM.")] = "kill"
    rank: Annotated[int | None, Meta(description="Either this rank,")] = None
    host: Annotated[str | None, Meta(description="or this host, which can only be killed.")] = None


class SweepBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    cancel: Annotated[list[str], Meta(description="Some names of the `leftovers`.")] = []


class TokenRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A token to create."""

    name: Annotated[
        str,
        Meta(
            pattern=f"^{NAME_PATTERN}$",
            description="Who or what it is for.",
            extra={"wanted": NAME_WANTED},
        ),
    ]
    scope: Annotated[
        Scope, Meta(description="read, submit (may change jobs) or admin (tokens, sweeps).")
    ] = Scope.READ
    expires_in_seconds: Annotated[
        Annotated[int, Meta(ge=1, le=token.SECONDS_LIMIT)] | None,
        Meta(description="null: it does not expire."),
    ] = None


_EXAMPLES: Final[Mapping[type[msgspec.Struct], Mapping[str, Any]]] = {
    JobRequest: {"job_id": "digits", "world_size": 4, "checkpoint_every": 5},
    JobPatch: {"world_size": 6},
    JoinRequest: {"node": "gpu-box", "gpu_count": 2, "backend": "cuda", "epoch": 3},
    FaultBody: {"fault": "kill", "rank": 1},
    SweepBody: {"cancel": ["muster-0f3a-slurm-1-a1"]},
    StopBody: {"grace_seconds": 30, "reason": "the loss diverges"},
    TokenRequest: {"name": "ci", "scope": "submit", "expires_in_seconds": 2592000},
}


def body(kind: type[Sent], *, is_optional: bool = False) -> Any:  # noqa: ANN401  as FastAPI's own Depends
    """Return the dependency that reads the request body as `kind`.

    FastAPI parses the JSON before it checks the scope of the caller; fields are checked after.
    """
    default = None if is_optional else ...
    shape = Body(default, title=kind.__name__, json_schema_extra={"x-struct": kind.__name__})

    async def read(document: object = shape) -> Sent:
        return decode({} if is_optional and document is None else document, kind)

    return Depends(read)


def decode(document: object, kind: type[Sent]) -> Sent:
    """Return parsed JSON as `kind`, or raise `InvalidRequest` with the fields that are wrong."""
    if not isinstance(document, dict):
        found = [FieldError(loc=("body",), msg="expected a JSON object", type="dict_type")]
        raise InvalidRequest(found)
    if errors := list(islice(field_errors(document, kind), ERRORS_LIMIT)):
        raise InvalidRequest(errors)
    try:
        return msgspec.convert(document, kind)
    except msgspec.ValidationError as error:  # within a list
        found = [FieldError(loc=("body",), msg=str(error), type="type_error")]
        raise InvalidRequest(found) from error


async def refuse_unknown_query(request: Request) -> None:
    """Refuse unknown query parameters: a typing error must not widen a purge."""
    if not request.query_params:
        return
    path = request.scope["route"].path.removeprefix(PREFIX)
    if path.startswith("/ui"):
        return  # pages are not in the document; they change nothing
    operation = request.app.openapi()["paths"].get(path, {}).get(request.method.lower(), {})
    known = [one["name"] for one in operation.get("parameters", ()) if one["in"] == "query"]
    unknown = (name for name in request.query_params if name not in known)
    message = "is not a query parameter of this path"
    if errors := list(islice(unknown_names("query", unknown, message, known), ERRORS_LIMIT)):
        raise InvalidRequest(errors)


async def _job_id(job_id: Annotated[str, Path(description="The job's id.")]) -> JobId:
    try:
        return checked_job_id(job_id)
    except InvalidSpec:
        raise JobMissing(JobId(job_id)) from None


KnownJobId = Annotated[JobId, Depends(_job_id)]


async def _worker_id(
    job_id: KnownJobId, worker_id: Annotated[str, Path(description="As in the list of workers.")]
) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", worker_id):  # ASCII, and within 64 bits
        raise MemberMissing(job_id, worker_id)
    return int(worker_id)


KnownWorkerId = Annotated[int, Depends(_worker_id)]


def reply(
    view: View, status: int = HTTPStatus.OK, headers: Mapping[str, str] | None = None
) -> Response:
    """Return the response with `view` as JSON."""
    return Response(msgspec.json.encode(view), status, headers, media_type=_JSON)


def returns(kind: type[View], status: int = 200) -> Responses:
    """Describe the JSON response of a route for OpenAPI."""
    content = {_JSON: {"schema": {"$ref": _REF.format(name=kind.__name__)}}}
    return {status: {"description": "Successful Response", "content": content}}


def refusals(*statuses: int) -> Responses:
    """Describe the problem documents with which a route refuses."""
    return {
        status: {"description": HTTPStatus(status).phrase, "content": _PROBLEM}
        for status in statuses
    }


_PROBLEM: Final = {MEDIA_TYPE: {"schema": {"$ref": _REF.format(name=ProblemView.__name__)}}}

ANY: Final[Responses] = {
    "4XX": {"description": "Why the request was refused.", "content": _PROBLEM},
    "5XX": {"description": "Why the service cannot answer now.", "content": _PROBLEM},
}
"""Refusals of every route: by the access middleware and by the database."""


def operation(
    summary: str,
    scope: Any,  # noqa: ANN401  FastAPI has no common type for Depends and Security
    kind: type[View],
    *others: int,
    status: int = 200,
) -> dict[str, Any]:
    """Return the declaration of a route that answers with `kind`, or refuses with `others`.

    Only probes have no `scope`: `AccessMiddleware` admits anonymous requests to no other path.
    """
    unchanged = "The response named in `If-None-Match` is still current."
    responses = returns(kind, status)
    for other in others:
        is_unchanged = other == HTTPStatus.NOT_MODIFIED
        responses |= {other: {"description": unchanged}} if is_unchanged else refusals(other)
    return {
        "summary": summary,
        "dependencies": [scope] if scope else [],
        "responses": responses,
        "status_code": status,
    }


def add_schemas(document: dict[str, Any]) -> None:
    """Add the schemas of all bodies to an OpenAPI document, and refer to them from requests."""
    kinds = [
        kind
        for module in (history, job, service)
        for kind in vars(module).values()
        if isinstance(kind, type)
        and issubclass(kind, View)
        and kind is not View
        and not kind.__name__.startswith("_")
    ]
    _, schemas = msgspec.json.schema_components([*kinds, *_EXAMPLES], ref_template=_REF)
    for kind, example in _EXAMPLES.items():
        schemas[kind.__name__]["examples"] = [example]
    document.setdefault("components", {}).setdefault("schemas", {}).update(schemas)
    for methods in document["paths"].values():
        for operation in methods.values():
            if "requestBody" in operation:
                content = operation["requestBody"]["content"][_JSON]
                content["schema"] = {"$ref": _REF.format(name=content["schema"]["x-struct"])}
