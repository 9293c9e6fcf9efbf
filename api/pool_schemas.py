"""What a synchronous job shows of its pool and its reading, as OpenAPI shows it."""

from datetime import datetime
from typing import Literal, TypeAlias

from pydantic import BaseModel, Field

AgentState: TypeAlias = Literal["running", "stopped", "gone", "elsewhere"]
"""What can be seen of a job's agent."""


class MemberView(BaseModel):
    """A worker of a job's pool, living or gone; of an independent job, one of its ranks."""

    worker_id: str = Field(description="Never used twice in a job.")
    rank: int
    state: str = Field(
        description="syncing, active, draining, failed or left; of an independent job what its "
        "summary says"
    )
    pid: int | None = Field(description="null unless the process lives")
    node: str | None
    gpu_count: int
    backend: str | None = Field(description="How it talks to its peers.")
    joined_at: datetime | None
    joined_step: int | None = Field(description="null before it is active")
    last_heartbeat_age_seconds: float | None
    step: int | None = Field(description="null once another process has its rank")


class MemberList(BaseModel):
    job_id: str
    world_size: int = Field(description="Number of ranks that is wanted now.")
    agent: AgentState | None = Field(
        description="The process that starts, hears and ends them: running, stopped (SIGSTOP: "
        "nobody hears its ranks, and it is replaced soon), gone, or elsewhere, where its state is "
        "not known; null without one, and once the job is over"
    )
    workers: list[MemberView]


class EpochView(BaseModel):
    """One pass over the data. Hashes are sums modulo 2**64, as 16 hex digits."""

    epoch: int
    samples: int = Field(description="Lines read and committed.")
    expected_samples: int = Field(description="Lines in the data set.")
    hash: str = Field(description="Of the lines that were read.")
    expected_hash: str = Field(description="Of the lines in the data set.")
    exactly_once: bool | None = Field(description="null while it is being read")


class CheckpointView(BaseModel):
    """A durable checkpoint of all ranks together."""

    step: int
    epoch: int
    generation: int
    digest: str = Field(
        description="Equal bits, equal digits: of weights, optimizer state and position."
    )
    saved_at: datetime


class AuditView(BaseModel):
    """The proof that every sample was read exactly once; of synchronous jobs only."""

    job_id: str
    complete: bool = Field(description="Nothing more will be read: the job is COMPLETED.")
    exactly_once: bool | None = Field(
        description="Whether every epoch that was asked for was, also those that are not listed; "
        "null while that is not known"
    )
    epochs: list[EpochView] = Field(description="The last ones, the newest last.")
    epochs_omitted: int = Field(description="Earlier ones that are not listed.")
    checkpoints: list[CheckpointView] = Field(description="The last ones, the newest last.")
    checkpoints_omitted: int = Field(
        description="Earlier ones on record that are not listed; the last 1000 are on record."
    )
