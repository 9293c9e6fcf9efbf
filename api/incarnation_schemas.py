"""What the processes of a job's ranks show, as OpenAPI shows it."""

from datetime import datetime

from pydantic import BaseModel, Field


class IncarnationView(BaseModel):
    """One process of one rank. All about its end is null while it lives."""

    rank: int
    incarnation: int
    pid: int | None = Field(description="Also of a process that is gone; null before it is known.")
    started_at: datetime
    ended_at: datetime | None
    exit_code: int | None
    exit_signal: int | None
    retry_class: str | None = Field(
        description="finished, stopped, crash, hang, out_of_memory, preemption, infrastructure, "
        "invalid_program or do_not_retry"
    )
    reason: str | None = Field(description="Why, for machines. New words may come.")
    message: str | None = Field(description="Why, in words; with the last line of its log.")
    step_at_start: int | None = Field(description="null while it is not known")
    step_at_end: int | None


class IncarnationList(BaseModel):
    job_id: str
    incarnations: list[IncarnationView]
