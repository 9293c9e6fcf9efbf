"""What hosts have reported, and which ranks a job has left out."""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    op.create_table(
        "hosts",
        sa.Column("host", sa.String(63), nullable=False),
        sa.Column("facts", sa.Text()),
        sa.Column("seen_at", sa.BigInteger()),
        sa.Column("problem", sa.Text()),
        sa.Column("shared_dir", sa.Text()),
        sa.PrimaryKeyConstraint("host", name="pk_hosts"),
    )
    op.add_column("jobs", sa.Column("numeric_environment", sa.Text()))
    shared_hosts = sa.Column("shared_hosts", sa.Text(), nullable=False, server_default="[]")
    op.add_column("jobs", shared_hosts)
    op.add_column(
        "workers",
        sa.Column("in_service", sa.Boolean(), nullable=False, server_default=sa.true()),
    )
