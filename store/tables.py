"""The tables. A column is named like the field of `store.records` that it holds.

jobs ──< workers       a rank of a job; goes with the job, like all below
     ──< incarnations  a process of a rank, and how it ended; kept when it is gone
     ──< members       a worker of a synchronous job's pool; kept when it is gone
     ──< departures    a member that was asked to leave
     ──< commits       a durable checkpoint of all ranks together
     ──< epochs        what was read in a pass over the data, and what should have been
     ──< events        what happened to a job
answers                the first answer to an idempotency key; outlives the job
leases                 who decides
tokens                 who may come in
"""

from typing import Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    false,
)

from muster.contracts.job import JobStatus, StopRequest
from muster.contracts.spec import JobSpec
from muster.contracts.token import Scope
from store.columns import RISING, Json, Moment, Unsigned, words
from store.records import Job, ProcessRecord

METADATA: Final = MetaData(
    # Every constraint has a name, so that a later migration can take it away on any database.
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

JOBS: Final = Table(
    "jobs",
    METADATA,
    Column("job_id", String(63), primary_key=True),
    Column("uid", String(64), nullable=False, unique=True),
    Column("spec", Json(JobSpec), nullable=False),
    Column("status", words(JobStatus), nullable=False),
    Column("reason", Text),
    Column("message", Text),
    Column("created_at", Moment, nullable=False),
    Column("updated_at", Moment, nullable=False),
    Column("started_at", Moment),
    Column("finished_at", Moment),
    Column("exit_code", Integer),
    Column("stop_request", words(StopRequest)),
    Column("stop_grace_seconds", Double),
    Column("wanted_world_size", Integer),
    # The default is for a process of the release before, which does not name the column.
    Column("pause_request", Boolean, nullable=False, server_default=false()),
    Column("generation", BigInteger, nullable=False),
    Column("layout_generation", BigInteger, nullable=False, server_default="0"),
    Column("agent", Json(ProcessRecord)),
    Column("agent_token_sha256", String(64)),
    Column("master_port", Integer, nullable=False, server_default="0"),
    Column("version", BigInteger, nullable=False),
    Index(None, "created_at", "job_id"),
    Index(None, "status", "created_at"),
)

WORKERS: Final = Table(
    "workers",
    METADATA,
    Column("job_id", ForeignKey(JOBS.c.job_id, ondelete="CASCADE"), primary_key=True),
    Column("rank", Integer, primary_key=True, autoincrement=False),
    Column("incarnation", BigInteger, nullable=False),
    Column("state", String(32), nullable=False),
    Column("process", Json(ProcessRecord)),
    Column("restarts", BigInteger, nullable=False),
    Column("failures", BigInteger, nullable=False),
    Column("finished", Boolean, nullable=False),
    Column("step", BigInteger, nullable=False),
    Column("total_steps", BigInteger),
    Column("epoch", BigInteger, nullable=False),
    Column("shard_idx", BigInteger, nullable=False),
    Column("line_idx", BigInteger, nullable=False),
    Column("loss", Double),
    Column("metrics", Json(dict[str, float]), nullable=False),
    Column("throughput_steps_per_sec", Double, nullable=False),
    Column("checkpoints_saved", BigInteger, nullable=False),
    Column("checkpoints_before", BigInteger, nullable=False, server_default="0"),
    Column("last_checkpoint_step", BigInteger),
    Column("last_heartbeat_at", Moment),
    Column("exit_code", Integer),
    Column("exit_signal", Integer),
    # The defaults are for a process of a release before, which does not name these columns.
    Column("endings", Json(dict[str, int]), nullable=False, server_default="{}"),
    Column("fruitless", BigInteger, nullable=False, server_default="0"),
    Column("proven_step", BigInteger, nullable=False, server_default="-1"),
)

INCARNATIONS: Final = Table(
    "incarnations",
    METADATA,
    Column("job_id", ForeignKey(JOBS.c.job_id, ondelete="CASCADE"), primary_key=True),
    Column("rank", Integer, primary_key=True, autoincrement=False),
    Column("incarnation", BigInteger, primary_key=True, autoincrement=False),
    Column("pid", BigInteger),
    Column("started_at", Moment, nullable=False),
    Column("ended_at", Moment),
    Column("exit_code", Integer),
    Column("exit_signal", Integer),
    Column("retry_class", String(32)),
    Column("reason", Text),
    Column("message", Text),
    Column("step_at_start", BigInteger),
    Column("step_at_end", BigInteger),
    Index(None, "job_id", "started_at", "rank", "incarnation"),
)

MEMBERS: Final = Table(
    "members",
    METADATA,
    Column("job_id", ForeignKey(JOBS.c.job_id, ondelete="CASCADE"), primary_key=True),
    Column("worker_id", BigInteger, primary_key=True, autoincrement=False),
    Column("rank", Integer, nullable=False),
    Column("incarnation", BigInteger, nullable=False),
    Column("state", String(32), nullable=False),
    Column("node", Text),
    Column("gpu_count", Integer, nullable=False),
    Column("backend", String(32)),
    Column("joined_at", Moment, nullable=False),
    Column("joined_step", BigInteger),
    Column("last_heartbeat_at", Moment),
)

DEPARTURES: Final = Table(
    "departures",
    METADATA,
    Column("job_id", ForeignKey(JOBS.c.job_id, ondelete="CASCADE"), primary_key=True),
    Column("worker_id", BigInteger, primary_key=True, autoincrement=False),
)

COMMITS: Final = Table(
    "commits",
    METADATA,
    Column("job_id", ForeignKey(JOBS.c.job_id, ondelete="CASCADE"), primary_key=True),
    Column("step", BigInteger, primary_key=True, autoincrement=False),
    Column("generation", BigInteger, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("digest", String(64), nullable=False),
    Column("consumed", BigInteger, nullable=False),
    Column("consumed_hash", Unsigned, nullable=False),
    Column("saved_at", Moment, nullable=False),
)

EPOCHS: Final = Table(
    "epochs",
    METADATA,
    Column("job_id", ForeignKey(JOBS.c.job_id, ondelete="CASCADE"), primary_key=True),
    Column("epoch", BigInteger, primary_key=True, autoincrement=False),
    Column("samples", BigInteger, nullable=False),
    Column("hash_sum", Unsigned, nullable=False),
    Column("expected_samples", BigInteger, nullable=False),
    Column("expected_hash_sum", Unsigned, nullable=False),
)

EVENTS: Final = Table(
    "events",
    METADATA,
    Column("event_id", RISING, primary_key=True),
    Column("job_id", ForeignKey(JOBS.c.job_id, ondelete="CASCADE"), nullable=False),
    Column("at", Moment, nullable=False),
    Column("kind", String(64), nullable=False),
    Column("message", Text, nullable=False),
    Column("rank", Integer),
    Column("incarnation", BigInteger),
    Column("actor", String(255)),
    Index(None, "job_id", "event_id"),
    sqlite_autoincrement=True,  # an id is never used again, not even that of a deleted event
)

ANSWERS: Final = Table(
    "answers",
    METADATA,
    Column("principal", String(255), primary_key=True),
    Column("key", String(255), primary_key=True),
    Column("request_sha256", String(64), nullable=False),
    Column("job", Json(Job), nullable=False),
    Column("created_at", Moment, nullable=False, index=True),
)

LEASES: Final = Table(
    "leases",
    METADATA,
    Column("name", String(64), primary_key=True),
    Column("epoch", BigInteger, nullable=False),
    Column("beat", BigInteger, nullable=False),
    Column("owner", String(255), nullable=False),
    Column("process", Json(ProcessRecord), nullable=False),
    Column("address", String(255), nullable=False),
    Column("held", Boolean, nullable=False),  # false: given back; the epoch is remembered
)

TOKENS: Final = Table(
    "tokens",
    METADATA,
    Column("token_id", String(12), primary_key=True),
    Column("name", String(63), nullable=False),
    Column("scope", words(Scope), nullable=False),
    Column("sha256", String(64), nullable=False),
    Column("created_at", Moment, nullable=False),
    Column("created_by", String(255)),
    Column("expires_at", Moment),
    Column("revoked_at", Moment),
    Column("last_used_at", Moment),
)
