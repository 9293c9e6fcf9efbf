"""The page: every view is rendered here first, so it is readable without scripts."""

from collections.abc import Callable, Coroutine
from functools import cache, partial
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final
from urllib.parse import urlencode

import msgspec
from anyio.to_thread import run_sync
from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.routing import APIRoute
from xxhash import xxh3_64_hexdigest

from api.access.auth import SESSION_COOKIE, Caller
from api.dependencies import READ, SUBMIT, AppState, CurrentCaller, State
from api.errors import Problem, invalid_field, problem_of
from api.listing import RequestedPage, jobs_of
from api.page.submission import controls, fields_of, job_text, submit_command
from api.page.texts import EXTREMES, TEXTS, age, differences, differing, in_order, progress, short
from api.page.timeline import timeline
from api.routes.hosts import list_hosts
from api.routes.logs import GREP_LIMIT, TAIL_DEFAULT, line_view
from api.routes.service import get_version, health
from api.routes.watch import live_state
from api.schema import KnownJobId, body
from api.views import job_view
from database.records import Job
from muster.checkpoints.errors import CheckpointMissing
from muster.checkpoints.listing import checkpoint_dirs, examine
from muster.client.progress import duration
from muster.contracts.errors import MusterError
from muster.contracts.interpreter import VERSION
from muster.contracts.job.problems import checked_job_id
from muster.contracts.location import parse_location
from muster.contracts.series import LOSS
from muster.contracts.settings.paths import checkpoints_of_job, size_text
from muster.contracts.token import Scope, masked
from muster.host.yaml_files import YamlFile
from muster.logs.source import LogFilter

if TYPE_CHECKING:
    from jinja2 import Environment

HERE: Final = Path(__file__).parent

POLICY: Final = (
    "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; "
    "object-src 'none'"
)
"""Nothing from another host, no inline script, no inline style."""

TYPES: Final = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}

EVENTS_SHOWN: Final = 300
ATTEMPTS_SHOWN: Final = 500

PLACES: Final = 16  # of checkpoints that are shown: ranks may have one each

COMPARED: Final = 6  # jobs in one picture, at most: there is a colour for each

SESSION_SECONDS: Final = 30 * 86400
"""Of a cookie whose token does not expire."""


