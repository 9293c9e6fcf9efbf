"""Tokens, and who caused an event.

This file is frozen: it uses plain types, because those of `database.tables` may change.
"""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    # A process of the release before names no actor.
    op.add_column("events", sa.Column("actor", sa.String(255)))
    op.create_table(
        "tokens",
        sa.Column("token_id", sa.String(12), nullable=False),
        sa.Column("name", sa.String(63), nullable=False),
        sa.Column("scope", sa.String(32), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("created_by", sa.String(255)),
        sa.Column("expires_at", sa.BigInteger()),
        sa.Column("revoked_at", sa.BigInteger()),
        sa.Column("last_used_at", sa.BigInteger()),
        sa.PrimaryKeyConstraint("token_id", name="pk_tokens"),
    )
