"""The statements of each transaction, for copies of the database on other machines."""

import sqlalchemy as sa
from alembic import op

revision = "r0002"
down_revision = "r0001"


def upgrade() -> None:
    op.create_table(
        "outbox",
        sa.Column("number", sa.Integer, primary_key=True),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("has_majority", sa.Boolean, nullable=False),
        sa.Column("statements", sa.LargeBinary, nullable=False),
    )
    op.create_table("image", sa.Column("id", sa.String(32), primary_key=True))
