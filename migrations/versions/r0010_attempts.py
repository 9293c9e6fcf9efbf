"""One word for one thing: *attempt*, *group round*. The columns of a job's only agent are dropped.

Processes of earlier releases cannot use the database any more.
"""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"

MOVED = """
INSERT INTO attempts
SELECT job_id, rank, incarnation, pid, started_at, ended_at, exit_code, exit_signal, retry_class,
 reason, message, step_at_start, step_at_end
FROM incarnations
"""


def upgrade() -> None:
    for table in ("workers", "members", "events"):
        op.execute(f"ALTER TABLE {table} RENAME COLUMN incarnation TO attempt")
    op.execute("ALTER TABLE jobs RENAME COLUMN layout_generation TO group_round")
    # A new table, because SQLite renames neither constraints nor indexes.
    job = sa.ForeignKey("jobs.job_id", name="fk_attempts_job_id", ondelete="CASCADE")
    op.create_table(
        "attempts",
        sa.Column("job_id", sa.String(63), job, nullable=False),
        sa.Column("rank", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("attempt", sa.BigInteger(), autoincrement=False, nullable=False),
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
        sa.PrimaryKeyConstraint("job_id", "rank", "attempt", name="pk_attempts"),
    )
    op.execute(MOVED)
    op.drop_table("incarnations")
    op.create_index(
        "ix_attempts_job_id_started_at_rank_attempt",
        "attempts",
        ["job_id", "started_at", "rank", "attempt"],
    )
    for column in ("generation", "agent", "agent_token_sha256"):
        op.drop_column("jobs", column)
