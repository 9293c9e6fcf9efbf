"""Checkpoints that a user requests: how many were, and how many of them are durable."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    for name in ("checkpoint_requests", "checkpoint_requests_done"):
        column = sa.Column(name, sa.BigInteger(), nullable=False, server_default="0")
        op.add_column("jobs", column)
