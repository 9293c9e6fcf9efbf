"""Faults that users ask for, and sweeps of schedulers."""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("faults", sa.Text(), nullable=False, server_default="[]"))
    op.add_column("hosts", sa.Column("sweep", sa.Text()))
    op.add_column("hosts", sa.Column("sweep_request", sa.Text()))
