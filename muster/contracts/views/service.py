"""REST views of the service: hosts, engines, tokens, health and errors."""

from typing import Annotated, Literal

import msgspec

from muster.contracts.agent import AgentState
from muster.contracts.host import HostFacts
from muster.contracts.job.engine import Engine
from muster.contracts.token import Scope
from muster.contracts.views.view import Moment, View, doc


class HostView(View, frozen=True, kw_only=True):
    """A host on which ranks may run."""

    host: Annotated[str, doc("Its name in the cluster file; `local` without one.")]
    address: str
    transport: Annotated[str, doc("How ranks are started there: local, ssh")]
    slots: Annotated[int | None, doc("Ranks at once. null: the host itself decides.")]
    slots_in_use: int
    jobs: Annotated[list[str], doc("Those that have ranks there.")]
    gpu_count: int
    usable_vram_mb: Annotated[int, doc("Of all its GPUs together.")]
    agents: Annotated[dict[AgentState, int], doc("Number of agents there per state.")]
    facts: Annotated[HostFacts | None, doc("What it has said about itself; null before.")]
    seen_at: Annotated[Moment | None, doc("When it did last.")]
    problem: Annotated[str | None, doc("Why it has not answered since, or starts no agent.")]
    shared_dir: Annotated[
        str | None, doc("A directory that it was proven to share with the coordinator's host.")
    ]
    is_linked: Annotated[
        bool | None, doc("Whether the node that leads hears it now; null if this is no node.")
    ] = None


class LinkView(View, frozen=True, kw_only=True):
    """A link between two nodes of a cluster at home."""

    hosts: list[str]
    megabytes_per_second: Annotated[float, doc("As last measured.")]


class HostList(View, frozen=True, kw_only=True):
    hosts: list[HostView]
    leader: Annotated[str | None, doc("The node of a cluster at home that leads.")] = None
    ring: Annotated[
        list[str], doc("The order in which its nodes send; the last one sends to the first.")
    ] = msgspec.field(default_factory=list)
    links: list[LinkView] = msgspec.field(default_factory=list)


class EngineJob(View, frozen=True, kw_only=True):
    """What a scheduler holds in Muster's name, for no job of this service that is not over."""

    name: str
    state: Annotated[str, doc("In the words of the scheduler.")]
    job_id: Annotated[str | None, doc("A job that is over; null: no job here has its uid.")]


class EngineSweep(View, frozen=True, kw_only=True):
    """A check of a scheduler. A requested one is done once GET /engines shows its number."""

    number: Annotated[int, doc("Counts the requests.")]
    cancel: Annotated[
        list[str], doc("Names to cancel first, with earlier ones, if no job here has them.")
    ]
    leftovers: list[EngineJob] = msgspec.field(default_factory=list)


class EngineView(View, frozen=True, kw_only=True):
    """What may start the agents of jobs."""

    engine: Engine
    is_allowed: Annotated[bool, doc("Whether jobs may name it (MUSTER_ENGINES).")]
    problem: Annotated[str | None, doc("Why no agent can be started, and what to do.")]
    seen_at: Annotated[Moment | None, doc("When a scheduler, or the last host, answered.")]
    agents: Annotated[dict[AgentState, int], doc("Number of agents per state.")]
    hosts: Annotated[int | None, doc("Of the cluster file, by SSH; null: another engine.")] = None
    hosts_ready: Annotated[int, doc("How many of them can be used, as far as is known.")] = 0
    sweep: Annotated[EngineSweep | None, doc("null: not a scheduler, or not asked yet.")] = None


class EngineList(View, frozen=True, kw_only=True):
    engines: list[EngineView]


class TokenView(View, frozen=True, kw_only=True):
    """A token, without its secret."""

    token_id: Annotated[str, doc("What its text begins with, after mst_.")]
    name: str
    scope: Scope
    is_valid: bool
    created_at: Moment
    created_by: str | None
    expires_at: Moment | None
    revoked_at: Moment | None
    last_used_at: Annotated[Moment | None, doc("To the minute.")]


class TokenCreated(TokenView, frozen=True, kw_only=True):
    token: Annotated[str, doc("Its text, which is shown only once.")]


class TokenList(View, frozen=True, kw_only=True):
    tokens: list[TokenView]


class Check(View, frozen=True, kw_only=True):
    status: Literal["ok", "degraded"]
    detail: Annotated[str, doc("Empty for a caller without a valid token.")]


class Checks(View, frozen=True, kw_only=True):
    database: Check
    coordinator: Check
    disk: Annotated[Check, doc("Of logs and, unless it is elsewhere, the database.")]


class Health(View, frozen=True, kw_only=True):
    """Whether the service has everything it needs."""

    status: Literal["ok", "degraded"]
    version: Annotated[str | None, doc("null for a caller without a valid token.")]
    uptime_seconds: float
    checks: Checks


class Alive(View, frozen=True, kw_only=True):
    status: Literal["ok"]


class Version(View, frozen=True, kw_only=True):
    """The version of the service, and where it keeps its files."""

    app: str
    api: Annotated[str, doc("The same paths are also served below /api/ and this word.")]
    schema_revision: Annotated[str | None, doc("Of the tables in the database.")]
    database: Annotated[str, doc("sqlite or postgresql.")] = ""
    data_dir: Annotated[str, doc("Data directory, on the machine of the service.")] = ""
    checkpoint_dir: Annotated[str, doc("Default directory of checkpoints, likewise.")] = ""


class FieldError(View, frozen=True, kw_only=True):
    """One invalid field of a request."""

    loc: Annotated[tuple[str | int, ...], doc('Its place, such as `["body", "world_size"]`.')]
    msg: str
    type: str
    hint: Annotated[str | None, doc("What was probably meant.")] = None


class ProblemView(View, frozen=True, kw_only=True, omit_defaults=True):
    """Why a request failed (RFC 9457)."""

    type: str = "about:blank"
    title: str = ""
    status: int
    detail: str
    instance: str = ""
    request_id: str = ""
    errors: tuple[FieldError, ...] = ()
