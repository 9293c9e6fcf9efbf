"""The bodies of REST responses, declared once: the API encodes them, the client decodes them.

A client ignores fields it does not know. A field that is added later has a default: servers of the
release before do not send it.
"""

from datetime import datetime
from signal import Signals
from statistics import fmean
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from muster.contracts.agent import AgentState
from muster.contracts.host import HostFacts
from muster.contracts.job.engine import Engine
from muster.contracts.job.field_types import BitsPromised
from muster.contracts.job.status import JobStatus
from muster.contracts.rank import RankProgress
from muster.contracts.token import Scope

Moment: TypeAlias = Annotated[datetime, Meta(tz=True)]
Fault: TypeAlias = Literal["kill", "stop", "term"]


def _doc(text: str) -> Meta:
    return Meta(description=text)


_Bits: TypeAlias = Annotated[
    BitsPromised,
    _doc(
        "any: another run may give another result. unchecked: so it may if the body of the "
        "script's loop depends on more than state and batch; it gave `check=False`."
    ),
]


class View(msgspec.Struct, frozen=True, kw_only=True):
    """A response body, or a part of one."""


class _JobHeading(View, frozen=True, kw_only=True):
    job_id: str
    name: str | None
    status: Annotated[str, Meta(extra_json_schema={"enum": [str(word) for word in JobStatus]})]
    reason: Annotated[str | None, _doc("Why, for machines. New words may come.")]
    message: Annotated[str | None, _doc("Why, in one sentence.")]
    world_size: Annotated[int, _doc("Number of ranks that is wanted now.")]
    created_at: Moment
    started_at: Moment | None
    finished_at: Moment | None


class JobView(_JobHeading, frozen=True, kw_only=True):
    """A job at the time of the request."""

    job_uid: Annotated[str, _doc("Unique forever; the id may be used again.")]
    exit_code: int | None
    is_terminal: bool
    stop_requested: bool
    pause_requested: bool
    checkpoint_requested: Annotated[
        bool, _doc("A checkpoint was requested and is not durable yet.")
    ] = False
    spec: Annotated[
        dict[str, Any],
        _doc(
            "Everything that was requested, with defaults. A token of scope read sees the names "
            "in `env` without their values."
        ),
    ]


class JobList(View, frozen=True, kw_only=True):
    jobs: list[JobView]


class AgentRequest(View, frozen=True, kw_only=True):
    """What an engine gets to start an agent; secrets, and what only a start knows, are <words>."""

    engine: Engine
    command: Annotated[
        list[str] | None, _doc("What the coordinator runs; null: a request to the API.")
    ]
    content: Annotated[str | dict[str, Any], _doc("What it reads; of Kubernetes, the Pod.")]


class JobPlan(View, frozen=True, kw_only=True):
    """The job that a submission would create."""

    job_id: Annotated[str, _doc("The requested id, or one like the job would get.")]
    message: Annotated[
        str | None, _doc("Remarks about default paths and about whether the command will run.")
    ]
    launcher: Annotated[str, _doc("The engine that starts the agents, which start the ranks.")]
    request: Annotated[AgentRequest, _doc("What it gets for the first agent.")]
    world_size: int
    command: Annotated[list[str] | None, _doc("What every rank becomes; null: `program`.")]
    program: Annotated[str | None, _doc("What is trained; null: the built-in classifier.")]
    shards: Annotated[
        int | None,
        _doc(
            "Shards of the data set, in synchronous mode virtual shards of a step; null with a "
            "command."
        ),
    ]
    shards_per_rank: Annotated[list[int] | None, _doc("How many of them each rank gets.")]
    spec: Annotated[dict[str, Any], _doc("Everything that was requested, with defaults.")]