class PageRoute(APIRoute):
    """Shows a refusal as a page, where a page is asked for."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                return await handle(request)
            except Exception as error:
                problem = problem_of(error)
                is_page = "text/html" in request.headers.get("accept", "")
                if problem.status < HTTPStatus.BAD_REQUEST or not is_page:
                    raise
                page = _render("problem.html", problem=problem, detail=masked(problem.detail))
                page.status_code = problem.status
                page.headers.update(problem.headers)
                return page

        return answer


router = APIRouter(
    include_in_schema=False, dependencies=[READ], prefix="/ui", route_class=PageRoute
)
open_router = APIRouter(include_in_schema=False, prefix="/ui")
"""What is shown without a token; see `api.access.middleware`."""


class JobText(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    text: Annotated[str, msgspec.Meta(max_length=100_000)]  # YAML takes 2 s for that


async def _leave_out_empty(request: Request) -> None:
    """Send a browser to the address without empty parameters, which a form sends as well."""
    asked = request.query_params.multi_items()
    given = [(name, value) for name, value in asked if value]
    if len(given) < len(asked):
        headers = {"Location": f"{request.url.path}?{urlencode(given)}".rstrip("?")}
        raise Problem(
            HTTPStatus.SEE_OTHER, "see-other", "Leave empty parameters out.", headers=headers
        )


@router.get("", dependencies=[Depends(_leave_out_empty)])
@router.get("/", dependencies=[Depends(_leave_out_empty)])
def show_jobs(state: State, page: RequestedPage, request: Request) -> Response:
    """Show the list of jobs; filters are those of GET /jobs."""
    jobs, headers = jobs_of(page, state, request)
    ranks, now = state.history.workers_by_job([job.job_id for job in jobs]), state.clock()
    views = [live_state(job, ranks.get(job.job_id, []), now) for job in jobs]
    return _render(
        "jobs.html", jobs=views, total=headers["X-Total-Count"], query=dict(request.query_params)
    )


@router.get("/jobs/{job_id}")
def show_job(job_id: KnownJobId, state: State, caller: CurrentCaller) -> Response:
    """Show one job: why it is in its state, its time line, its ranks and its events."""
    job = state.jobs.get(job_id)
    history = state.history
    events = history.events(job_id, EVENTS_SHOWN)
    attempts = history.attempts(job_id, ATTEMPTS_SHOWN)
    view = live_state(job, history.workers(job_id), state.clock())
    found = history.series_extremes(job_id)
    return _render(
        "job.html",
        job=view,
        detail=msgspec.to_builtins(job_view(job, caller)),
        events=events,
        last_event=events[-1].event_id if events else 0,
        timeline=timeline(job.created_at, job.finished_at or state.clock(), attempts, events),
        differing=differing(view["workers"].values()),
        curves=[(view, {name: found[name] for name in in_order(found)})],
        is_over=job.is_terminal,
    )


@router.get("/compare", dependencies=[Depends(_leave_out_empty)])
def compare_jobs(
    state: State,
    caller: CurrentCaller,
    job: Annotated[list[str], Query()] = [],  # noqa: B006  FastAPI copies it
    name: str = LOSS,
) -> Response:
    """Show one curve of several jobs in one picture, and in what their specs differ."""
    ids = list(dict.fromkeys(job))
    if not 1 < len(ids) <= COMPARED:
        example = "as in /ui/compare?job=a&job=b"
        raise invalid_field("query", "job", f"choose two to {COMPARED} jobs, {example}")
    jobs = [state.jobs.get(checked_job_id(job_id)) for job_id in ids]
    history, now = state.history, state.clock()
    views = [live_state(job, history.workers(job.job_id), now) for job in jobs]
    found = [history.series_extremes(job.job_id) for job in jobs]
    pairs = zip(views, found, strict=True)
    return _render(
        "compare.html",
        curves=[(view, {name: series.get(name, {})}) for view, series in pairs],
        names=in_order(name for series in found for name in series),
        fields=differences([msgspec.to_builtins(job_view(job, caller))["spec"] for job in jobs]),
    )


@router.get("/jobs/{job_id}/logs")
async def show_logs(
    job_id: KnownJobId,
    state: State,
    rank: Annotated[str, Query(pattern="^[0-9]{0,5}$")] = "",
    grep: Annotated[str, Query(max_length=GREP_LIMIT)] = "",
) -> Response:
    """Show the last lines of a job; a script goes on with those that come."""
    job = await run_sync(state.jobs.get, job_id)
    chosen = int(rank) if rank else None
    if chosen is not None and chosen >= job.spec.largest_world_size:
        most = job.spec.largest_world_size - 1
        raise invalid_field("query", "rank", f"there is no rank {chosen}: choose 0 to {most}")
    wanted = LogFilter(rank=chosen, text=grep or None)
    tail = partial(state.logs_of(job_id).tail, wanted, TAIL_DEFAULT)
    found = await run_sync(tail, limiter=state.log_searches if grep else None)
    part = "" if chosen is None else f"&rank={chosen}"
    return _render(
        "logs.html",
        job_id=job_id,
        world_size=job.spec.largest_world_size,
        rank=chosen,
        grep=grep,
        lines=[line_view(line) for line in found.lines],
        # What a search has found is no stream.
        stream="" if grep else f"/jobs/{job_id}/logs/stream?tail={TAIL_DEFAULT}{part}",
    )


@router.get("/jobs/{job_id}/checkpoints")
def show_checkpoints(job_id: KnownJobId, state: State, caller: CurrentCaller) -> Response:
    """Show what a job has saved, as the manifests tell: no array is read."""
    job = state.jobs.get(job_id)
    found, problem = [], None
    try:
        place = checkpoints_of_job(parse_location(job.spec.checkpoint_dir or ""), job_id)
        places = checkpoint_dirs(place, job.uid)
        shown = places[:PLACES]
        found = [(place.label, one) for place in shown for one in examine(place, reads_all=False)]
        problem = f"Of {len(places)} ranks {PLACES} are shown." if len(places) > PLACES else None
    except CheckpointMissing:
        pass
    except (MusterError, OSError) as error:
        problem = str(error)
    command = submit_command(_like(job, state, caller))
    values = {"found": found, "problem": problem, "command": command, "is_over": job.is_terminal}
    is_shared = job.spec.mode == "synchronous"
    return _render("checkpoints.html", job_id=job_id, is_shared=is_shared, **values)


@router.get("/submit")
def show_submit(
    state: State, caller: CurrentCaller, resume_from: Annotated[str, Query(max_length=82)] = ""
) -> Response:
    """Show an empty job, or one that goes on from the checkpoints of `resume_from`."""
    earlier = resume_from.partition(":")[0]
    job = state.jobs.get(checked_job_id(earlier)) if resume_from else None
    text = job_text({**_like(job, state, caller), "resume_from": resume_from}) if job else ""
    return _render("submit.html", controls=[*controls()], text=text)


def _like(job: Job, state: AppState, caller: Caller) -> dict[str, Any]:
    """Return the fields of a job that goes on from the checkpoints of another one."""
    fields = fields_of(job_view(job, caller).spec)
    if not caller.scope.covers(Scope.SUBMIT):
        fields.pop("env", None)  # the values are hidden
    if job.spec.command and job.spec.dataset_dir == str(state.submitter.settings.dataset_dir):
        fields.pop("dataset_dir", None)  # the default, which need not exist
    return {**fields, "resume_from": job.job_id}


@router.post("/submit/fields", dependencies=[SUBMIT])
def read_fields(sent: Annotated[JobText, body(JobText)]) -> Response:
    """Return the fields of a job file, as JSON: scripts read no YAML."""
    try:
        content = YamlFile.parse(sent.text, "line").content or {}
    except MusterError as error:
        raise invalid_field("body", "text", str(error)) from error
    if not isinstance(content, dict):
        raise invalid_field("body", "text", "expected fields of a job, such as world_size: 4")
    try:
        return Response(msgspec.json.encode(content), media_type="application/json")
    except (TypeError, ValueError, OverflowError) as error:
        raise invalid_field("body", "text", f"JSON has no such value: {error}") from error


@router.get("/service")
def show_service(state: State, request: Request) -> Response:
    """Show what waits, what holds the slots, the hosts, and whether all is well."""
    jobs, now = state.jobs.unfinished(), state.clock()
    ranks = state.history.workers_by_job([job.job_id for job in jobs])
    views = [live_state(job, ranks[job.job_id], now) for job in jobs]
    answers = {"hosts": list_hosts(state), "health": health(state, request)}
    answers["about"] = get_version(state)
    told = {name: msgspec.json.decode(answer.body) for name, answer in answers.items()}
    return _render("service.html", jobs=views, **told)


@open_router.get("/login")
def show_login() -> Response:
    """Ask for a token."""
    return _render("login.html")


@router.post("/session")
def begin_session(request: Request, state: State, caller: CurrentCaller) -> Response:
    """Keep the token of the Authorization header in a cookie that no script reads."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        detail = "Send the token in the Authorization header; your own machine needs none."
        raise Problem(HTTPStatus.BAD_REQUEST, "no-token", detail)
    response = Response(status_code=HTTPStatus.NO_CONTENT)
    expires_at = None
    if caller.token_id is not None and (known := state.tokens.find(caller.token_id)) is not None:
        expires_at = known.expires_at
    left = SESSION_SECONDS if expires_at is None else (expires_at - state.clock()).total_seconds()
    response.set_cookie(
        SESSION_COOKIE,
        token.strip(),
        max_age=int(min(left, SESSION_SECONDS)),
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )
    return response


