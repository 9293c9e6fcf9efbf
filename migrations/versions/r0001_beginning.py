"""The tables of the first release.

This file is frozen: it uses plain types, because those of `database.tables` may change.
"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "jobs",
        sa.Column("job_id", sa.String(63), nullable=False),
        sa.Column("uid", sa.String(64), nullable=False),
        sa.Column("spec", sa.Text(), nullable=False),
        sa.Column("status", sa.String(32), nullable=False),
        sa.Column("reason", sa.Text()),
        sa.Column("message", sa.Text()),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("updated_at", sa.BigInteger(), nullable=False),
        sa.Column("started_at", sa.BigInteger()),
        sa.Column("finished_at", sa.BigInteger()),
        sa.Column("exit_code", sa.Integer()),
        sa.Column("stop_request", sa.String(32)),
        sa.Column("stop_grace_seconds", sa.Double()),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("agent", sa.Text()),
        sa.Column("agent_token_sha256", sa.String(64)),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("job_id", name="pk_jobs"),
        sa.UniqueConstraint("uid", name="uq_jobs_uid"),
    )
    op.create_index("ix_jobs_created_at_job_id", "jobs", ["created_at", "job_id"])
    op.create_index("ix_jobs_status_created_at", "jobs", ["status", "created_at"])
    op.create_table(
        "workers",
        sa.Column("job_id", sa.String(63), nullable=False),
        sa.Column("rank", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("incarnation", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(32), nullable=False),
        sa.Column("process", sa.Text()),
        sa.Column("restarts", sa.BigInteger(), nullable=False),
        sa.Column("failures", sa.BigInteger(), nullable=False),
        sa.Column("finished", sa.Boolean(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("total_steps", sa.BigInteger()),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("shard_idx", sa.BigInteger(), nullable=False),
        sa.Column("line_idx", sa.BigInteger(), nullable=False),
        sa.Column("loss", sa.Double()),
        sa.Column("metrics", sa.Text(), nullable=False),
        sa.Column("throughput_steps_per_sec", sa.Double(), nullable=False),
        sa.Column("checkpoints_saved", sa.BigInteger(), nullable=False),
        sa.Column("last_checkpoint_step", sa.BigInteger()),
        sa.Column("last_heartbeat_at", sa.BigInteger()),
        sa.Column("exit_code", sa.Integer()),
        sa.Column("exit_signal", sa.Integer()),
        sa.PrimaryKeyConstraint("job_id", "rank", name="pk_workers"),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.job_id"], name="fk_workers_job_id", ondelete="CASCADE"
        ),
    )
    op.create_table(
        "events",
        sa.Column("event_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("job_id", sa.String(63), nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.Column("kind", sa.String(64), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("rank", sa.Integer()),
        sa.Column("incarnation", sa.BigInteger()),
        sa.PrimaryKeyConstraint("event_id", name="pk_events"),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.job_id"], name="fk_events_job_id", ondelete="CASCADE"
        ),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_events_job_id_event_id", "events", ["job_id", "event_id"])
    op.create_table(
        "answers",
        sa.Column("principal", sa.String(255), nullable=False),
        sa.Column("key", sa.String(255), nullable=False),
        sa.Column("request_sha256", sa.String(64), nullable=False),
        sa.Column("job", sa.Text(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("principal", "key", name="pk_answers"),
    )
    op.create_index("ix_answers_created_at", "answers", ["created_at"])
    op.create_table(
        "leases",
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("beat", sa.BigInteger(), nullable=False),
        sa.Column("owner", sa.String(255), nullable=False),
        sa.Column("process", sa.Text(), nullable=False),
        sa.Column("address", sa.String(255), nullable=False),
        sa.Column("held", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_leases"),
    )