class WorkerView(View, RankProgress, frozen=True, kw_only=True):
    """One rank: its process, its place in the data and its counters."""

    worker_id: Annotated[
        str, _doc("Rank and attempt, such as 3.0; the rank alone before its first process.")
    ]
    rank: int
    state: Annotated[str, _doc("spawned, live, suspect, exiting, exited, finished or waiting")]
    pid: Annotated[int | None, _doc("null unless the process lives")]
    node: str | None
    throughput_steps_per_sec: float
    checkpoints_saved: int
    restarts: int
    endings: Annotated[dict[str, int], _doc("Number of its processes per kind of exit.")]
    last_heartbeat_age_seconds: float | None
    exit_code: int | None
    exit_signal: int | None


class SummaryView(_JobHeading, frozen=True, kw_only=True):
    """Progress of a job and of each rank. Unknown numbers are null, never NaN."""

    step: Annotated[
        int,
        _doc(
            "Steps done: those of the model if the ranks train one (synchronous mode, a gang, a "
            "command whose ranks have equally many to do), else the sum over the ranks."
        ),
    ]
    total_steps: Annotated[int | None, _doc("Steps to do, counted in the same way.")]
    throughput_steps_per_sec: float
    eta_seconds: Annotated[float | None, _doc("Until the slowest rank is done.")]
    loss: Annotated[float | None, _doc("Mean of the last losses of the ranks.")]
    bits: _Bits = "same"
    checkpoints_saved: int
    last_checkpoint_step: Annotated[int | None, _doc("The newest of any rank.")]
    restarts: int
    endings: Annotated[dict[str, int], _doc("Number of processes per kind of exit; see /attempts.")]
    workers: list[WorkerView]

    @property
    def living(self) -> int:
        """How many ranks have a process."""
        return sum(worker.pid is not None for worker in self.workers)

    @property
    def metrics(self) -> dict[str, float]:
        """The mean of what the ranks reported last, by name: often only some report one.

        Where they train one model, a rank whose number is of an earlier step does not count:
        another one has reported since.
        """
        found: dict[str, tuple[int, list[float]]] = {}
        for it in self.workers:
            for name, value in it.metrics.items():
                step = it.metric_steps.get(name, 0)
                newest, values = found.get(name, (step, []))
                if step >= newest:
                    found[name] = step, [*values, value] if step == newest else [value]
        return {name: fmean(values) for name, (_, values) in found.items()}


class SummaryList(View, frozen=True, kw_only=True):
    jobs: list[SummaryView]


class LeaderboardRow(View, frozen=True, kw_only=True):
    """One job of a sweep."""

    job_id: str
    status: str
    loss: Annotated[float | None, _doc("The one that decides, as last reported.")]
    step: int
    total_steps: int | None
    differences: Annotated[dict[str, Any], _doc("Fields, `env.NAME` and options that differ.")]


class LeaderboardView(View, frozen=True, kw_only=True):
    """The jobs with one value of the label `sweep`, the best first."""

    sweep: Annotated[str | None, _doc("null: there is none, or several to choose from.")]
    sweeps: Annotated[list[str], _doc("All there are.")]
    loss_kind: Annotated[Literal["validation", "training"], _doc("What all are compared by.")]
    metric: Annotated[str | None, _doc("That of keep_best, if it decides; `loss` has it.")] = None
    best: Annotated[str | None, _doc("Its id; null: no job that did not fail has a loss.")]
    jobs: list[LeaderboardRow]


class HostView(View, frozen=True, kw_only=True):
    """A host on which ranks may run."""

    host: Annotated[str, _doc("Its name in the cluster file; `local` without one.")]
    address: str
    transport: Annotated[str, _doc("How ranks are started there: local, ssh")]
    slots: Annotated[int | None, _doc("Ranks at once. null: the host itself decides.")]
    slots_in_use: int
    jobs: Annotated[list[str], _doc("Those that have ranks there.")]
    gpu_count: int
    usable_vram_mb: Annotated[int, _doc("Of all its GPUs together.")]
    agents: Annotated[dict[AgentState, int], _doc("Number of agents there per state.")]
    facts: Annotated[HostFacts | None, _doc("What it has said about itself; null before.")]
    seen_at: Annotated[Moment | None, _doc("When it did last.")]
    problem: Annotated[str | None, _doc("Why it has not answered since, or starts no agent.")]
    shared_dir: Annotated[
        str | None, _doc("A directory that it was proven to share with the coordinator's host.")
    ]


