"""One row for each attempt of a rank, and counters of its failures.

This file is frozen: it uses plain types, because those of `database.tables` may change.
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    # The defaults also serve processes of the releases before, which name no such columns.
    for column in (
        sa.Column("endings", sa.Text(), nullable=False, server_default="{}"),
        sa.Column("fruitless", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("proven_step", sa.BigInteger(), nullable=False, server_default="-1"),
    ):
        op.add_column("workers", column)
    op.create_table(
        "incarnations",
        sa.Column("job_id", sa.String(63), nullable=False),
        sa.Column("rank", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("incarnation", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("pid", sa.BigInteger()),
        sa.Column("started_at", sa.BigInteger(), nullable=False),
        sa.Column("ended_at", sa.BigInteger()),
        sa.Column("exit_code", sa.Integer()),
        sa.Column("exit_signal", sa.Integer()),
        sa.Column("retry_class", sa.String(32)),
        sa.Column("reason", sa.Text()),
        sa.Column("message", sa.Text()),
        sa.Column("step_at_start", sa.BigInteger()),
        sa.Column("step_at_end", sa.BigInteger()),
        sa.PrimaryKeyConstraint("job_id", "rank", "incarnation", name="pk_incarnations"),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.job_id"], name="fk_incarnations_job_id", ondelete="CASCADE"
        ),
    )
    op.create_index(
        "ix_incarnations_job_id_started_at_rank_incarnation",
        "incarnations",
        ["job_id", "started_at", "rank", "incarnation"],
    )
