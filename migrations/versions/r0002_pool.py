"""Elastic synchronous jobs: requested size and pause, the pool, its checkpoints and epochs.

This file is frozen: it uses plain types, because those of `database.tables` may change.
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("wanted_world_size", sa.Integer()))
    op.add_column(
        "jobs",
        sa.Column("layout_generation", sa.BigInteger(), nullable=False, server_default="0"),
    )
    op.add_column(
        "jobs",
        # The default also serves processes of the release before, which name no such column.
        sa.Column("pause_request", sa.Boolean(), nullable=False, server_default=sa.false()),
    )
    op.create_table(
        "members",
        sa.Column("job_id", sa.String(63), nullable=False),
        sa.Column("worker_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("incarnation", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(32), nullable=False),
        sa.Column("node", sa.Text()),
        sa.Column("gpu_count", sa.Integer(), nullable=False),
        sa.Column("backend", sa.String(32)),
        sa.Column("joined_at", sa.BigInteger(), nullable=False),
        sa.Column("joined_step", sa.BigInteger()),
        sa.Column("last_heartbeat_at", sa.BigInteger()),
        sa.PrimaryKeyConstraint("job_id", "worker_id", name="pk_members"),
        _of_a_job("members"),
    )
    op.create_table(
        "departures",
        sa.Column("job_id", sa.String(63), nullable=False),
        sa.Column("worker_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.PrimaryKeyConstraint("job_id", "worker_id", name="pk_departures"),
        _of_a_job("departures"),
    )
    op.create_table(
        "commits",
        sa.Column("job_id", sa.String(63), nullable=False),
        sa.Column("step", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("consumed", sa.BigInteger(), nullable=False),
        sa.Column("consumed_hash", sa.BigInteger(), nullable=False),
        sa.Column("saved_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("job_id", "step", name="pk_commits"),
        _of_a_job("commits"),
    )
    op.create_table(
        "epochs",
        sa.Column("job_id", sa.String(63), nullable=False),
        sa.Column("epoch", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("samples", sa.BigInteger(), nullable=False),
        sa.Column("hash_sum", sa.BigInteger(), nullable=False),
        sa.Column("expected_samples", sa.BigInteger(), nullable=False),
        sa.Column("expected_hash_sum", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("job_id", "epoch", name="pk_epochs"),
        _of_a_job("epochs"),
    )


def _of_a_job(table: str) -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint(
        ["job_id"], ["jobs.job_id"], name=f"fk_{table}_job_id", ondelete="CASCADE"
    )