class HostList(View, frozen=True, kw_only=True):
    hosts: list[HostView]


class EngineJob(View, frozen=True, kw_only=True):
    """What a scheduler holds in Muster's name, for no job of this service that is not over."""

    name: str
    state: Annotated[str, _doc("In the words of the scheduler.")]
    job_id: Annotated[str | None, _doc("A job that is over; null: no job here has its uid.")]


class EngineSweep(View, frozen=True, kw_only=True):
    """A look at a scheduler. A requested one is done once GET /engines shows its number."""

    number: Annotated[int, _doc("Counts the requests.")]
    cancel: Annotated[
        list[str], _doc("Names to cancel first, with earlier ones, if no job here has them.")
    ]
    leftovers: list[EngineJob] = []


class EngineView(View, frozen=True, kw_only=True):
    """What may start the agents of jobs."""

    engine: Engine
    is_allowed: Annotated[bool, _doc("Whether jobs may name it (MUSTER_ENGINES).")]
    problem: Annotated[str | None, _doc("Why no agent can be started, and what to do.")]
    seen_at: Annotated[Moment | None, _doc("When a scheduler, or the last host, answered.")]
    agents: Annotated[dict[AgentState, int], _doc("Number of agents per state.")]
    hosts: Annotated[int | None, _doc("Of the cluster file, by SSH; null: another engine.")] = None
    hosts_ready: Annotated[int, _doc("How many of them can be used, as far as is known.")] = 0
    sweep: Annotated[EngineSweep | None, _doc("null: not a scheduler, or not asked yet.")] = None


class EngineList(View, frozen=True, kw_only=True):
    engines: list[EngineView]


class MemberView(View, frozen=True, kw_only=True):
    """A worker of a job's pool, living or gone; of an independent job, one of its ranks."""

    worker_id: Annotated[str, _doc("Never used twice in a job.")]
    rank: int
    state: Annotated[
        str, _doc("syncing, active, draining, failed or left; of a rank, as in the summary")
    ]
    pid: Annotated[int | None, _doc("null unless the process lives")]
    node: str | None
    gpu_count: int
    backend: Annotated[str | None, _doc("What it computes on: cpu or cuda.")]
    transport: Annotated[str | None, _doc("To its peers; null for an independent rank.")] = None
    joined_at: Moment | None
    joined_step: Annotated[int | None, _doc("null before it is active")]
    last_heartbeat_age_seconds: float | None
    step: Annotated[int | None, _doc("null once another process has its rank")]


class AgentView(View, frozen=True, kw_only=True):
    """The parent of a job's ranks on one host."""

    host: str
    state: Annotated[AgentState, _doc("What the coordinator knows of it.")]


class MemberList(View, frozen=True, kw_only=True):
    job_id: str
    world_size: Annotated[int, _doc("Number of ranks that is wanted now.")]
    active: Annotated[int, _doc("Number of workers that take part in every step.")]
    is_changing: Annotated[
        bool, _doc("Workers are joining or leaving, or others are active than are wanted.")
    ]
    agents: Annotated[list[AgentView], _doc("One for each host that has, or had, ranks.")]
    workers: list[MemberView]


class StruckProcess(View, frozen=True, kw_only=True):
    rank: int
    attempt: int
    pid: int


class FaultView(View, frozen=True, kw_only=True):
    """A requested fault. No other attempt is struck, and none twice."""

    number: Annotated[int, _doc("Counts the faults of a job.")]
    fault: Fault
    host: str
    agent: Annotated[int | None, _doc("The agent that dies with all its ranks; null: none.")]
    processes: list[StruckProcess]

    @property
    def signal(self) -> Signals:
        return Signals[f"SIG{self.fault.upper()}"]


