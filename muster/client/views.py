"""What the API answers, as values. Names are those of its OpenAPI document.

A newer server may say more, which is ignored; what an older one does not say yet has a default.
"""

from datetime import datetime
from typing import Any

import msgspec


class _Heading(msgspec.Struct, frozen=True, kw_only=True):
    """What every view of a job begins with."""

    job_id: str
    name: str | None
    status: str
    reason: str | None
    """Why, for machines. New words may come."""
    message: str | None
    """Why, in one sentence."""
    world_size: int
    """Number of ranks that is wanted now."""
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None


class JobView(_Heading, frozen=True, kw_only=True):
    """A job as it was when the API was asked."""

    job_uid: str
    """Its identity for ever; the id may be used again."""
    exit_code: int | None
    is_terminal: bool
    stop_requested: bool
    pause_requested: bool
    spec: dict[str, Any]
    """Everything that was asked for, defaults filled in."""


class JobList(msgspec.Struct, frozen=True, kw_only=True):
    jobs: list[JobView]


class JobPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What would become of a job, were it submitted."""

    job_id: str
    """The one that was asked for, or one like it would get."""
    message: str | None
    """What one should know about places nobody chose, and whether the command will run."""
    launcher: str
    world_size: int
    command: list[str] | None
    """What every rank becomes; None: `program`."""
    program: str | None
    """What is trained; None: the built-in classifier."""
    shards: int | None
    """Of the data set, or in synchronous mode of a step; None: the command's business."""
    shards_per_rank: list[int] | None
    spec: dict[str, Any]
    """Everything that was asked for, defaults filled in."""


class WorkerView(msgspec.Struct, frozen=True, kw_only=True):
    """One rank: its process, its place and its counters."""

    worker_id: str
    rank: int
    state: str
    pid: int | None
    """None unless the process lives."""
    node: str | None
    step: int
    total_steps: int | None
    epoch: int
    shard_idx: int
    line_idx: int
    loss: float | None
    metrics: dict[str, float]
    """What else the program gave."""
    throughput_steps_per_sec: float
    checkpoints_saved: int
    last_checkpoint_step: int | None
    restarts: int
    endings: dict[str, int]
    """How often its processes ended in which way."""
    last_heartbeat_age_seconds: float | None
    exit_code: int | None
    exit_signal: int | None


class SummaryView(_Heading, frozen=True, kw_only=True):
    """How far a job has come, and each of its ranks."""

    step: int
    """Summed over the ranks; in synchronous mode the steps of the one model."""
    total_steps: int | None
    throughput_steps_per_sec: float
    eta_seconds: float | None
    loss: float | None
    checkpoints_saved: int
    last_checkpoint_step: int | None
    restarts: int
    endings: dict[str, int]
    workers: list[WorkerView]


class SummaryList(msgspec.Struct, frozen=True, kw_only=True):
    jobs: list[SummaryView]


class MemberView(msgspec.Struct, frozen=True, kw_only=True):
    """A worker of a job's pool, living or gone."""

    worker_id: str
    """Never used twice in a job."""
    rank: int
    state: str
    pid: int | None
    node: str | None
    gpu_count: int
    backend: str | None
    joined_at: datetime | None
    joined_step: int | None
    last_heartbeat_age_seconds: float | None
    step: int | None


class MemberList(msgspec.Struct, frozen=True, kw_only=True):
    job_id: str
    world_size: int
    agent: str | None = None
    """The process that starts and hears them: running, stopped, gone or elsewhere."""
    workers: list[MemberView]


class EventView(msgspec.Struct, frozen=True, kw_only=True):
    at: datetime
    kind: str
    message: str
    rank: int | None
    incarnation: int | None
    actor: str | None = None
    """Who asked for it; None: nobody from outside."""


class EventList(msgspec.Struct, frozen=True, kw_only=True):
    job_id: str
    events: list[EventView]


class IncarnationView(msgspec.Struct, frozen=True, kw_only=True):
    """One process of one rank. All about its end is None while it lives."""

    rank: int
    incarnation: int
    pid: int | None
    started_at: datetime
    ended_at: datetime | None
    exit_code: int | None
    exit_signal: int | None
    retry_class: str | None
    reason: str | None
    message: str | None
    step_at_start: int | None
    step_at_end: int | None


class IncarnationList(msgspec.Struct, frozen=True, kw_only=True):
    job_id: str
    incarnations: list[IncarnationView]


class EpochView(msgspec.Struct, frozen=True, kw_only=True):
    """One pass over the data. Hashes are sums modulo 2**64, as 16 hex digits."""

    epoch: int
    samples: int
    expected_samples: int
    hash: str
    expected_hash: str
    exactly_once: bool | None
    """None while it is being read."""


class CheckpointView(msgspec.Struct, frozen=True, kw_only=True):
    """A durable checkpoint of all ranks together."""

    step: int
    epoch: int
    generation: int
    digest: str
    saved_at: datetime


class AuditView(msgspec.Struct, frozen=True, kw_only=True):
    """The proof that every sample was read exactly once; of synchronous jobs only."""

    job_id: str
    complete: bool
    exactly_once: bool | None
    """None while that is not known."""
    epochs: list[EpochView]
    epochs_omitted: int = 0
    checkpoints: list[CheckpointView]
    checkpoints_omitted: int = 0


class LogLineView(msgspec.Struct, frozen=True, kw_only=True):
    rank: int
    time: datetime | None = None
    """When it was written; None while not known, and of a line that was followed."""
    line: str


class LogTail(msgspec.Struct, frozen=True, kw_only=True):
    job_id: str
    tail: int
    lines: list[LogLineView]


class Deleted(msgspec.Struct, frozen=True, kw_only=True):
    job_id: str
    deleted: bool
    logs_deleted: bool
    checkpoints_deleted: bool


class NotDeleted(msgspec.Struct, frozen=True, kw_only=True):
    job_id: str
    detail: str
    """Why, and what to do about it."""


class Check(msgspec.Struct, frozen=True, kw_only=True):
    status: str
    detail: str


class Checks(msgspec.Struct, frozen=True, kw_only=True):
    database: Check
    coordinator: Check
    disk: Check


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the service has everything that it needs."""

    status: str
    version: str | None
    """None, and what is wrong unsaid, to whoever may not read."""
    uptime_seconds: float
    checks: Checks


class Version(msgspec.Struct, frozen=True, kw_only=True):
    """Which service answers."""

    app: str
    api: str
    schema_revision: str | None
    database: str = ""
    data_dir: str = ""
    """On its own machine."""
    checkpoint_dir: str = ""
    """Of jobs that name none; on its own machine as well."""


class Purged(msgspec.Struct, frozen=True, kw_only=True):
    matched: int
    deleted: int
    job_ids: list[str]
    """The jobs that were deleted; where it was only tried, that would be."""
    skipped: list[str]
    """Jobs that matched and are not over."""
    failed: list[NotDeleted] = []
    """Jobs that are over and could not be deleted, where the server says so."""
    freed_bytes: int = 0
    """What the files of those jobs held, where the server counts them."""
