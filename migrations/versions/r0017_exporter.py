"""After the loop of a job, the rank that exports its model."""

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("exporter", sa.BigInteger()))