class EventView(View, frozen=True, kw_only=True):
    """One event of a job."""

    at: Moment
    kind: Annotated[str, _doc("A past participle, such as submitted or rank_exited.")]
    message: str
    rank: int | None = None
    attempt: int | None = None
    actor: Annotated[
        str | None, _doc("Who asked for it, such as token:ci; null if the system did it.")
    ] = None
    event_id: Annotated[
        int | None, _doc("Its position: ask for later ones with the parameter `after`.")
    ] = None


class EventList(View, frozen=True, kw_only=True):
    job_id: str
    events: list[EventView]


class AttemptView(View, frozen=True, kw_only=True):
    """One attempt of a rank: one process. Fields about its exit are null while it lives."""

    rank: int
    attempt: int
    pid: Annotated[int | None, _doc("Kept after the exit; null before it is known.")]
    started_at: Moment
    ended_at: Moment | None = None
    exit_code: int | None = None
    exit_signal: int | None = None
    retry_class: Annotated[
        str | None,
        _doc(
            "finished, stopped, crash, killed, hang, out_of_memory, preemption, infrastructure, "
            "invalid_program or do_not_retry"
        ),
    ] = None
    reason: Annotated[str | None, _doc("Why, for machines. New words may come.")] = None
    message: Annotated[str | None, _doc("Why, in words, with the last line of its log.")] = None
    step_at_start: Annotated[int | None, _doc("null while it is unknown")] = None
    step_at_end: int | None = None


class AttemptList(View, frozen=True, kw_only=True):
    job_id: str
    attempts: list[AttemptView]


class EpochView(View, frozen=True, kw_only=True):
    """One pass over the data. Hashes are sums modulo 2**64, as 16 hex digits."""

    epoch: int
    samples: Annotated[int, _doc("Lines read and committed.")]
    expected_samples: Annotated[int, _doc("Lines in the data set.")]
    hash: Annotated[str, _doc("Of the lines that were read.")]
    expected_hash: Annotated[str, _doc("Of the lines in the data set.")]
    exactly_once: Annotated[bool | None, _doc("null while the epoch is being read")]


class CheckpointView(View, frozen=True, kw_only=True):
    """A durable checkpoint of all ranks together."""

    step: int
    epoch: int
    generation: int
    digest: Annotated[
        str, _doc("Identical for identical weights, optimizer state and position, bit for bit.")
    ]
    saved_at: Moment


class AuditView(View, frozen=True, kw_only=True):
    """The proof that every sample was read exactly once; of synchronous jobs only."""

    job_id: str
    complete: Annotated[bool, _doc("The job is COMPLETED and reads nothing more.")]
    exactly_once: Annotated[
        bool | None,
        _doc("Whether every requested epoch was, including unlisted ones; null while unknown."),
    ]
    bits: _Bits = "same"
    epochs: Annotated[list[EpochView], _doc("The last ones, the newest last.")]
    epochs_omitted: Annotated[int, _doc("Earlier ones that are not listed.")]
    checkpoints: Annotated[list[CheckpointView], _doc("The last ones, the newest last.")]
    checkpoints_omitted: Annotated[
        int, _doc("Earlier ones that are not listed; the last 1000 are on record.")
    ]


class SeriesColumns(View, frozen=True, kw_only=True):
    """Points in order, one list for each of their fields.

    A point stands for all values after the point before it. Where none of them was finite, `first`,
    `least`, `greatest` and `last` are null.
    """

    step: Annotated[list[int], _doc("The step of the last value.")]
    seconds: Annotated[list[float], _doc("When it became known, after `began_at`.")]
    first: list[float | None]
    least: list[float | None]
    greatest: list[float | None]
    last: list[float | None]
    count: Annotated[list[int], _doc("How many were finite.")]
    not_finite: Annotated[list[int], _doc("How many were NaN or infinite.")]


class SeriesView(View, frozen=True, kw_only=True):
    """What a job has reported under one name."""

    live: Annotated[SeriesColumns, _doc("The steps rise.")]
    abandoned: Annotated[
        SeriesColumns, _doc("Points beyond a step to which training has gone back.")
    ]


