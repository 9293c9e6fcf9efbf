"""The bodies that go out, as OpenAPI shows them; what comes in is in `api.requests`."""

from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, Field

from muster.contracts.job import JobStatus


class JobHeading(BaseModel):
    """What every view of a job begins with."""

    job_id: str
    name: str | None
    status: JobStatus
    reason: str | None = Field(description="Why, for machines. New words may come.")
    message: str | None = Field(description="Why, in one sentence.")
    world_size: int = Field(description="Number of ranks that is wanted now.")
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None


class JobView(JobHeading):
    """A job as it is now."""

    job_uid: str = Field(description="Its identity for ever; the id may be used again.")
    exit_code: int | None
    is_terminal: bool
    stop_requested: bool
    pause_requested: bool
    spec: dict[str, Any] = Field(
        description="Everything that was asked for, defaults filled in. A token of scope read gets "
        "the names in `env` without their values."
    )


class JobList(BaseModel):
    jobs: list[JobView]


class JobPlan(BaseModel):
    """What would become of a job, were it submitted."""

    job_id: str = Field(description="The one that was asked for, or one like it would get.")
    message: str | None = Field(
        description="What one should know about places nobody chose, and whether the command will "
        "run."
    )
    launcher: str = Field(description="What starts the agent that starts the ranks.")
    world_size: int
    command: list[str] | None = Field(description="What every rank becomes; null: `program`.")
    program: str | None = Field(description="What is trained; null: the built-in classifier.")
    shards: int | None = Field(
        description="Shards of the data set, and in synchronous mode the virtual ones of a step; "
        "null: the command's business"
    )
    shards_per_rank: list[int] | None = Field(description="How many of them each rank gets.")
    spec: dict[str, Any] = Field(description="Everything that was asked for, defaults filled in.")


class WorkerView(BaseModel):
    """One rank: its process, its place and its counters."""

    worker_id: str = Field(description="Rank and process: 3.0. Without a process yet the rank: 3.")
    rank: int
    state: str = Field(description="spawned, live, suspect, exited, finished or waiting")
    pid: int | None = Field(description="null unless the process lives")
    node: str | None
    step: int
    total_steps: int | None
    epoch: int
    shard_idx: int
    line_idx: int
    loss: float | None
    metrics: dict[str, float] = Field(description="What else the program gave.")
    throughput_steps_per_sec: float
    checkpoints_saved: int
    last_checkpoint_step: int | None
    restarts: int
    endings: dict[str, int] = Field(description="How often its processes ended in which way.")
    last_heartbeat_age_seconds: float | None
    exit_code: int | None
    exit_signal: int | None


class SummaryView(JobHeading):
    """One row of a dashboard: numbers that are not known are null, never NaN."""

    step: int = Field(
        description="Steps done: summed over the ranks, and in synchronous mode those of the one "
        "model."
    )
    total_steps: int | None = Field(description="Steps to do, counted in the same way.")
    throughput_steps_per_sec: float
    eta_seconds: float | None = Field(description="Until the slowest rank is done.")
    loss: float | None = Field(description="Mean of the ranks' last losses.")
    checkpoints_saved: int
    last_checkpoint_step: int | None = Field(description="The newest of any rank.")
    restarts: int
    endings: dict[str, int] = Field(
        description="How many processes of all ranks ended in which way; see /incarnations."
    )
    workers: list[WorkerView]


class SummaryList(BaseModel):
    jobs: list[SummaryView]


class EventView(BaseModel):
    at: datetime
    kind: str
    message: str
    rank: int | None
    incarnation: int | None
    actor: str | None = Field(description="Who asked for it; null: nobody from outside.")


class EventList(BaseModel):
    job_id: str
    events: list[EventView]


class LogLineView(BaseModel):
    rank: int
    time: datetime | None = Field(description="When it was written; null while not known.")
    line: str


class LogTail(BaseModel):
    job_id: str
    tail: int
    lines: list[LogLineView]


class Deleted(BaseModel):
    job_id: str
    deleted: bool
    logs_deleted: bool
    checkpoints_deleted: bool


class NotDeleted(BaseModel):
    job_id: str
    detail: str = Field(description="Why, and what to do about it.")


class Purged(BaseModel):
    matched: int
    deleted: int
    job_ids: list[str] = Field(description="The jobs that were deleted; in a dry run, would be.")
    skipped: list[str] = Field(description="Jobs that matched and are not over.")
    failed: list[NotDeleted] = Field(description="Jobs that are over and could not be deleted.")
    freed_bytes: int = Field(description="What the files of those jobs held.")


class Check(BaseModel):
    status: Literal["ok", "degraded"]
    detail: str = Field(description="Empty for whoever may not read.")


class Checks(BaseModel):
    database: Check
    coordinator: Check
    disk: Check = Field(description="Where logs and, unless it is elsewhere, the database lie.")


class Health(BaseModel):
    status: Literal["ok", "degraded"]
    version: str | None = Field(description="Null for whoever may not read.")
    uptime_seconds: float
    checks: Checks


class Alive(BaseModel):
    status: Literal["ok"]


class Version(BaseModel):
    app: str
    api: str = Field(description="The same paths are served with this word after `/api/`, too.")
    schema_revision: str | None = Field(description="Of the database's tables.")
    database: str = Field(description="Its kind: sqlite or postgresql.")
    data_dir: str = Field(description="Where the service keeps its files, on its own machine.")
    checkpoint_dir: str = Field(description="Where jobs keep checkpoints that name no directory.")


class FieldErrorView(BaseModel):
    loc: list[str | int]
    msg: str
    type: str
    hint: str | None


class ProblemView(BaseModel):
    """Why a request was not answered (RFC 9457)."""

    type: str
    title: str
    status: int
    detail: str
    instance: str
    request_id: str
    trace_id: str | None = Field(default=None, description="That of the header `traceparent`.")
    errors: list[FieldErrorView] = []
