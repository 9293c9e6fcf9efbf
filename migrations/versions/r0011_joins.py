"""Hosts that asked to join a job; a worker's device apart from its transport."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    wanted = sa.Column("wanted_hosts", sa.Text(), nullable=False, server_default="{}")
    op.add_column("jobs", wanted)
    op.add_column("members", sa.Column("transport", sa.String(32)))
    # Until now `backend` held the transport, and the device was not recorded.
    op.execute("UPDATE members SET transport = backend, backend = NULL")
