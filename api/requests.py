"""The bodies that come in, as OpenAPI shows them.

Limits and defaults are those of `muster.contracts.spec`, read from there: nothing is said twice.
Numbers are strict (``true`` is no 1, NaN is no number) and unknown fields are refused.
"""

from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field

from muster.contracts.printable import CONTROLS
from muster.contracts.spec import (
    JOB_ID_PATTERN,
    LIMITS,
    SECONDS_LIMIT,
    BackendChoice,
    JobSpec,
    Mode,
    RestartScope,
)

REASON_LIMIT: Final = 500
"""A sentence or two."""

PRINTABLE_PATTERN: Final = f"^[^{CONTROLS}]*$"

_DEFAULT: Final = JobSpec()


def _number(field: str, description: str) -> Any:  # noqa: ANN401  as pydantic's own Field
    limits = LIMITS[field]
    return Field(
        default=getattr(_DEFAULT, field), ge=limits.low, le=limits.high, description=description
    )


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class JobRequest(_Body):
    """A job to run. Every field has a default: ``{"world_size": 4}`` is enough.

    Paths are absolute, or relative to the directory the server was started in; ``~`` has no
    meaning in them.
    """

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"job_id": "digits", "world_size": 4, "checkpoint_every": 5}]
        }
    )

    job_id: str | None = Field(
        default=None,
        pattern=f"^{JOB_ID_PATTERN}$",
        description="Chosen by you, or made if left out. Free again after a delete.",
    )
    name: str | None = Field(default=None, description="For people.")
    mode: Mode | None = Field(
        default=None,
        description="In independent mode each rank works through shards of its own; in synchronous "
        "mode all hold one model, and their number may change while it trains. Default: "
        "independent with a command, else synchronous.",
    )
    world_size: int = _number("world_size", "Number of ranks.")
    min_workers: int = _number("min_workers", "Fewest ranks with which training goes on.")
    max_workers: int | None = _number("max_workers", "Most ranks. Default: the world size.")
    epochs: int = _number("epochs", "Passes over the data.")
    batch_size: int | None = _number(
        "batch_size",
        "Samples of a step (of one rank in independent mode). Default: 16 independent, 64 "
        "synchronous, where it is a multiple of virtual_shards.",
    )
    virtual_shards: int = _number(
        "virtual_shards", "Parts of every batch of a synchronous job; a power of two."
    )
    backend: BackendChoice = Field(
        default=_DEFAULT.backend, description="How the ranks of a synchronous job talk."
    )
    replay_every: int | None = _number(
        "replay_every", "One virtual shard in so many is computed twice, and compared."
    )
    seed: int = _number("seed", "Decides the order of samples and the first weights.")
    checkpoint_every: int = _number("checkpoint_every", "Steps between checkpoints.")
    keep_last: int = _number("keep_last", "Checkpoints kept per rank.")
    sleep_sec: float = _number("sleep_sec", "Pause after each step, for demonstrations.")
    dataset_dir: str | None = Field(
        default=None,
        description="Directory of shards. Default: the server's, or a small synthetic data set.",
    )
    checkpoint_dir: str | None = Field(
        default=None, description="Default: that of the job in resume_from, or the server's."
    )
    command: list[str] | None = Field(
        default=None, description="The argv every rank becomes. Default: `program`."
    )
    program: str | None = Field(
        default=None,
        description="What a synchronous job trains: file.py:Name (relative to working_dir) or "
        "package.module:Name. Default: a built-in classifier.",
    )
    env: dict[str, str] = Field(default={}, description="Environment of every rank.")
    secrets: dict[str, str] = Field(
        default={},
        description="More variables, by reference: env:NAME of what the service lends, or "
        "file:NAME of its directory of secrets. Each rank finds the values in its environment, "
        "and nobody else does.",
        examples=[{"HF_TOKEN": "file:hf-token"}],
    )
    working_dir: str | None = Field(
        default=None, description="Where the ranks start. Default: the server's own."
    )
    heartbeat_timeout: float = _number(
        "heartbeat_timeout", "Seconds without a heartbeat after which a rank is replaced."
    )
    start_grace_seconds: float = _number(
        "start_grace_seconds", "Seconds a rank may take to its first sign of life."
    )
    stop_grace_seconds: float = _number("stop_grace_seconds", "Seconds from SIGTERM to SIGKILL.")
    progress_timeout_seconds: float | None = _number(
        "progress_timeout_seconds",
        "Seconds without a new step after which a rank is replaced that waits for no other. "
        "Default: never.",
    )
    restart_scope: RestartScope = Field(
        default=_DEFAULT.restart_scope,
        description="What is started again when a rank of a command dies: that rank, or the whole "
        "gang, at another MASTER_PORT.",
    )
    max_restarts: int = _number(
        "max_restarts", "Restarts of one rank after crashes before the job fails."
    )
    max_hangs: int = _number("max_hangs", "Restarts of one rank that hung.")
    max_out_of_memory: int = _number(
        "max_out_of_memory", "Restarts of one rank that ran out of memory."
    )
    max_preemptions: int = _number(
        "max_preemptions", "Restarts of one rank that somebody else asked to stop."
    )
    max_fruitless: int = _number(
        "max_fruitless", "Failures of one rank in a row without a new checkpoint."
    )
    resume_from: str | None = Field(
        default=None,
        description="The job whose checkpoints this one starts from; its own id to go on.",
    )
    labels: dict[str, str] = Field(default={}, description="For people and their tools.")


class JobPatch(_Body):
    """What of a job may be changed while it trains."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"world_size": 6}]})

    world_size: int = Field(
        ge=LIMITS["world_size"].low,
        le=LIMITS["world_size"].high,
        description="Number of ranks, from the job's min_workers to its max_workers.",
    )


class StopBody(_Body):
    """How long the ranks may take to save and exit, and why they are to."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"grace_seconds": 30, "reason": "the loss diverges"}]}
    )

    grace_seconds: float | None = Field(
        default=None,
        ge=0,
        le=SECONDS_LIMIT,
        description="Seconds from SIGTERM to SIGKILL. Default: the job's stop_grace_seconds.",
    )
    reason: str | None = Field(
        default=None,
        max_length=REASON_LIMIT,
        pattern=PRINTABLE_PATTERN,
        description="For people: the job's events show it.",
    )
