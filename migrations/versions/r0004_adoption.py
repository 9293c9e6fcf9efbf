"""Columns for adopting running ranks: their port, and the checkpoints of earlier attempts.

This file is frozen: it uses plain types, because those of `database.tables` may change.
"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    # The defaults also serve processes of the release before, which name no such columns.
    op.add_column(
        "jobs", sa.Column("master_port", sa.Integer(), nullable=False, server_default="0")
    )
    op.add_column(
        "workers",
        sa.Column("checkpoints_before", sa.BigInteger(), nullable=False, server_default="0"),
    )