class SeriesList(View, frozen=True, kw_only=True):
    job_id: str
    began_at: Annotated[Moment, _doc("When the job was created.")]
    names: Annotated[list[str], _doc("Of all series of the job.")]
    series: dict[str, SeriesView]


class LogLineView(View, frozen=True, kw_only=True):
    rank: int
    time: Annotated[Moment | None, _doc("When it was written; null while unknown.")] = None
    line: str


class LogTail(View, frozen=True, kw_only=True):
    job_id: str
    tail: int
    lines: list[LogLineView]


class Deleted(View, frozen=True, kw_only=True):
    job_id: str
    deleted: bool
    logs_deleted: bool
    checkpoints_deleted: bool
    checkpoints_left: Annotated[bool, _doc("It saved some, and they stay.")] = False


class NotDeleted(View, frozen=True, kw_only=True):
    job_id: str
    detail: Annotated[str, _doc("Why, and what to do about it.")]


class Purged(View, frozen=True, kw_only=True):
    matched: int
    deleted: int
    job_ids: Annotated[list[str], _doc("Deleted jobs; in a dry run, jobs it would delete.")]
    skipped: Annotated[list[str], _doc("Matching jobs that are not over.")]
    failed: Annotated[list[NotDeleted], _doc("Jobs that are over but could not be deleted.")] = []
    freed_bytes: Annotated[int, _doc("Size of the files of the deleted jobs.")] = 0


class TokenView(View, frozen=True, kw_only=True):
    """A token, without its secret."""

    token_id: Annotated[str, _doc("What its text begins with, after mst_.")]
    name: str
    scope: Scope
    is_valid: bool
    created_at: Moment
    created_by: str | None
    expires_at: Moment | None
    revoked_at: Moment | None
    last_used_at: Annotated[Moment | None, _doc("To the minute.")]


class TokenCreated(TokenView, frozen=True, kw_only=True):
    token: Annotated[str, _doc("Its text, which is shown only once.")]


class TokenList(View, frozen=True, kw_only=True):
    tokens: list[TokenView]


class Check(View, frozen=True, kw_only=True):
    status: Literal["ok", "degraded"]
    detail: Annotated[str, _doc("Empty for a caller without a valid token.")]


class Checks(View, frozen=True, kw_only=True):
    database: Check
    coordinator: Check
    disk: Annotated[Check, _doc("Of logs and, unless it is elsewhere, the database.")]


class Health(View, frozen=True, kw_only=True):
    """Whether the service has everything it needs."""

    status: Literal["ok", "degraded"]
    version: Annotated[str | None, _doc("null for a caller without a valid token.")]
    uptime_seconds: float
    checks: Checks


class Alive(View, frozen=True, kw_only=True):
    status: Literal["ok"]


class Version(View, frozen=True, kw_only=True):
    """The version of the service, and where it keeps its files."""

    app: str
    api: Annotated[str, _doc("The same paths are also served below /api/ and this word.")]
    schema_revision: Annotated[str | None, _doc("Of the tables in the database.")]
    database: Annotated[str, _doc("sqlite or postgresql.")] = ""
    data_dir: Annotated[str, _doc("Data directory, on the machine of the service.")] = ""
    checkpoint_dir: Annotated[str, _doc("Default directory of checkpoints, likewise.")] = ""


class FieldError(View, frozen=True, kw_only=True):
    """One invalid field of a request."""

    loc: Annotated[tuple[str | int, ...], _doc('Its place, such as `["body", "world_size"]`.')]
    msg: str
    type: str
    hint: Annotated[str | None, _doc("What was probably meant.")] = None


class ProblemView(View, frozen=True, kw_only=True, omit_defaults=True):
    """Why a request failed (RFC 9457)."""

    type: str = "about:blank"
    title: str = ""
    status: int
    detail: str
    instance: str = ""
    request_id: str = ""
    errors: tuple[FieldError, ...] = ()
