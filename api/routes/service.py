"""The service itself: probes for monitors, its versions, its tokens, and pages for people.

A token's text is returned once, by POST /tokens. The pages are made from the OpenAPI document. They
have no script and their policy allows none: a script of this origin could submit jobs.
"""

import os
import re
import shutil
from datetime import timedelta
from functools import cache
from http import HTTPStatus
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Annotated, Final, Literal

import msgspec
import structlog
from fastapi import APIRouter, Path, Request, Response
from fastapi.responses import RedirectResponse
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST, generate_latest

from api.dependencies import ADMIN, API_VERSION, READ, AppState, CurrentCaller, State
from api.errors import Problem
from api.schema import TokenRequest, body, operation, reply
from api.views import token_view
from database.errors import DatabaseError, TokenMissing
from muster.contracts.interpreter import VERSION
from muster.contracts.settings.paths import has_few_files_left, is_nearly_full, size_text
from muster.contracts.token import NAME_PATTERN
from muster.contracts.views.service import (
    Alive,
    Check,
    Checks,
    Health,
    TokenCreated,
    TokenList,
    TokenView,
    Version,
)

if TYPE_CHECKING:
    from jinja2 import Template

_LOG: Final = structlog.get_logger("api")

_POLICY: Final = (
    "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "style-src 'unsafe-inline'"
)

router = APIRouter(tags=["service"])
token_router = APIRouter(tags=["tokens"])
page_router = APIRouter(include_in_schema=False, dependencies=[READ])


@router.get(
    "/health", **operation("Liveness, version, database, coordinator and disk", None, Health)
)
def health(state: State, request: Request) -> Response:
    """Answer 200 while this process serves; `status` says whether all checks passed.

    Details are for callers with a token of scope read.
    """
    database, coordinator, disk = _database(state), _coordinator(state), _disk(state)
    is_ok = all(check.status == "ok" for check in (database, coordinator, disk))
    is_authenticated = "caller" in request.scope["state"]
    if not is_authenticated:  # errors and paths are for authenticated callers
        database, coordinator, disk = (
            Check(status=check.status, detail="") for check in (database, coordinator, disk)
        )
    view = Health(
        status="ok" if is_ok else "degraded",
        version=VERSION if is_authenticated else None,
        uptime_seconds=state.uptime_seconds(),
        checks=Checks(database=database, coordinator=coordinator, disk=disk),
    )
    return reply(view)


# A coroutine, so that it answers when all threads are busy.
@router.get("/healthz", include_in_schema=False)
@router.get("/livez", **operation("Whether this process lives; also at /healthz", None, Alive))
async def get_liveness() -> Response:
    """Answer 200 without any check: if this fails, restart the process."""
    return reply(Alive(status="ok"))


@router.get("/readyz", **operation("Whether this service can answer requests", None, Alive, 503))
def get_readiness(state: State) -> Response:
    """Answer 200 while the database can be read, otherwise 503.

    Without a coordinator the service still lists jobs and accepts new ones; see `/health`.
    """
    database = _database(state)
    if database.status != "ok":
        _LOG.warning(f"not ready: {database.detail}", action="not_ready", reason=database.detail)
        detail = "The database cannot be read. /health says why, to callers with a token."
        raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, "not-ready", detail)
    return reply(Alive(status="ok"))


@router.get(
    "/version",
    **operation(
        "Versions of program, API and database schema, and where its data is", READ, Version
    ),
)
def get_version(state: State) -> Response:
    """Say which service this is."""
    view = Version(
        app=VERSION,
        api=API_VERSION,
        schema_revision=state.database.revision(),
        database=state.database.kind,
        data_dir=str(state.data_dir.root),
        checkpoint_dir=str(state.submitter.settings.checkpoint_dir),
    )
    return reply(view)