@router.delete("/session")
def end_session() -> Response:
    """Forget the token."""
    response = Response(status_code=HTTPStatus.NO_CONTENT)
    response.delete_cookie(SESSION_COOKIE, httponly=True, samesite="strict")
    return response


@open_router.get("/static/{digest}/{name}")
def get_static(digest: str, name: str) -> Response:
    """Return a script or the style sheet of this version."""
    path = HERE / "static" / name
    if digest != _digest() or path.suffix not in TYPES or path.name != name or not path.is_file():
        raise Problem(HTTPStatus.NOT_FOUND, "not-found", f"There is no {name[:64]!r}: reload.")
    headers = {"Cache-Control": "max-age=31536000, immutable"}
    return Response(path.read_bytes(), headers=headers, media_type=TYPES[path.suffix])


@cache
def _digest() -> str:
    """Return what is in the address of every file, so that a browser keeps none of an older one."""
    files = sorted((HERE / "static").iterdir())
    return xxh3_64_hexdigest(b"".join(path.read_bytes() for path in files))


def _render(name: str, **values: object) -> Response:
    html = _environment().get_template(name).render(values)
    headers = {"Content-Security-Policy": POLICY, "Referrer-Policy": "same-origin"}
    return Response(html, headers=headers, media_type="text/html")


@cache
def _environment() -> "Environment":
    from jinja2 import Environment, FileSystemLoader  # noqa: PLC0415  takes 50 ms

    loader = FileSystemLoader(HERE / "templates")
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.globals |= {"static": f"/ui/static/{_digest()}", "version": VERSION}
    environment.globals |= {"age": age, "duration": duration, "progress": progress}
    environment.globals |= {"size": size_text, "short": short, "EXTREMES": EXTREMES}
    environment.globals["text"] = lambda name, view: TEXTS[name](view)
    return environment
