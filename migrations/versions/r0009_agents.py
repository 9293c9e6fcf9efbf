"""Agents by host: one per job and host instead of one per job, and the host of each rank.

The columns of the one agent stay in `jobs`, for the release before this one.
"""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"

MOVED = """
INSERT INTO agents (job_id, host, generation, state, process, token_sha256)
SELECT job_id, 'local', generation, 'unreachable', agent, agent_token_sha256
FROM jobs WHERE generation > 0
"""


def upgrade() -> None:
    job = sa.ForeignKey("jobs.job_id", name="fk_agents_job_id", ondelete="CASCADE")
    op.create_table(
        "agents",
        sa.Column("job_id", sa.String(63), job, nullable=False),
        sa.Column("host", sa.String(63), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(32), nullable=False),
        sa.Column("process", sa.Text()),
        sa.Column("token_sha256", sa.String(64)),
        sa.PrimaryKeyConstraint("job_id", "host", name="pk_agents"),
    )
    op.execute(MOVED)
    host = sa.Column("host", sa.String(63), nullable=False, server_default="local")
    op.add_column("workers", host)