@router.get(
    "/metrics",
    summary="Metrics for Prometheus",
    response_class=Response,
    dependencies=[READ],
    responses={200: {"content": {CONTENT_TYPE_LATEST: {"schema": {"type": "string"}}}}},
)
def get_metrics(state: State) -> Response:
    """Return metrics of the service, and of each job that runs or ended in the last ten minutes.

    The format is OpenMetrics. While the database is away only `muster_database_up`, the disk and
    the requests have values.
    """
    text = generate_latest(state.metrics)  # type: ignore[no-untyped-call]
    return Response(text, media_type=CONTENT_TYPE_LATEST)


@token_router.post("/tokens", **operation("Create a token", ADMIN, TokenCreated, status=201))
def create_token(
    requested: Annotated[TokenRequest, body(TokenRequest)], state: State, caller: CurrentCaller
) -> Response:
    """Return the token's text, which is not stored and cannot be requested again."""
    seconds = requested.expires_in_seconds
    token, text = state.tokens.create(
        requested.name,
        requested.scope,
        lifetime=None if seconds is None else timedelta(seconds=seconds),
        created_by=caller.name,
    )
    fields = msgspec.structs.asdict(token_view(token, state.clock()))
    return reply(TokenCreated(**fields, token=text), HTTPStatus.CREATED)


@token_router.get(
    "/tokens", **operation("Tokens, oldest first; invalid ones for 30 days", ADMIN, TokenList)
)
def list_tokens(state: State) -> Response:
    now = state.clock()
    return reply(TokenList(tokens=[token_view(token, now) for token in state.tokens.all()]))


@token_router.delete("/tokens/{name}", **operation("Revoke a token at once", ADMIN, TokenView, 404))
def revoke_token(
    name: Annotated[str, Path(description="The token's name.")], state: State
) -> Response:
    """Revoke it for good; its row stays for a while as a record."""
    if not re.fullmatch(NAME_PATTERN, name):
        raise TokenMissing(name)
    return reply(token_view(state.tokens.revoke(name), state.clock()))


@page_router.get("/")
def get_index() -> Response:
    """Send a browser to the web page."""
    return RedirectResponse("/ui/", HTTPStatus.TEMPORARY_REDIRECT)


@page_router.get("/docs")
def get_docs(request: Request) -> Response:
    """Return the OpenAPI document as a page."""
    html = _template().render(document=request.app.openapi())
    return Response(html, headers={"Content-Security-Policy": _POLICY}, media_type="text/html")


def _database(state: AppState) -> Check:
    try:
        state.database.revision()
    except DatabaseError as error:
        return _check(str(error))
    return _check(None, "reachable")


def _coordinator(state: AppState) -> Check:
    try:
        return _check(state.coordinator.absence(), "running")
    except DatabaseError:
        return _check("unknown while the database is unavailable")


def _disk(state: AppState) -> Check:
    root = state.data_dir.root
    try:
        usage, files = shutil.disk_usage(root), os.statvfs(root)
    except OSError as error:
        return _check(f"cannot read {root} ({error.strerror})")
    problem = None
    if is_nearly_full(usage.free, usage.total):
        problem = f"only {size_text(usage.free)} are free on the disk of {root}"
    elif has_few_files_left(files.f_favail, files.f_files):
        problem = f"only {files.f_favail} more files (inodes) fit on the disk of {root}"
    if problem is not None:
        return _check(f"{problem}: free some space, or delete old jobs (POST /jobs/purge)")
    return _check(None, f"{size_text(usage.free)} are free")


def _check(problem: str | None, otherwise: str = "") -> Check:
    status: Literal["ok", "degraded"] = "ok" if problem is None else "degraded"
    return Check(status=status, detail=otherwise if problem is None else problem)


@cache
def _template() -> "Template":
    from jinja2 import Environment, FileSystemLoader  # noqa: PLC0415  takes 50 ms
    from markupsafe import Markup, escape  # noqa: PLC0415

    def words(text: str) -> Markup:
        """Return text with `words` in backticks as code, and blank lines as breaks."""
        html = re.sub(r"`+([^`]+)`+", r"<code>\1</code>", str(escape(text)))
        return Markup(html.replace("\n\n", "<br><br>"))  # noqa: S704  it is escaped

    loader = FileSystemLoader(FilePath(__file__).parent)
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["words"] = words
    return environment.get_template("pages.html")
