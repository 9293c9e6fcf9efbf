"""JSON at the edge of the API: request bodies, responses, and their schemas for OpenAPI."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Annotated, Any, Final, TypeAlias, TypeVar

import msgspec
from fastapi import Body, Depends
from msgspec import Meta
from starlette.responses import Response

from api.errors import MEDIA_TYPE, FieldError, InvalidRequest, did_you_mean
from muster.contracts import token, views
from muster.contracts.errors import CONTROLS
from muster.contracts.spec import LIMITS, SECONDS_LIMIT, JobRequest
from muster.contracts.spec_problems import declared_fields, mismatches
from muster.contracts.token import NAME_PATTERN, NAME_WANTED, Scope

REASON_LIMIT: Final = 500
"""Characters of a reason: a sentence or two."""

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
        Scope, Meta(description="read, submit (may change jobs) or admin (may create tokens).")
    ] = Scope.READ
    expires_in_seconds: Annotated[
        Annotated[int, Meta(ge=1, le=token.SECONDS_LIMIT)] | None,
        Meta(description="null: it does not expire."),
    ] = None


_EXAMPLES: Final[Mapping[type[msgspec.Struct], Mapping[str, Any]]] = {
    JobRequest: {"job_id": "digits", "world_size": 4, "checkpoint_every": 5},
    JobPatch: {"world_size": 6},
    StopBody: {"grace_seconds": 30, "reason": "the loss diverges"},
    TokenRequest: {"name": "ci", "scope": "submit", "expires_in_seconds": 2592000},
}


def body(kind: type[Sent], *, is_optional: bool = False) -> Any:  # noqa: ANN401  as FastAPI's own Depends
    """Return the dependency that reads the request body as `kind`.

    FastAPI parses the JSON before it checks the scope of the caller; fields are checked after.
    """
    shape = Body(title=kind.__name__, json_schema_extra={"x-struct": kind.__name__})

    async def required(sent: Annotated[object, shape]) -> Sent:
        return decode(sent, kind)

    async def optional(sent: Annotated[object, shape] = None) -> Sent:
        return decode({} if sent is None else sent, kind)

    return Depends(optional if is_optional else required)


def decode(sent: object, kind: type[Sent]) -> Sent:
    """Return parsed JSON as `kind`, or raise `InvalidRequest` with every field that is wrong."""
    if not isinstance(sent, dict):
        found = [FieldError(loc=("body",), msg="expected a JSON object", type="dict_type")]
        raise InvalidRequest(found)
    fields = declared_fields(kind)
    errors = [
        FieldError(loc=("body", name), msg="is required", type="missing")
        for name, field in fields.items()
        if field.required and name not in sent
    ]
    for name, value in sent.items():
        if name not in fields:
            errors.append(_unknown(name, fields))
            continue
        errors += [
            FieldError(loc=("body", name, *map(_valid, one.path)), msg=one.message, type=one.kind)
            for one in mismatches(value, fields[name].type, is_secret=name == "secrets")
        ]
    if errors:
        raise InvalidRequest(errors)
    return msgspec.convert(sent, kind)


def _unknown(name: str, fields: Mapping[str, object]) -> FieldError:
    hint = did_you_mean(name, fields)
    return FieldError(
        loc=("body", _valid(name)), msg="there is no such field", type="extra_forbidden", hint=hint
    )


def _valid(part: str | int) -> str | int:
    """Replace half a surrogate pair, which cannot be encoded."""
    return part if isinstance(part, int) else part.encode("utf-8", "replace").decode()


def reply(
    view: views.View, status: int = HTTPStatus.OK, headers: Mapping[str, str] | None = None
) -> Response:
    """Return the response with `view` as JSON."""
    return Response(msgspec.json.encode(view), status, headers, media_type=_JSON)


def returns(kind: type[views.View], status: int = HTTPStatus.OK) -> Responses:
    """Describe the JSON response of a route for OpenAPI."""
    content = {_JSON: {"schema": {"$ref": _REF.format(name=kind.__name__)}}}
    return {int(status): {"description": "Successful Response", "content": content}}


def refusals(*statuses: HTTPStatus) -> Responses:
    """Describe the problem documents with which a route refuses."""
    return {
        status.value: {"description": status.phrase, "content": _PROBLEM} for status in statuses
    }


_PROBLEM: Final = {MEDIA_TYPE: {"schema": {"$ref": _REF.format(name=views.ProblemView.__name__)}}}

ANY: Final[Responses] = {
    "4XX": {"description": "Why the request was refused.", "content": _PROBLEM},
    "5XX": {"description": "Why the service cannot answer now.", "content": _PROBLEM},
}
"""Refusals of every route: by the access middleware and by the database."""

UNCHANGED: Final[Responses] = {
    HTTPStatus.NOT_MODIFIED: {
        "description": "The response named in `If-None-Match` is still current."
    }
}


def add_schemas(document: dict[str, Any]) -> None:
    """Add the schemas of all bodies to an OpenAPI document, and refer to them from requests."""
    kinds = [
        kind
        for kind in vars(views).values()
        if isinstance(kind, type)
        and issubclass(kind, views.View)
        and kind is not views.View
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
